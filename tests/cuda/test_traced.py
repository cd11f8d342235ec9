"""Layers whose messages are traced, on a GPU, against upstream's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import softmax

import fastgraph
from fastgraph.registry.registry import REGISTRY
from tests.ab import Arguments, assert_same
from tests.graphs import Case, hub_edges, random_edges
from tests.pyg.test_traced import CHANNELS, LAYERS
from tests.pyg.test_traced_products import LAYERS as PRODUCTS
from tests.pyg.test_traced_products import C
from tests.pyg.traced_layers import NODES, Scaled

RANDOM = Case("random", random_edges(NODES, NODES, 40), NODES, NODES)
HUB = Case("hub_small", hub_edges(30, 1500), 30, 30)


def on(value: Any, device: torch.device) -> Any:
    """Arguments with their tensors on a device, features in float32."""
    if isinstance(value, dict):
        return {name: on(part, device) for name, part in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(on(part, device) for part in value)
    if not isinstance(value, Tensor):
        return value
    return value.to(device, torch.float32 if value.is_floating_point() else None)


def given(name: str, case: Case, device: torch.device) -> Arguments:
    call = LAYERS[name][1](case)
    assert call is not None
    moved: Arguments = on(call, device)
    return moved


@pytest.mark.parametrize("case", [RANDOM, HUB], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_values_and_gradients(name: str, case: Case, device: torch.device) -> None:
    torch.manual_seed(0)
    assert_same(LAYERS[name][0]().to(device), given(name, case, device))


class Attending(MessagePassing):
    """A message with a softmax over neighbours."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")
        self.att = nn.Parameter(torch.randn(CHANNELS))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor, index: Tensor, size_i: int) -> Tensor:
        score = (self.att * torch.tanh(x_i + x_j)).sum(-1, keepdim=True)
        return softmax(score, index, num_nodes=size_i) * x_j


@pytest.mark.parametrize("case", [RANDOM, HUB], ids=str)
def test_softmax_and_several_aggregations(case: Case, device: torch.device) -> None:
    torch.manual_seed(0)
    x = torch.randn(case.num_src, CHANNELS, device=device)
    for layer in (Attending(), Scaled(aggr=["sum", "max", "std"])):
        assert_same(layer.to(device), ((x, case.edge_index.to(device)), {}))


@pytest.mark.parametrize("case", [RANDOM, HUB], ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_edges(name: str, case: Case, device: torch.device) -> None:
    torch.manual_seed(0)
    layer = PRODUCTS[name]("sum" if name == "own" else "max").to(device)
    x, pos = (torch.randn(case.num_src, width, device=device) for width in (C, 3))
    takes_places = "pos" in type(layer).forward.__code__.co_varnames
    given = (x, pos) if takes_places else (x,)
    assert_same(layer, ((*given, case.edge_index.to(device)), {}))


def test_a_layer_that_moves_is_traced_for_its_new_device(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FASTGRAPH_BACKEND")  # that of each device
    REGISTRY.select(None)
    layer, x = Scaled(), torch.randn(NODES, CHANNELS)
    for device in (torch.device("cpu"), gpu, torch.device("cpu")):
        moved = layer.to(device), x.to(device), RANDOM.edge_index.to(device)
        expected = moved[0](*moved[1:])
        fastgraph.status().reset()
        with fastgraph.enabled(min_edges=0):
            found = moved[0](*moved[1:])
        (row,) = fastgraph.status().rows
        assert row.routed == 1 and not row.reasons
        torch.testing.assert_close(found, expected)
