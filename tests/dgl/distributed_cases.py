"""Cases for tests of sharded graphs of DGL: layers, operations and functions."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fastgraph.dist as fgd
from tests.dgl.graphs import dgl
from tests.dist.graphs import NUM_EDGES, NUM_FEATURES, NUM_NODES, graph

import dgl.function as fn  # isort: skip
import dgl.nn as dnn  # isort: skip
from dgl.nn.functional import edge_softmax  # isort: skip

D, C, H, K = NUM_FEATURES, 8, 2, 3
LONELY = {"allow_zero_in_degree": True}


class Case(NamedTuple):
    """A layer, or nothing, and what is done with it and a graph.

    Attributes:
        make: the layer.
        call: takes the layer and the graph.
        routed: the label under which a call takes its route; ``""`` for none.
        gathers: what may be gathered.
    """

    make: Callable[[], nn.Module]
    call: Callable[[Any, Any], Tensor]
    routed: str = ""
    gathers: frozenset[str] = frozenset()


def whole_graph() -> Any:
    """Unsorted edges with duplicates and self-loops; the last five nodes have none."""
    data = graph()
    found = dgl.graph(tuple(data.edge_index), num_nodes=NUM_NODES)
    found.ndata["x"], found.ndata["w"] = data.x, data.w
    found.ndata["kind"] = torch.arange(NUM_NODES) % 2
    found.edata["e"], found.edata["w"] = data.edge_attr, data.edge_weight
    found.edata["column"] = data.edge_weight.unsqueeze(1)
    found.edata["kind"] = torch.arange(NUM_EDGES) % K
    return found


def several_relations() -> Any:
    """Two kinds of nodes and three relations, one of which has no edge."""
    g = torch.Generator().manual_seed(2)
    ends = lambda n, m, e: (  # noqa: E731
        torch.randint(0, n, (e,), generator=g),
        torch.randint(0, m, (e,), generator=g),
    )
    found = dgl.heterograph(
        {
            ("author", "writes", "paper"): ends(23, NUM_NODES, 90),
            ("paper", "by", "author"): ends(NUM_NODES, 23, 70),
            ("paper", "cites", "paper"): ends(NUM_NODES, NUM_NODES, 0),
        },
        {"author": 23, "paper": NUM_NODES},
    )
    found.nodes["author"].data["x"] = torch.randn(23, D, generator=g)
    found.nodes["paper"].data["x"] = torch.randn(NUM_NODES, D, generator=g)
    return found


def plain(layer: Any, g: Any) -> Any:
    return layer(g, g.ndata["x"])


def weighted(layer: Any, g: Any) -> Any:
    return layer(g, g.ndata["x"], edge_weight=g.edata["w"])


def featured(layer: Any, g: Any) -> Any:
    return layer(g, g.ndata["x"], g.edata["e"])


def joined(values: Any) -> Tensor:
    return torch.cat([value.flatten() for value in values])


def with_features_of_loops(layer: Any, g: Any) -> Tensor:
    """Of a graph in which all nodes have edges."""
    looped = dgl.add_self_loop(g, fill_data=0.5)
    return joined(layer(looped, looped.ndata["x"], looped.edata["e"]))


class OfBuiltIns(nn.Module):
    """Message passing and what is done to single edges, by DGL's functions."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(D, H * C), nn.Linear(D, H * C)

    def forward(self, g: Any, x: Tensor) -> Tensor:
        with g.local_scope():
            g.ndata["q"] = self.query(x).view(-1, H, C)
            g.ndata["k"] = self.key(x).view(-1, H, C)
            g.apply_edges(fn.u_dot_v("k", "q", "score"))
            g.edata["a"] = edge_softmax(g, g.edata["score"] / C**0.5)
            g.update_all(fn.u_mul_e("k", "a", "m"), fn.sum("m", "out"))
            return g.ndata["out"].flatten(1)


class OfUsers(nn.Module):
    """Message passing by functions of its own, as in DGL's tutorial of GAT."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.attend = nn.Linear(D, C), nn.Linear(2 * C, 1)

    def score(self, edges: Any) -> dict[str, Tensor]:
        both = torch.cat([edges.src["z"], edges.dst["z"]], dim=1)
        return {"e": nn.functional.leaky_relu(self.attend(both))}

    def message(self, edges: Any) -> dict[str, Tensor]:
        return {"z": edges.src["z"] * edges.data["w"].view(-1, 1), "e": edges.data["e"]}

    def reduce(self, nodes: Any) -> dict[str, Tensor]:
        alpha = nn.functional.softmax(nodes.mailbox["e"], dim=1)
        return {"out": nn.functional.elu((alpha * nodes.mailbox["z"]).sum(1) + 1)}

    def forward(self, g: Any, x: Tensor) -> Tensor:
        with g.local_scope():
            g.ndata["z"] = self.project(x)
            g.apply_edges(self.score)
            g.update_all(self.message, self.reduce)
            return g.ndata["out"]


class Dropping(nn.Module):
    """A block of a reversible layer, which draws again in its backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = dnn.SAGEConv(D // 2, D // 2, "mean")

    def forward(self, g: Any, x: Tensor) -> Tensor:
        return self.conv(g, nn.functional.dropout(x.relu(), 0.3, self.training))


OF_NEWER = {
    f"GatedGCNConv, batch_norm={norm}": Case(
        lambda norm=norm: dnn.GatedGCNConv(D, 3, C, batch_norm=norm),  # type: ignore[misc]
        lambda layer, g: joined(layer(g, g.ndata["x"], g.edata["e"])),
        "dgl.GatedGCNConv",
    )
    for norm in (False, True)
    if hasattr(dnn, "GatedGCNConv")
}

LAYERS = {
    "GraphConv": Case(lambda: dnn.GraphConv(D, C, **LONELY), plain, "dgl.GraphConv"),
    "GraphConv, left": Case(
        lambda: dnn.GraphConv(D, C, norm="left", **LONELY), plain, "dgl.GraphConv"
    ),
    "GraphConv, weighted": Case(
        lambda: dnn.GraphConv(D, 3, norm="right", **LONELY), weighted, "dgl.GraphConv"
    ),
    "SAGEConv, mean": Case(lambda: dnn.SAGEConv(D, C, "mean"), weighted, "dgl.SAGEConv"),
    "SAGEConv, gcn": Case(lambda: dnn.SAGEConv(D, C, "gcn"), plain, "dgl.SAGEConv"),
    "SAGEConv, pool": Case(lambda: dnn.SAGEConv(D, C, "pool"), plain, "dgl.SAGEConv"),
    "SAGEConv, lstm": Case(lambda: dnn.SAGEConv(D, C, "lstm"), plain),
    "GroupRevRes": Case(
        lambda: dnn.GroupRevRes(dnn.SAGEConv(D // 2, D // 2, "mean"), 2),
        lambda layer, g: layer(g, g.ndata["x"] * 2) + 1,  # it frees what it gives, backward
    ),
    "GroupRevRes, dropout": Case(
        lambda: dnn.GroupRevRes(Dropping(), 2),
        lambda layer, g: layer(g, layer(g, g.ndata["x"] * 2)) + torch.rand(D),
    ),
    "GATConv": Case(
        lambda: dnn.GATConv(D, C, H, 0.2, 0.3, residual=True, **LONELY), plain, "dgl.GATConv"
    ),
    "GATConv, attention": Case(
        lambda: dnn.GATConv(D, C, H, **LONELY),
        lambda layer, g: joined(layer(g, g.ndata["x"], get_attention=True)),
        "dgl.GATConv",
    ),
    "GATConv, weighted": Case(lambda: dnn.GATConv(D, C, H, **LONELY), weighted, "dgl.GATConv"),
    "GATv2Conv": Case(
        lambda: dnn.GATv2Conv(D, C, H, share_weights=True, **LONELY), plain, "dgl.GATv2Conv"
    ),
    "DotGatConv": Case(lambda: dnn.DotGatConv(D, C, H, **LONELY), plain, "dgl.DotGatConv"),
    "EdgeGATConv": Case(lambda: dnn.EdgeGATConv(D, 3, C, H, **LONELY), featured, "dgl.EdgeGATConv"),
    "AGNNConv": Case(lambda: dnn.AGNNConv(**LONELY), plain, "dgl.AGNNConv"),
    "RelGraphConv": Case(
        lambda: dnn.RelGraphConv(D, C, K, "basis", 2),
        lambda layer, g: layer(g, g.ndata["x"], g.edata["kind"], g.edata["w"].unsqueeze(1)),
        "dgl.RelGraphConv",
    ),
    "RelGraphConv, blocks": Case(
        lambda: dnn.RelGraphConv(D, C, K, "bdd", 2),
        lambda layer, g: layer(g, g.ndata["x"], g.edata["kind"]),
        "dgl.RelGraphConv",
    ),
    "HGTConv": Case(
        lambda: dnn.HGTConv(D, 4, H, 2, K),
        lambda layer, g: layer(g, g.ndata["x"], g.ndata["kind"], g.edata["kind"]),
        "dgl.HGTConv",
    ),
    "GINConv": Case(lambda: dnn.GINConv(nn.Linear(D, C), "max"), plain, "dgl.gspmm"),
    "GINEConv": Case(
        lambda: dnn.GINEConv(nn.Linear(D, C)),
        lambda layer, g: layer(g, g.ndata["x"], g.edata["e"].repeat(1, 3)[:, :D]),
        "dgl.update_all",
    ),
    "SGConv": Case(lambda: dnn.SGConv(D, C, 2, **LONELY), plain, "dgl.gspmm"),
    "TAGConv": Case(lambda: dnn.TAGConv(D, C, 2), plain, "dgl.gspmm"),
    "APPNPConv": Case(lambda: dnn.APPNPConv(3, 0.1, 0.2), plain, "dgl.gspmm"),
    "ChebConv": Case(lambda: dnn.ChebConv(D, C, 2), plain, "dgl.gspmm"),
    "GCN2Conv": Case(
        lambda: dnn.GCN2Conv(D, 1, **LONELY),
        lambda layer, g: layer(g, g.ndata["x"], g.ndata["x"] * 2),
        "dgl.gspmm",
    ),
    "NNConv": Case(lambda: dnn.NNConv(D, C, nn.Linear(3, D * C)), featured, "dgl.NNConv"),
    "CFConv": Case(lambda: dnn.CFConv(D, 3, C, C), featured, "dgl.CFConv"),
    "EGNNConv": Case(
        lambda: dnn.EGNNConv(D, C, C),
        lambda layer, g: joined(layer(g, g.ndata["x"], g.ndata["x"][:, :3].detach())),
        "dgl.EGNNConv",
    ),
    **OF_NEWER,
    "EdgeConv": Case(lambda: dnn.EdgeConv(D, C, **LONELY), plain),
    "GMMConv": Case(lambda: dnn.GMMConv(D, C, 3, 2, **LONELY), featured),
    "PNAConv": Case(
        lambda: dnn.PNAConv(D, C, ["mean", "max"], ["identity", "attenuation"], 2.5), plain
    ),
    "EdgeWeightNorm": Case(
        lambda: dnn.EdgeWeightNorm("both"), lambda layer, g: layer(g, g.edata["w"])
    ),
    "PNAConv, several": Case(
        lambda: dnn.PNAConv(D, C, ["mean", "std"], ["identity", "attenuation"], 2.5),
        plain,
        "dgl.update_all",
    ),
    "built-in functions": Case(OfBuiltIns, plain, "dgl.gspmm"),
    "functions of users": Case(OfUsers, plain, "dgl.update_all"),
}


def sent_and_reduced(message: Any, reduce: Any) -> Callable[[Any], Tensor]:
    def run(g: Any) -> Tensor:
        with g.local_scope():
            g.update_all(message, reduce)
            return g.ndata["out"]

    return run


def on_edges(message: Any) -> Callable[[Any], Tensor]:
    def run(g: Any) -> Tensor:
        with g.local_scope():
            g.apply_edges(message)
            return g.edata["m"]

    return run


def own_message(edges: Any) -> dict[str, Tensor]:
    return {"m": (edges.src["x"] - edges.dst["x"]).relu() * edges.data["w"].unsqueeze(1)}


def own_reduction(nodes: Any) -> dict[str, Tensor]:
    return {"out": nodes.mailbox["m"].cumsum(1).amax(1) + nodes.data["x"]}


def with_loops(g: Any) -> Tensor:
    looped = dgl.add_self_loop(dgl.remove_self_loop(g), fill_data=0.5)
    src, dst = looped.edges()
    degrees = looped.in_degrees(dst) + 2 * looped.out_degrees(src)
    return joined([src, dst, degrees, looped.edata["e"], dgl.ops.copy_u_sum(looped, g.ndata["x"])])


def with_reversed(g: Any) -> Tensor:
    both = dgl.add_reverse_edges(g, copy_edata=True)
    return dgl.ops.u_mul_e_sum(both, g.ndata["x"], both.edata["w"].unsqueeze(1))


def of_some_edges(g: Any) -> Tensor:
    some = dgl.edge_subgraph(g, g.edata["w"] > 0.4, relabel_nodes=False)
    return joined(
        [*some.edges(), some.edata["e"], dgl.ops.u_mul_v(some, some.ndata["x"], g.ndata["x"])]
    )


def of_some_nodes(g: Any) -> Tensor:
    some = dgl.node_subgraph(g, torch.arange(0, NUM_NODES, 3))
    return joined([some.edata["w"], some.ndata[dgl.NID], dgl.ops.copy_u_sum(some, some.ndata["x"])])


def partly_computed(g: Any) -> Tensor:
    with g.local_scope():
        g.apply_edges(fn.u_add_v("x", "x", "m"), torch.tensor([3, 4, 9]))
        return g.edata["m"]


def edited(g: Any) -> Tensor:
    other = g.clone()
    other.add_edges(torch.tensor([0, 3]), torch.tensor([2, 2]), {"w": torch.ones(2)})
    other.remove_edges(torch.tensor([5, 7]))
    other.add_nodes(2)
    padded = other.ndata["x"].sum(1)
    return joined(
        [*other.edges(), other.edata["w"], padded, dgl.ops.copy_e_sum(other, other.edata["w"])]
    )


def partly_set(g: Any) -> Tensor:
    with g.local_scope():
        g.ndata["y"] = g.ndata["x"] * 1
        g.nodes[torch.tensor([3, 1])].data["y"] = torch.ones(2, D)
        return g.ndata["y"]


def in_words(g: Any) -> Tensor:
    with g.local_scope():
        g.update_all(fn.copy_e("e", "m"), fn.mean("m", "mean"))
        text = f"{g} {g.idtype} {g.device} {g.ntypes} {g.num_nodes()} {g.is_homogeneous}"
    return torch.tensor([ord(letter) for letter in text], dtype=torch.float64)


def of_segments(g: Any) -> Tensor:
    """Ties, infinities, and segments of nothing, first, last and between."""
    x, lengths = g.ndata["x"].round(), torch.tensor([0, 20, 1, 0, NUM_NODES - 21, 0])
    endless = torch.where(x > 1, torch.inf, x)
    largest = dgl.ops.segment_reduce(lengths, endless, "max")
    return joined(
        [
            torch.where(largest.isinf(), 0.0, largest),
            dgl.ops.segment_reduce(lengths, x, "min"),
            dgl.ops.segment_reduce(lengths, x[:, 0], "max"),
        ]
    )


OPERATIONS: dict[str, tuple[Callable[[Any], Tensor], set[str]]] = {
    "edges": (lambda g: joined(g.edges("all")), set()),
    "ends of some edges": (lambda g: joined(g.find_edges(torch.tensor([7, 3]))), set()),
    "degrees": (lambda g: joined([g.in_degrees(), g.out_degrees([4, 2])]), set()),
    "words": (in_words, set()),
    "self-loops": (with_loops, set()),
    "some edges": (of_some_edges, set()),
    "edits": (edited, set()),
    "some nodes set": (partly_set, set()),
    "reversed": (
        lambda g: dgl.ops.copy_u_mean(dgl.reverse(g, copy_edata=True), g.ndata["x"]),
        set(),
    ),
    "reversed edges added": (with_reversed, set()),
    "both directions": (
        lambda g: dgl.ops.copy_u_sum(dgl.to_bidirected(g), g.ndata["x"]),
        {"dgl.transforms.functional.to_simple"},
    ),
    "int32": (lambda g: dgl.ops.copy_u_sum(g.int(), g.ndata["x"]), set()),
    "sum of u_add_e": (
        sent_and_reduced(fn.u_add_e("w", "w", "m"), fn.sum("m", "out")), set(),
    ),
    "mean of u_sub_e": (
        lambda g: dgl.ops.u_sub_e_mean(g, g.ndata["x"], g.edata["e"].sum(1, keepdim=True)),
        set(),
    ),
    "max of u_mul_e": (
        sent_and_reduced(fn.u_mul_e("x", "column", "m"), fn.max("m", "out")), set(),
    ),
    "min of copy_e": (sent_and_reduced(fn.copy_e("e", "m"), fn.min("m", "out")), set()),
    "max of ties": (lambda g: dgl.ops.copy_u_max(g, g.ndata["x"].round().relu()), set()),
    "u_add_v": (on_edges(fn.u_add_v("x", "x", "m")), set()),
    "v_sub_u": (on_edges(fn.v_sub_u("x", "x", "m")), set()),
    "u_div_v": (lambda g: dgl.ops.u_div_v(g, g.ndata["x"], g.ndata["x"].exp()), set()),
    "e_mul_v": (
        lambda g: dgl.ops.e_mul_v(g, g.edata["w"].unsqueeze(1), g.ndata["x"]), set(),
    ),
    "e_dot_u": (
        lambda g: dgl.ops.e_dot_u(g, g.edata["e"], g.ndata["x"][:, :3]), set(),
    ),
    "copy_v": (lambda g: dgl.ops.copy_v(g, g.ndata["x"]), set()),
    "softmax of sources": (lambda g: edge_softmax(g, g.edata["e"], norm_by="src"), set()),
    "softmax of some": (
        lambda g: edge_softmax(g, g.edata["e"][:9], eids=torch.arange(9)),
        set(),
    ),
    "own message": (sent_and_reduced(own_message, fn.sum("m", "out")), set()),
    "own reduction": (sent_and_reduced(fn.copy_u("x", "m"), own_reduction), set()),
    "edges between": (
        lambda g: g.has_edges_between([1, 2, 3], [2, 3, 4]),
        {"dgl.heterograph_index.has_edges_between"},
    ),
    "some nodes": (of_some_nodes, {"dgl.heterograph_index.node_subgraph"}),
    "mean of nodes": (lambda g: dgl.mean_nodes(g, "x"), set()),
    "maxima of nodes": (lambda g: dgl.max_nodes(g, "x"), set()),
    "extrema of segments": (of_segments, set()),
    "some edges set": (partly_computed, set()),
    "replicated features": (lambda g: dgl.ops.copy_u_sum(g, fgd.whole(g.ndata["x"])), set()),
    "several relations": (lambda g: of_relations(g), set()),
    "a layer for each relation": (lambda g: by_relation(g), set()),
    "all relations at once": (
        lambda g: at_once(g),
        set(),
    ),
}  # fmt: skip

OF_RELATIONS = ("several relations", "a layer for each relation", "all relations at once")


def of_relations(g: Any) -> Tensor:
    with g.local_scope():
        g["writes"].apply_edges(lambda edges: {"m": edges.src["x"] * edges.dst["x"]})
        g.multi_update_all(
            {
                "writes": (fn.copy_e("m", "m"), fn.sum("m", "out")),
                "by": (fn.copy_u("x", "m"), fn.mean("m", "out")),
                "cites": (fn.copy_u("x", "m"), fn.sum("m", "out")),
            },
            "sum",
        )
        return joined([g.nodes[kind].data["out"] for kind in g.ntypes])


def by_relation(g: Any) -> Tensor:
    torch.manual_seed(0)
    layer = dnn.HeteroGraphConv(
        {
            "by": dnn.GATv2Conv((D, D), C, H, **LONELY).double(),
            "writes": dnn.SAGEConv((D, D), H * C, "pool"),
            "cites": dnn.GraphConv(D, H * C, **LONELY),
        }
    ).to(g.device)
    x = {kind: g.nodes[kind].data["x"] for kind in g.ntypes}
    return joined(layer(g, x).values())


def at_once(g: Any) -> Tensor:
    two = dgl.edge_type_subgraph(g, ["writes", "by"])  # DGL cannot do with one without edges
    with two.local_scope():
        two.update_all(fn.copy_u("x", "m"), fn.sum("m", "out"))
        two.apply_edges(fn.u_add_v("out", "x", "m"))
        two.update_all(fn.u_mul_e("x", "m", "n"), fn.sum("n", "more"))
        return joined([two.nodes[kind].data["more"] for kind in two.ntypes])


def ends(g: Any) -> Tensor:
    return joined(g.edges())


def changed(change: Callable[[Any], Any]) -> Callable[[Any], Tensor]:
    """The features and edges of a graph after a method that changes it."""

    def run(g: Any) -> Tensor:
        other = g.local_var()
        change(other)
        return joined([other.ndata["x"], *other.edges()])

    return run


SOME = torch.tensor([1, 5, 9])

# Of these it is known only that they give the same, by DGL's C++ library or not.
OTHERS: dict[str, Callable[[Any], Tensor]] = {
    "pull": changed(lambda g: g.pull(SOME, fn.copy_u("x", "m"), fn.sum("m", "x"))),
    "push": changed(lambda g: g.push(SOME, fn.copy_u("x", "m"), fn.sum("m", "x"))),
    "send_and_recv": changed(
        lambda g: g.send_and_recv(SOME, fn.copy_u("x", "m"), fn.sum("m", "x"))
    ),
    "apply_nodes": changed(lambda g: g.apply_nodes(lambda n: {"x": n.data["x"] * 3}, SOME)),
    "remove_nodes": changed(lambda g: g.remove_nodes(SOME)),
    "propagation": changed(
        lambda g: dgl.prop_nodes_bfs(g, 0, fn.copy_u("x", "m"), fn.sum("m", "x"))
    ),
    "in_subgraph": lambda g: ends(dgl.in_subgraph(g, SOME)),
    "out_subgraph": lambda g: ends(dgl.out_subgraph(g, SOME)),
    "nodes by mask": lambda g: ends(g.subgraph(g.ndata["w"].squeeze(1) > 0.5)),
    "relabelled": lambda g: dgl.edge_subgraph(g, SOME).ndata["x"],
    "khop_graph": lambda g: ends(dgl.khop_graph(g, 2)),
    "line_graph": lambda g: ends(dgl.line_graph(g)),
    "compact_graphs": lambda g: ends(dgl.compact_graphs(g)),
    "to_homogeneous": lambda g: ends(dgl.to_homogeneous(g, ndata=["x"])),
    "in_edges": lambda g: joined(g.in_edges(SOME, form="all")),
    "out_edges": lambda g: joined(g.out_edges(SOME, form="all")),
    "predecessors": lambda g: g.predecessors(3),
    "edge_ids": lambda g: g.edge_ids(*g.find_edges(SOME)),
    "has_nodes": lambda g: g.has_nodes(torch.tensor([3, 400])),
    "is_multigraph": lambda g: torch.tensor(g.is_multigraph),
    "sorted edges": lambda g: joined(g.edges(order="srcdst")),
    "incidence": lambda g: g.inc("in").to_dense(),
    "pickled": lambda g: pickle.loads(pickle.dumps(g)).ndata["x"],
    "copied": lambda g: copy.deepcopy(g).ndata["x"],
    "batch": lambda g: dgl.ops.copy_u_sum(dgl.batch([g, g]), torch.cat([g.ndata["x"]] * 2)),
    "softmax_nodes": lambda g: dgl.softmax_nodes(g, "x"),
    "max_edges": lambda g: dgl.max_edges(g, "e"),
    "broadcast_nodes": lambda g: dgl.broadcast_nodes(g, torch.ones(1, 2)),
    "networkx": lambda g: torch.tensor(dgl.to_networkx(g).number_of_edges()),
    "formats": lambda g: ends(g.formats(["csc", "coo"])),
    "GCNNorm": lambda g: dgl.transforms.GCNNorm()(g.local_var()).edata["w"],
    "norm_by_dst": dgl.norm_by_dst,
    "reorder_graph": lambda g: dgl.reorder_graph(g, "rcmk", store_ids=False).ndata["x"],
    "filter_nodes": lambda g: g.filter_nodes(lambda nodes: nodes.data["x"][:, 0] > 0),
    "filter_edges": lambda g: g.filter_edges(lambda edges: edges.data["w"] > 0.5),
    "some rows": lambda g: joined([g.nodes[SOME].data["x"], g.edges[SOME].data["e"]]),
}

OF_NEW_GRAPHS = {
    "EGATConv": Case(lambda: dnn.EGATConv(D, 3, C, C, H), with_features_of_loops, "dgl.EGATConv")
}
"""Layers whose calls make another graph, whose exchanges are planned at each."""

CASES = {
    **LAYERS,
    **OF_NEW_GRAPHS,
    **{name: Case(nn.Module, lambda _, g, run=run: run(g)) for name, run in OTHERS.items()},
    **{
        name: Case(nn.Module, lambda _, g, run=run: run(g), gathers=frozenset(gathers))
        for name, (run, gathers) in OPERATIONS.items()
    },
}
