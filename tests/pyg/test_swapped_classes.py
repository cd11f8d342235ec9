"""Layers whose class was put in place of another, as ``fully_shard`` and parametrizations do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parametrize
from torch_geometric.nn import (
    GATConv,
    GATv2Conv,
    GCNConv,
    MessagePassing,
    ResGatedGraphConv,
    SAGEConv,
    TransformerConv,
)

import fastgraph
from fastgraph.routing.status import recording
from tests.graphs import random_edges

NODES, CHANNELS = 24, 8
EDGES = random_edges(NODES, NODES, 90)
CLASSES = [GCNConv, SAGEConv, GATConv, GATv2Conv, TransformerConv, ResGatedGraphConv]


class Doubled(torch.nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def swapped(module: MessagePassing, **methods: Any) -> MessagePassing:
    """The module with a subclass for its class that PyG never saw, as torch makes it."""
    cls = type(module)
    module.__class__ = type(f"Swapped{cls.__name__}", (cls,), methods)
    return module


def reasons(module: MessagePassing) -> dict[str, int]:
    """Reasons to leave a call to upstream, whose numbers it has.

    The module is not copied: PyG makes methods for the class of a copy.
    """
    x = torch.randn(NODES, CHANNELS, dtype=torch.float64, requires_grad=True)
    inputs = [x, *module.double().parameters()]

    def results() -> list[Tensor]:
        out = module(x, EDGES)
        return [out, *torch.autograd.grad(out.square().sum(), inputs)]

    expected = results()
    with fastgraph.enabled(min_edges=0), recording() as status:
        found = results()
    torch.testing.assert_close(found, expected)
    row = status.row(type(module).__name__)
    assert row.routed + row.fell_back == 1
    return dict(row.reasons)


@pytest.mark.parametrize("cls", CLASSES)
def test_a_subclass_is_routed(cls: type[MessagePassing]) -> None:
    assert not reasons(swapped(cls(CHANNELS, 4)))


@pytest.mark.parametrize(("cls", "name"), [(GATConv, "att_src"), (GATv2Conv, "att")])
def test_a_layer_with_a_parametrization_is_routed(cls: type[MessagePassing], name: str) -> None:
    module = cls(CHANNELS, 4)
    parametrize.register_parametrization(module, name, Doubled())
    assert type(module) is not cls
    assert not reasons(module)


@pytest.mark.parametrize("cls", [GATConv, GATv2Conv, TransformerConv])
def test_a_method_of_the_subclass_is_upstreams_to_call(cls: type[MessagePassing]) -> None:
    def propagate(self: MessagePassing, *args: Any, **kwargs: Any) -> Tensor:
        return 2 * cls.propagate(self, *args, **kwargs)

    assert reasons(swapped(cls(CHANNELS, 4), propagate=propagate)) == {"propagate is overridden": 1}
