"""One layer in two libraries: with the same weights PyG's and DGL's give the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fastgraph
from tests.dgl.graphs import dgl, graph
from tests.graphs import random_edges

import dgl.nn as dglnn  # isort: skip

pyg = pytest.importorskip("torch_geometric.nn")

IN, OUT, HEADS, RELATIONS = 6, 5, 3, 3
NODES = 30


class Pair(NamedTuple):
    """The layer of DGL and that of PyG.

    Attributes:
        dgl: the layer.
        pyg: the layer.
        same: parameters that are the same in both, as tensors of the same shape.
    """

    dgl: nn.Module
    pyg: nn.Module
    same: list[tuple[Tensor, Tensor]]


def gat() -> Pair:
    ours = dglnn.GATConv(IN, OUT, HEADS, residual=True)
    theirs = pyg.GATConv(IN, OUT, HEADS, add_self_loops=False, residual=True)
    same = [
        (ours.fc.weight, theirs.lin.weight),
        (ours.attn_l, theirs.att_src),
        (ours.attn_r, theirs.att_dst),
        (ours.res_fc.weight, theirs.res.weight),
        (ours.res_fc.bias, theirs.bias),
    ]
    return Pair(ours, theirs, same)


def gatv2(shared: bool = False) -> Pair:
    ours = dglnn.GATv2Conv(IN, OUT, HEADS, share_weights=shared, bias=False)
    theirs = pyg.GATv2Conv(IN, OUT, HEADS, add_self_loops=False, share_weights=shared, bias=False)
    for linear in (theirs.lin_l, theirs.lin_r):  # DGL's have no bias either
        linear.register_parameter("bias", None)
    same = [
        (ours.fc_src.weight, theirs.lin_l.weight),
        (ours.fc_dst.weight, theirs.lin_r.weight),
        (ours.attn, theirs.att),
    ]
    return Pair(ours, theirs, same)


def dot() -> Pair:
    ours = dglnn.DotGatConv(IN, OUT, HEADS)
    theirs = pyg.TransformerConv(IN, OUT, HEADS, root_weight=False, bias=False)
    linears = (theirs.lin_query, theirs.lin_key, theirs.lin_value)
    return Pair(ours, theirs, [(ours.fc.weight, linear.weight) for linear in linears])


def agnn() -> Pair:
    ours, theirs = dglnn.AGNNConv(0.7), pyg.AGNNConv(add_self_loops=False)
    return Pair(ours, theirs, [(ours.beta, theirs.beta)])


def gcn() -> Pair:
    ours, theirs = dglnn.GraphConv(IN, OUT), pyg.GCNConv(IN, OUT)
    return Pair(ours, theirs, [(ours.weight.t(), theirs.lin.weight), (ours.bias, theirs.bias)])


def graph_conv() -> Pair:
    ours = dglnn.GraphConv(IN, OUT, norm="none")
    theirs = pyg.GraphConv(IN, OUT)
    nn.init.zeros_(theirs.lin_root.weight)
    same = [(ours.weight.t(), theirs.lin_rel.weight), (ours.bias, theirs.lin_rel.bias)]
    return Pair(ours, theirs, same)


def sage(kind: str) -> Pair:
    ours = dglnn.SAGEConv(IN, OUT, kind)
    is_pool = kind == "pool"
    theirs = pyg.SAGEConv(IN, OUT, aggr="max" if is_pool else "mean", project=is_pool)
    same = [
        (ours.fc_neigh.weight, theirs.lin_l.weight),
        (ours.fc_self.weight, theirs.lin_r.weight),
        (ours.fc_self.bias, theirs.lin_l.bias),
    ]
    if is_pool:
        same += [
            (ours.fc_pool.weight, theirs.lin.weight),
            (ours.fc_pool.bias, theirs.lin.bias),
        ]
    return Pair(ours, theirs, same)


def gin() -> Pair:
    ours = dglnn.GINConv(nn.Linear(IN, OUT), "sum", init_eps=0.1)
    theirs = pyg.GINConv(nn.Linear(IN, OUT), eps=0.1)
    mlps = ours.apply_func, theirs.nn
    same = [(mlps[0].weight, mlps[1].weight), (mlps[0].bias, mlps[1].bias)]
    return Pair(ours, theirs, same)


def sg() -> Pair:
    ours, theirs = dglnn.SGConv(IN, OUT, k=2), pyg.SGConv(IN, OUT, K=2)
    same = [(ours.fc.weight, theirs.lin.weight), (ours.fc.bias, theirs.lin.bias)]
    return Pair(ours, theirs, same)


def tag() -> Pair:
    ours, theirs = dglnn.TAGConv(IN, OUT, k=2), pyg.TAGConv(IN, OUT, K=2)
    parts = ours.lin.weight.split(IN, dim=1)
    same = [(part, linear.weight) for part, linear in zip(parts, theirs.lins, strict=True)]
    return Pair(ours, theirs, [*same, (ours.lin.bias, theirs.bias)])


def appnp() -> Pair:
    return Pair(dglnn.APPNPConv(k=3, alpha=0.2), pyg.APPNP(K=3, alpha=0.2), [])


def relations() -> Pair:
    ours = dglnn.RelGraphConv(IN, OUT, RELATIONS)
    theirs = pyg.RGCNConv(IN, OUT, RELATIONS, aggr="add")
    same = [
        (ours.linear_r.W, theirs.weight),
        (ours.loop_weight, theirs.root),
        (ours.h_bias, theirs.bias),
    ]
    return Pair(ours, theirs, same)


PAIRS: dict[str, Callable[[], Pair]] = {
    "GATConv": gat,
    "GATv2Conv": gatv2,
    "GATv2Conv with shared weights": lambda: gatv2(shared=True),
    "DotGatConv": dot,
    "AGNNConv": agnn,
    "GraphConv": gcn,
    "GraphConv without norm": graph_conv,
    "SAGEConv mean": lambda: sage("mean"),
    "SAGEConv pool": lambda: sage("pool"),
    "GINConv": gin,
    "SGConv": sg,
    "TAGConv": tag,
    "APPNPConv": appnp,
    "RelGraphConv": relations,
}


def symmetric_edges() -> Tensor:
    """Without self-loops, since each library adds its own, and with an edge at every node.

    Symmetric, because DGL normalises sources by the degrees out and PyG by those in.
    """
    edges = random_edges(NODES, NODES, 100)
    ring = torch.stack([torch.arange(NODES), torch.arange(NODES).roll(1)])
    edges = torch.cat([edges[:, edges[0] != edges[1]], ring], dim=1)
    return torch.cat([edges, edges.flip(0)], dim=1)


@pytest.mark.parametrize("name", PAIRS)
def test_same_numbers(name: str) -> None:
    pair, edge_index = PAIRS[name](), symmetric_edges()
    with torch.no_grad():
        for mine, _ in pair.same:
            nn.init.uniform_(mine, -0.5, 0.5)
        for mine, theirs in pair.same:
            theirs.copy_(mine)
    x = torch.randn(NODES, IN)
    g = graph(edge_index, NODES)
    adds_loops = isinstance(pair.pyg, (pyg.GCNConv, pyg.SGConv, pyg.APPNP))
    mine_graph = dgl.add_self_loop(g) if adds_loops else g
    more = (torch.arange(edge_index.shape[1]) % RELATIONS,) if "Rel" in name else ()

    def output_and_gradient(compute: Callable[[Tensor], Tensor]) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        out = compute(leaf).flatten(1)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), leaf)]

    with fastgraph.enabled(min_edges=0):
        ours = output_and_gradient(lambda x: pair.dgl(mine_graph, x, *more))
        others = output_and_gradient(lambda x: pair.pyg(x, edge_index, *more))
    torch.testing.assert_close(ours, others, atol=1e-4, rtol=1e-4)
    fell_back = {row.layer for row in fastgraph.status().rows if row.fell_back}
    assert fell_back <= {"RGCNConv", "dgl.gsddmm", "AGNNConv"}, fastgraph.status()


def test_layers_of_one_name_are_counted_apart() -> None:
    edge_index = symmetric_edges()
    g, x = graph(edge_index, NODES), torch.randn(NODES, IN)
    with fastgraph.enabled(min_edges=0):
        dglnn.GATConv(IN, OUT, HEADS)(g, x)
        assert fastgraph.status().row("GATConv").routed == 1  # there is one only
        for _ in range(2):
            pyg.GATConv(IN, OUT, HEADS)(x, edge_index)
    status = fastgraph.status()
    assert status.row("GATConv").routed == 2
    assert status.row("dgl.GATConv").routed == 1
    assert "dgl.GATConv" in str(status)
