"""Modules of torch and PyG."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.data import Data

from tests.dist.probes.probe import C, D, N, h, m, probe, simple

simple(
    "attention module, nodes as batch",
    lambda d: m.attention(*[h(d)[:, None, :].expand(-1, 3, -1)] * 3, need_weights=False)[0].sum(
        (1, 2)
    ),
    "multi_head_attention_forward",
)


@probe("batch norm")
def _(d: Data) -> Tensor:
    norm = torch.nn.BatchNorm1d(D)
    out = norm(h(d)).square() * d.x
    norm.eval()
    return out + norm(d.x).sum() + norm.running_var


@probe("norm layers")
def _(d: Data) -> Tensor:
    return sum(norm(h(d)).square().sum() * (i + 1) for i, norm in enumerate(m.norms))


@probe("recurrent layers")
def _(d: Data) -> Tensor:
    sequences = h(d)[:, None, :].expand(-1, 3, -1)
    return m.gru(sequences)[0].sum((1, 2)) + m.jumping([h(d), d.x]).sum(1)


@probe("recurrent layers, time first, in both directions")
def _(d: Data) -> Tensor:
    sequences = torch.stack([h(d), d.x, h(d) * d.w])
    out, (last, _) = m.lstm(sequences)
    return out.sum((0, 2)) + last.square().sum((0, 2)) + m.rnn(sequences)[1].sum(2)


@probe("recurrent cells")
def _(d: Data) -> Tensor:
    state, memory = m.lstm_cell(h(d))
    return m.gru_cell(d.x, state) + m.rnn_cell(memory, torch.ones(N, D))


@probe("statistics of an instance norm")
def _(d: Data) -> Tensor:
    norm = torch.nn.InstanceNorm1d(D, affine=True, track_running_stats=True)
    nodes_as_length = norm(h(d).t()[None])[0].t()
    nodes_as_batch = norm(h(d)[:, :, None] * d.x[:, None, :3])
    return nodes_as_length.square() * d.x + nodes_as_batch.sum(2) + norm.running_var


simple("reversible layer", lambda d: m.reversible(2 * h(d), d.edge_index) * d.x)


@probe(
    "TopK pooling",
    "sort",
    "scatter_",
)
def _(d: Data) -> Tensor:
    return m.pool(h(d), d.edge_index)[0].square().sum()


@probe(
    "choices of TopK pooling among equal scores",
    "sort",
    "scatter_",
)
def _(d: Data) -> Tensor:
    return m.pool(0 * h(d), d.edge_index)[4].double()


def _layers() -> None:
    convs = """
        SAGEConv max, SAGEConv to sources, PNAConv, EdgeConv, ChebConv, FiLMConv, ResGatedGraphConv,
        GatedGraphConv, SuperGATConv, ARMAConv, GENConv, TAGConv
    """
    for name in map(str.strip, convs.split(",")):
        simple(name, lambda d, name=name: m.convs[name](h(d), d.edge_index))
    for name in ("GINEConv", "NNConv", "GATv2Conv", "TransformerConv", "CGConv"):
        simple(
            f"{name} with features of edges",
            lambda d, name=name: m.edge_convs[name](h(d), d.edge_index, d.edge_attr),
        )
    for name in ("softmax", "power mean", "std"):
        simple(
            f"{name} aggregation",
            lambda d, name=name: m.aggregations[name](h(d), d.y, dim_size=C),
        )


_layers()
