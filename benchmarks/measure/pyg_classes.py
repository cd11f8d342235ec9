"""Every class of PyG that has a route, and how it is called."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

from fastgraph.graphs.repeats import REPEATS
from measure.given import EDGE_FEATURES, Given, heads_of
from measure.graphs import GraphData
from measure.message_cells import computed_by_programs
from measure.pyg_usual import CONVS

Call = Callable[[nn.Module, Tensor, Tensor, Tensor], Any]
"""A module, features of nodes, ``edge_index`` and features of edges."""


def _plainly(module: nn.Module, x: Tensor, edges: Tensor, features: Tensor) -> Any:
    return module(x, edges)


def _with_edges(module: nn.Module, x: Tensor, edges: Tensor, features: Tensor) -> Any:
    return module(x, edges, edge_attr=features)


def _weighted(module: nn.Module, x: Tensor, edges: Tensor, features: Tensor) -> Any:
    return module(x, edges, features[:, 0].abs())


@dataclass(frozen=True)
class LayerClass:
    """How a layer is made and called.

    Args:
        build: takes the number of channels, which come and go.
        call: its forward pass.
    """

    build: Callable[[int], nn.Module]
    call: Call = _plainly


def _attention(cls: type[nn.Module], **options: Any) -> Callable[[int], nn.Module]:
    return lambda c: cls(c, c // heads_of(c), heads=heads_of(c), **options)


LAYERS: dict[str, LayerClass] = {
    "SimpleConv": LayerClass(lambda c: pyg.SimpleConv()),
    "SimpleConv max": LayerClass(lambda c: pyg.SimpleConv(aggr="max")),
    "GCNConv": LayerClass(lambda c: pyg.GCNConv(c, c)),
    "GCNConv weighted": LayerClass(lambda c: pyg.GCNConv(c, c), _weighted),
    "ChebConv": LayerClass(lambda c: pyg.ChebConv(c, c, K=3)),
    "SAGEConv": LayerClass(lambda c: pyg.SAGEConv(c, c)),
    "SAGEConv max": LayerClass(lambda c: pyg.SAGEConv(c, c, aggr="max")),
    "GraphConv": LayerClass(lambda c: pyg.GraphConv(c, c)),
    "GatedGraphConv": LayerClass(lambda c: pyg.GatedGraphConv(c, 2)),
    "GATConv": LayerClass(_attention(pyg.GATConv)),
    "GATConv edges": LayerClass(_attention(pyg.GATConv, edge_dim=EDGE_FEATURES), _with_edges),
    "GATv2Conv": LayerClass(_attention(pyg.GATv2Conv)),
    "GATv2Conv edges": LayerClass(_attention(pyg.GATv2Conv, edge_dim=EDGE_FEATURES), _with_edges),
    "TransformerConv": LayerClass(_attention(pyg.TransformerConv)),
    "TransformerConv edges": LayerClass(
        _attention(pyg.TransformerConv, edge_dim=EDGE_FEATURES), _with_edges
    ),
    "TAGConv": LayerClass(lambda c: pyg.TAGConv(c, c)),
    "GINConv": LayerClass(lambda c: pyg.GINConv(nn.Linear(c, c))),
    "GINConv max": LayerClass(lambda c: pyg.GINConv(nn.Linear(c, c), aggr="max")),
    "ARMAConv": LayerClass(lambda c: pyg.ARMAConv(c, c)),
    "SGConv": LayerClass(lambda c: pyg.SGConv(c, c, K=2)),
    "SSGConv": LayerClass(lambda c: pyg.SSGConv(c, c, alpha=0.1, K=2)),
    "APPNP": LayerClass(lambda c: pyg.APPNP(K=3, alpha=0.1)),
    "MFConv": LayerClass(lambda c: pyg.MFConv(c, c)),
    "SignedConv": LayerClass(
        lambda c: pyg.SignedConv(c, c, first_aggr=True), lambda m, x, e, _: m(x, e, e)
    ),
    "ClusterGCNConv": LayerClass(lambda c: pyg.ClusterGCNConv(c, c)),
    "GCN2Conv": LayerClass(lambda c: pyg.GCN2Conv(c, alpha=0.1), lambda m, x, e, _: m(x, x, e)),
    "PANConv": LayerClass(lambda c: pyg.PANConv(c, c, 1), lambda m, x, e, _: m(x, e)[0]),
    "WLConvContinuous": LayerClass(lambda c: pyg.WLConvContinuous()),
    "PDNConv": LayerClass(lambda c: pyg.PDNConv(c, c, EDGE_FEATURES, 8), _with_edges),
    "LGConv": LayerClass(lambda c: pyg.LGConv()),
    "MixHopConv": LayerClass(lambda c: pyg.MixHopConv(c, c)),
}

ELSEWHERE = {"GPSConv"}
"""Layers whose time is that of all pairs of nodes: ``dense_attention.py`` measures them."""

UNAVAILABLE = set() if importlib.util.find_spec("torch_sparse") else {"PANConv"}
"""Layers for which this machine lacks a package."""


def names() -> tuple[str, ...]:
    """The layers that can be measured on this machine, those whose messages are traced last."""
    traced = (name for name in CONVS if computed_by_programs(name))
    return (*(name for name in LAYERS if name not in UNAVAILABLE), *traced)


class Case:
    """A layer on a graph.

    Args:
        layer: its name, one of :data:`LAYERS` or of a usual configuration.
        data: the graph.
        channels: in and out.
    """

    def __init__(self, layer: str, data: GraphData, channels: int) -> None:
        torch.manual_seed(0)
        self._edges = data.edge_index
        self._given = given = Given(data, channels)
        if layer in LAYERS:
            self.module = LAYERS[layer].build(channels)
            self._call: Any = LAYERS[layer].call
            self._features: Tensor | None = given.features
        else:
            self.module = CONVS[layer].build(given)
            self._call, self._features = CONVS[layer].call, None
        self.x = given.x

    def fresh(self) -> Tensor:
        """The graph, as if it were seen for the first time."""
        REPEATS.clear()
        return self._edges.clone()

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """The output of the layer."""
        if self._features is not None:
            out = self._call(self.module, x, edges, self._features)
        else:
            self._given.change(x, edges)
            out = self._call(self.module, self._given)
        return torch.cat(list(out.values())) if isinstance(out, dict) else out
