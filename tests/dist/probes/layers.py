"""Modules of torch and PyG."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.data import Data

from tests.dist.probes.probe import C, D, h, m, probe, simple

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


@probe("norm layers", "instance_norm")
def _(d: Data) -> Tensor:
    return sum(norm(h(d)).square().sum() * (i + 1) for i, norm in enumerate(m.norms))


@probe("recurrent layers", "gru", "lstm")
def _(d: Data) -> Tensor:
    sequences = h(d)[:, None, :].expand(-1, 3, -1)
    return m.gru(sequences)[0].sum((1, 2)) + m.jumping([h(d), d.x]).sum(1)


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
        gathers = ("gru_cell",) if name == "GatedGraphConv" else ()
        simple(name, lambda d, name=name: m.convs[name](h(d), d.edge_index), *gathers)
    for name in ("GINEConv", "NNConv", "GATv2Conv", "TransformerConv", "CGConv"):
        simple(
            f"{name} with features of edges",
            lambda d, name=name: m.edge_convs[name](h(d), d.edge_index, d.edge_attr),
        )
    for name in ("softmax", "power mean", "std"):
        gathers = ("scatter_reduce_",) if name == "softmax" else ()
        simple(
            f"{name} aggregation",
            lambda d, name=name: m.aggregations[name](h(d), d.y, dim_size=C),
            *gathers,
        )


_layers()
