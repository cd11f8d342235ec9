"""DGL's layers as they are measured: built, without dense products, and these alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dgl
import dgl.function as fn
import torch
from dgl import nn as dglnn
from torch import Tensor, nn

from measure.graphs import GraphData

HEADS = 4
EDGE_FEATURES = 8


class GraphTransformer(nn.Module):
    """The attention of DGL's own example of a graph transformer, out of built-in functions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.query = nn.Linear(channels, channels)
        self.key = nn.Linear(channels, channels)
        self.value = nn.Linear(channels, channels)
        self.size = channels // HEADS

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        shape = (-1, HEADS, self.size)
        with graph.local_scope():
            graph.ndata["q"] = self.query(x).view(shape)
            graph.ndata["k"] = self.key(x).view(shape)
            graph.ndata["v"] = self.value(x).view(shape)
            graph.apply_edges(fn.u_dot_v("k", "q", "score"))
            scores = graph.edata["score"] / self.size**0.5
            graph.edata["a"] = dglnn.functional.edge_softmax(graph, scores)
            graph.update_all(fn.u_mul_e("v", "a", "m"), fn.sum("m", "out"))
            out: Tensor = graph.ndata["out"]
            return out.flatten(1)


LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "GATv2Conv": lambda c: dglnn.GATv2Conv(c, c // HEADS, HEADS),
    "GATConv": lambda c: dglnn.GATConv(c, c // HEADS, HEADS),
    "AGNNConv": lambda c: dglnn.AGNNConv(),
    "DotGatConv": lambda c: dglnn.DotGatConv(c, c // HEADS, HEADS),
    "EdgeGATConv": lambda c: dglnn.EdgeGATConv(c, EDGE_FEATURES, c // HEADS, HEADS),
    "graph transformer": GraphTransformer,
    "GraphConv": lambda c: dglnn.GraphConv(c, c),
    "SAGEConv mean": lambda c: dglnn.SAGEConv(c, c, "mean"),
    "SAGEConv gcn": lambda c: dglnn.SAGEConv(c, c, "gcn"),
    "SAGEConv pool": lambda c: dglnn.SAGEConv(c, c, "pool"),
}

NO_ROUTE = {"graph transformer"}
"""Models of a user: what they call has routes, they themselves have none."""


def build(layer: str, channels: int) -> nn.Module:
    """The layer on ``channels`` inputs; the same parameters at every call."""
    torch.manual_seed(0)
    return LAYERS[layer](channels)


def arguments_of(layer: str, graph: Any) -> tuple[Tensor, ...]:
    """The arguments of a layer besides features of nodes."""
    if layer != "EdgeGATConv":
        return ()
    return (torch.randn(graph.num_edges(), EDGE_FEATURES),)


def dgl_graph(data: GraphData) -> Any:
    """A DGL graph with one self-loop at every node, and all formats, as DGL advises."""
    graph = dgl.graph(tuple(data.edge_index), num_nodes=data.num_nodes)
    graph = dgl.add_self_loop(dgl.remove_self_loop(graph))
    graph.create_formats_()
    return graph


def _of_nodes(layer: nn.Module) -> dict[str, nn.Linear]:
    """Dense products of features of nodes, by name."""
    return {
        name: module
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear) and name != "fc_edge"
    }


def without_products(layer: nn.Module) -> nn.Module:
    """Replace dense products by the identity, so that ``forward`` is message passing alone."""
    for name in _of_nodes(layer):
        setattr(layer, name, nn.Identity())
    if isinstance(layer, dglnn.GraphConv):
        layer.weight = None
    return layer


class Products:
    """Forward and backward of a layer's dense products alone: what no route can save.

    Args:
        layer: whose products they are.
        x: ``[nodes, channels]``, the input of each.
    """

    def __init__(self, layer: nn.Module, x: Tensor) -> None:
        self._linears: list[nn.Module] = list(_of_nodes(layer).values())
        if isinstance(layer, dglnn.GraphConv):
            self._linears.append(nn.Linear(*layer.weight.shape, bias=False))
        self._inputs = [x.detach().clone().requires_grad_() for _ in self._linears]
        self._grad = torch.randn_like(x)

    def __len__(self) -> int:
        return len(self._linears)

    def prepare(self) -> None:
        """Reset gradients, as a training loop does between steps."""
        for linear, x in zip(self._linears, self._inputs, strict=True):
            linear.zero_grad(set_to_none=True)
            x.grad = None

    def step(self) -> None:
        """One forward and backward pass."""
        for linear, x in zip(self._linears, self._inputs, strict=True):
            linear(x).backward(self._grad)
