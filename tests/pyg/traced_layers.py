"""Layers whose messages are traced, and what a call of one must be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

import fastgraph
from fastgraph.pyg import traced
from tests.graphs import random_edges

NODES, CHANNELS = 12, 4
EDGES = random_edges(NODES, NODES, 40)


class Scaled(MessagePassing):
    """A user's layer, with an attribute, a module and a parameter that its message reads."""

    def __init__(self, aggr: str = "sum", act: nn.Module | None = None, **options: Any) -> None:
        super().__init__(aggr=aggr, **options)
        self.scale = 0.5
        self.act = nn.ReLU() if act is None else act
        self.lin = nn.Linear(2 * CHANNELS, CHANNELS)
        self.weight = nn.Parameter(torch.randn(CHANNELS))

    def forward(self, x: Any, edge_index: Tensor, size: Any = None) -> Tensor:
        return self.propagate(edge_index, x=x, size=size)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        gate = self.act(self.lin(torch.cat([x_i, x_j], dim=-1)))
        return self.scale * gate * self.weight + x_j.sin() * x_i


class Updating(Scaled):
    """A layer whose update takes an argument, and one that has a default."""

    def update(self, inputs: Tensor, bias: Tensor, factor: float = 2.0) -> Tensor:
        return factor * inputs + bias

    def forward(self, x: Any, edge_index: Tensor, size: Any = None) -> Tensor:
        return self.propagate(edge_index, x=x, bias=self.weight, size=size)


def routed(layer: nn.Module, x: Tensor, edges: Tensor = EDGES) -> Tensor:
    """The result of a layer, which is upstream's, by the program that holds for it now."""
    torch.manual_seed(1)
    expected = layer(x, edges)
    fastgraph.status().reset()
    with fastgraph.enabled(min_edges=0):
        torch.manual_seed(1)
        found = layer(x, edges)
    (row,) = fastgraph.status().rows
    assert (row.routed, dict(row.reasons)) == (1, {})
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    return found


def refused(layer: nn.Module, *args: Any, **kwargs: Any) -> str:
    """The reason why a layer runs upstream's code, whose very result is ours."""
    torch.manual_seed(1)
    expected = layer(*args, **kwargs)
    fastgraph.status().reset()
    with fastgraph.enabled(min_edges=0):
        torch.manual_seed(1)
        found = layer(*args, **kwargs)
    (row,) = fastgraph.status().rows
    assert row.routed == 0
    if isinstance(expected, Tensor):
        assert torch.equal(found, expected)
    (reason,) = row.reasons
    return reason


def second_derivative(loss: Callable[[], Tensor], x: Tensor) -> Tensor:
    """The gradient of the squares of a gradient."""
    (first,) = torch.autograd.grad(loss(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    return second


def traces(layer: nn.Module) -> int:
    return traced.KNOWN.count(layer)


def x64(*shape: int) -> Tensor:
    return torch.randn(*(shape or (NODES, CHANNELS)), dtype=torch.float64)


def with_message(function: Any) -> type[Scaled]:
    function.__name__ = "message"
    return type("Own", (Scaled,), {"message": function})


def of_its_object(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
    return x_i * x_j * self.config.scale
