"""DGL's layers in usual configurations, and how they are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dgl
import torch
from dgl import nn as dglnn
from torch import Tensor, nn

from measure.given import EDGE_FEATURES, RELATIONS, Given, Usual, heads_of

_AGGREGATORS, _SCALERS = ["mean", "max", "std"], ["identity", "amplification"]
_DELTA = 2.5


def graph_of(given: Given) -> Any:
    """The edges as a DGL graph, with a self-loop at every node: that which calls share, or new."""
    if given.graph is not None:
        return given.graph
    source, destination = given.edges
    graph = dgl.graph((source, destination), num_nodes=given.num_nodes)
    return dgl.add_self_loop(dgl.remove_self_loop(graph))


def _call(*more: Callable[[Any, Given], Any]) -> Callable[[Any, Given], Any]:
    """A call with the graph, features of nodes, and more."""

    def call(layer: Any, given: Given) -> Any:
        graph = graph_of(given)
        return layer(graph, given.x, *(one(graph, given) for one in more))

    return call


def _cycled(values: Tensor, count: int) -> Tensor:
    """As many rows, since DGL's graphs have other self-loops than those given."""
    return values[torch.arange(count) % values.shape[0]]


def _features(graph: Any, given: Given) -> Tensor:
    return _cycled(given.features, graph.num_edges())


def _rows(graph: Any, given: Given) -> Tensor:
    return _cycled(given.rows, graph.num_edges())


def _kinds(graph: Any, given: Given) -> Tensor:
    return torch.arange(graph.num_edges()) % RELATIONS


def _node_kinds(graph: Any, given: Given) -> Tensor:
    return given.node_kinds


def _one_kind(graph: Any, given: Given) -> Tensor:
    return torch.zeros(graph.num_edges(), dtype=torch.int64)


def _headed(cls: Any) -> Callable[[Given], nn.Module]:
    return lambda g: cls(g.channels, g.channels // heads_of(g.channels), heads_of(g.channels))


def _wide(cls: Any, *args: Any, **options: Any) -> Callable[[Given], nn.Module]:
    return lambda g: cls(g.channels, g.channels, *args, **options)


def _usual(build: Callable[[Given], nn.Module], *more: Callable[[Any, Given], Any]) -> Usual:
    return Usual(build, _call(*more), takes_flow=False)


def _edge_gat(given: Given) -> nn.Module:
    heads = heads_of(given.channels)
    return dglnn.EdgeGATConv(given.channels, EDGE_FEATURES, given.channels // heads, heads)


def _hgt(given: Given) -> nn.Module:
    c, heads = given.channels, heads_of(given.channels)
    return dglnn.HGTConv(c, c // heads, heads, RELATIONS, RELATIONS)


def _by_matrix(given: Given) -> nn.Module:
    c = given.channels
    return dglnn.NNConv(c, c, nn.Linear(EDGE_FEATURES, c * c))


LAYERS: dict[str, Usual] = {
    "AGNNConv": _usual(lambda g: dglnn.AGNNConv()),
    "APPNPConv": _usual(lambda g: dglnn.APPNPConv(3, 0.1)),
    "CFConv": _usual(lambda g: dglnn.CFConv(g.channels, EDGE_FEATURES, 8, g.channels), _features),
    "ChebConv": _usual(_wide(dglnn.ChebConv, 3), lambda *_: [2.0]),
    "DGNConv": _usual(
        _wide(dglnn.DGNConv, ["dir1-av", "mean"], _SCALERS, _DELTA),
        lambda *_: None,
        lambda graph, g: g.pos,
    ),
    "DotGatConv": _usual(_headed(dglnn.DotGatConv)),
    "EGATConv": _usual(
        lambda g: dglnn.EGATConv(g.channels, EDGE_FEATURES, g.channels, EDGE_FEATURES, 2),
        _features,
    ),
    "EGNNConv": _usual(
        lambda g: dglnn.EGNNConv(g.channels, g.channels, g.channels), lambda graph, g: g.pos
    ),
    "EdgeConv": _usual(_wide(dglnn.EdgeConv)),
    "EdgeGATConv": _usual(_edge_gat, _features),
    "GATConv": _usual(_headed(dglnn.GATConv)),
    "GATv2Conv": _usual(_headed(dglnn.GATv2Conv)),
    "GCN2Conv": _usual(lambda g: dglnn.GCN2Conv(g.channels, 1), lambda graph, g: g.x),
    "GINConv": _usual(lambda g: dglnn.GINConv(nn.Linear(g.channels, g.channels), "sum")),
    "GINConv, max": _usual(lambda g: dglnn.GINConv(nn.Linear(g.channels, g.channels), "max")),
    "GINEConv": _usual(lambda g: dglnn.GINEConv(nn.Linear(g.channels, g.channels)), _rows),
    "GMMConv": _usual(_wide(dglnn.GMMConv, EDGE_FEATURES, 3), _features),
    "GatedGCNConv": _usual(
        lambda g: dglnn.GatedGCNConv(g.channels, EDGE_FEATURES, g.channels), _features
    ),
    "GatedGraphConv": _usual(_wide(dglnn.GatedGraphConv, 2, 1), _one_kind),
    "GraphConv": _usual(_wide(dglnn.GraphConv)),
    "GroupRevRes": _usual(
        lambda g: dglnn.GroupRevRes(dglnn.GraphConv(g.channels // 2, g.channels // 2), 2)
    ),
    "HGTConv": _usual(_hgt, _node_kinds, _kinds),
    "NNConv": _usual(_by_matrix, _features),
    "PNAConv": _usual(_wide(dglnn.PNAConv, _AGGREGATORS, _SCALERS, _DELTA)),
    "RelGraphConv": _usual(_wide(dglnn.RelGraphConv, RELATIONS), _kinds),
    "RelGraphConv, blocks": _usual(
        _wide(dglnn.RelGraphConv, RELATIONS, regularizer="bdd", num_bases=2), _kinds
    ),
    "SAGEConv": _usual(_wide(dglnn.SAGEConv, "mean")),
    "SAGEConv, gcn": _usual(_wide(dglnn.SAGEConv, "gcn")),
    "SAGEConv, pool": _usual(_wide(dglnn.SAGEConv, "pool")),
    "SAGEConv, lstm": _usual(_wide(dglnn.SAGEConv, "lstm")),
    "SGConv": _usual(_wide(dglnn.SGConv, 2)),
    "TAGConv": _usual(_wide(dglnn.TAGConv)),
    "TWIRLSConv": _usual(lambda g: dglnn.TWIRLSConv(g.channels, g.channels, g.channels, 2)),
    "SumPooling": _usual(lambda g: dglnn.SumPooling()),
    "AvgPooling": _usual(lambda g: dglnn.AvgPooling()),
    "MaxPooling": _usual(lambda g: dglnn.MaxPooling()),
    "GlobalAttentionPooling": _usual(
        lambda g: dglnn.GlobalAttentionPooling(nn.Linear(g.channels, 1))
    ),
    "WeightAndSum": _usual(lambda g: dglnn.WeightAndSum(g.channels)),
    "Set2Set": _usual(lambda g: dglnn.Set2Set(g.channels, 2, 1)),
    "SortPooling": _usual(lambda g: dglnn.SortPooling(4)),
}
"""By name, as for PyG. Some layers want a self-loop at every node, so all get one."""
