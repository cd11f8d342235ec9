"""Every class of DGL that has a route, and how it is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dgl
import torch
from dgl import nn as dglnn
from torch import Tensor, nn

from fastgraph.graphs.repeats import REPEATS
from measure.given import EDGE_FEATURES, heads_of
from measure.graphs import GraphData

Call = Callable[..., Any]

_LARGEST_EIGENVALUE = [2.0]
_DIMENSIONS, _KERNELS = 3, 4


def _of_edges(width: int) -> Callable[[GraphData, Tensor], tuple[Any, ...]]:
    return lambda data, x: (torch.randn(data.num_edges, width),)


def _attention(cls: type[nn.Module]) -> Callable[[int], nn.Module]:
    return lambda c: cls(c, c // heads_of(c), heads_of(c))


def _sage(aggregator: str) -> Callable[[int], nn.Module]:
    return lambda c: dglnn.SAGEConv(c, c, aggregator)


class _Reduced(nn.Module):
    """Features of sources, reduced by ``update_all``.

    Args:
        reduce: a function of ``dgl.function``.
    """

    def __init__(self, reduce: Callable[[str, str], Any]) -> None:
        super().__init__()
        self._reduce = reduce

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        with graph.local_scope():
            graph.srcdata["x"] = x
            graph.update_all(dgl.function.copy_u("x", "m"), self._reduce("m", "out"))
            out: Tensor = graph.dstdata["out"]
            return out


LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "AGNNConv": lambda c: dglnn.AGNNConv(),
    "APPNPConv": lambda c: dglnn.APPNPConv(3, 0.1),
    "CFConv": lambda c: dglnn.CFConv(c, EDGE_FEATURES, c, c),
    "ChebConv": lambda c: dglnn.ChebConv(c, c, 3),
    "DotGatConv": _attention(dglnn.DotGatConv),
    "EGATConv": lambda c: dglnn.EGATConv(
        c, EDGE_FEATURES, c // heads_of(c), c // heads_of(c), heads_of(c)
    ),
    "EGNNConv": lambda c: dglnn.EGNNConv(c, c, c),
    "EdgeConv": lambda c: dglnn.EdgeConv(c, c),
    "EdgeGATConv": lambda c: dglnn.EdgeGATConv(c, EDGE_FEATURES, c // heads_of(c), heads_of(c)),
    "GATConv": _attention(dglnn.GATConv),
    "GATv2Conv": _attention(dglnn.GATv2Conv),
    "GCN2Conv": lambda c: dglnn.GCN2Conv(c, 1),
    "GINConv": lambda c: dglnn.GINConv(nn.Linear(c, c), "sum"),
    "GINConv max": lambda c: dglnn.GINConv(nn.Linear(c, c), "max"),
    "GMMConv": lambda c: dglnn.GMMConv(c, c, _DIMENSIONS, _KERNELS),
    "GatedGCNConv": lambda c: dglnn.GatedGCNConv(c, c, c),
    "GatedGraphConv": lambda c: dglnn.GatedGraphConv(c, c, 2, 1),
    "GraphConv": lambda c: dglnn.GraphConv(c, c),
    "HGTConv": lambda c: dglnn.HGTConv(c, c // heads_of(c), heads_of(c), 1, 1),
    "NNConv": lambda c: dglnn.NNConv(c, c, nn.Linear(EDGE_FEATURES, c * c)),
    "RelGraphConv": lambda c: dglnn.RelGraphConv(c, c, 2),
    "SAGEConv mean": _sage("mean"),
    "SAGEConv gcn": _sage("gcn"),
    "SAGEConv pool": _sage("pool"),
    "SGConv": lambda c: dglnn.SGConv(c, c, 2),
    "TAGConv": lambda c: dglnn.TAGConv(c, c),
    "copy_u max": lambda c: _Reduced(dgl.function.max),
    "copy_u min": lambda c: _Reduced(dgl.function.min),
}

_ARGUMENTS: dict[str, Callable[[GraphData, Tensor], tuple[Any, ...]]] = {
    "ChebConv": lambda data, x: (_LARGEST_EIGENVALUE,),
    "CFConv": _of_edges(EDGE_FEATURES),
    "EGATConv": _of_edges(EDGE_FEATURES),
    "EGNNConv": lambda data, x: (torch.randn(data.num_nodes, _DIMENSIONS),),
    "EdgeGATConv": _of_edges(EDGE_FEATURES),
    "GMMConv": _of_edges(_DIMENSIONS),
    "GatedGCNConv": lambda data, x: (torch.randn(data.num_edges, x.shape[1]),),
    "GCN2Conv": lambda data, x: (x,),
    "NNConv": _of_edges(EDGE_FEATURES),
    "GatedGraphConv": lambda data, x: (torch.zeros(data.num_edges, dtype=torch.int64),),
    "HGTConv": lambda data, x: (
        torch.zeros(data.num_nodes, dtype=torch.int64),
        torch.zeros(data.num_edges, dtype=torch.int64),
    ),
    "RelGraphConv": lambda data, x: (torch.arange(data.num_edges) % 2,),
}


def names() -> tuple[str, ...]:
    """The layers that can be measured on this machine."""
    return tuple(LAYERS)


def _with_self_loops(data: GraphData) -> GraphData:
    """One self-loop at every node, as DGL wants it for most layers."""
    source, destination = data.edge_index[:, data.edge_index[0] != data.edge_index[1]]
    loops = torch.arange(data.num_nodes)
    edges = torch.stack([torch.cat([source, loops]), torch.cat([destination, loops])])
    return GraphData(data.name, edges, data.num_nodes)


class Case:
    """A layer on a graph.

    Args:
        layer: its name.
        data: the graph.
        channels: in and out.
    """

    def __init__(self, layer: str, data: GraphData, channels: int) -> None:
        torch.manual_seed(0)
        self._data = _with_self_loops(data)
        self.module = LAYERS[layer](channels)
        self.x = torch.randn(data.num_nodes, channels)
        self._arguments = _ARGUMENTS.get(layer, lambda *_: ())(self._data, self.x)

    def fresh(self) -> Any:
        """The graph, as if it were seen for the first time."""
        REPEATS.clear()
        source, destination = self._data.edge_index
        return dgl.graph((source, destination), num_nodes=self._data.num_nodes)

    def forward(self, x: Tensor, graph: Any) -> Tensor:
        """The output of the layer, for nodes where there is another one for edges or positions."""
        out: Any = self.module(graph, x, *self._arguments)
        found: Tensor = out[0] if isinstance(out, tuple) else out
        return found
