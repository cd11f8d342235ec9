"""Dropout within messages: upstream's random numbers, and no tensor of edges but them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch_geometric import nn as pyg

import fastgraph
from tests.pyg.traced_layers import (
    CHANNELS,
    EDGES,
    NODES,
    Scaled,
    refused,
    routed,
    traces,
    with_message,
    x64,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::fastgraph.FallbackWarning"),
    pytest.mark.usefixtures("nothing_known"),
]

COUNT = EDGES.shape[1]
TYPES = torch.arange(COUNT) % 3


class Dropping(Scaled):
    """Drops single channels of a message."""

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return F.dropout(x_i * x_j, p=0.25, training=self.training)


class DroppingTwice(Scaled):
    """Drops channels of neighbours, and then whole messages."""

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        kept = F.dropout((x_i * x_j).sum(-1, keepdim=True), p=0.5, training=self.training)
        return kept * F.dropout(x_j, p=0.25, training=self.training)


def message_by_torch(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
    return torch.dropout(x_i * x_j, 0.25, self.training)


def heat() -> nn.Module:
    return pyg.HEATConv(CHANNELS, 4, 2, 3, 3, 5, 5, heads=2, dropout=0.5)


class DroppingInPlace(Scaled):
    """Edits what it has computed."""

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return F.dropout(x_i * x_j, 0.25, self.training, True)


LAYERS = {
    "own, in place": (DroppingInPlace, ()),
    "own, by torch": (
        lambda: with_message(message_by_torch)(),
        (),
    ),
    "own": (Dropping, ()),
    "own, twice": (DroppingTwice, ()),
    "RGATConv": (lambda: pyg.RGATConv(CHANNELS, 4, 3, heads=2, dropout=0.5), (TYPES,)),
    "RGATConv, by channels": (
        lambda: pyg.RGATConv(
            CHANNELS,
            4,
            3,
            heads=2,
            dim=2,
            attention_mode="multiplicative-self-attention",
            dropout=0.5,
        ),
        (TYPES,),
    ),
    "SuperGATConv": (lambda: pyg.SuperGATConv(CHANNELS, 4, heads=2, dropout=0.5), ()),
    "HEATConv": (heat, (torch.arange(NODES) % 2, TYPES, torch.randn(COUNT, 5).double())),
    "all dropped": (lambda: pyg.RGATConv(CHANNELS, 4, 3, dropout=1.0), (TYPES,)),
}


def step(layer: nn.Module, x: Tensor, *others: Any) -> list[Tensor]:
    """The output, gradients, a second derivative, and the random state afterwards."""
    torch.manual_seed(3)
    out = layer(x, EDGES, *others)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    leaves = [x, *(p for p in layer.parameters() if p.requires_grad)]
    options: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
    first = torch.autograd.grad((out * weights).sum(), leaves, create_graph=True, **options)
    second = torch.autograd.grad(first[0].square().sum(), x, **options)
    return [out, *first, *second, torch.get_rng_state()]


@pytest.mark.parametrize("name", LAYERS)
def test_numbers_are_those_of_upstream(name: str) -> None:
    make, others = LAYERS[name]
    torch.manual_seed(0)
    layer, x = make().double(), x64().requires_grad_()
    for training in (True, False, True):
        layer.train(training)
        expected = step(layer, x, *others)
        fastgraph.status().reset()
        with fastgraph.enabled(min_edges=0):
            found = step(layer, x, *others)
        (row,) = fastgraph.status().rows
        assert (row.routed, row.programs, dict(row.reasons)) == (1, 1, {})
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_each_call_draws_anew() -> None:
    layer, x = Dropping().double(), x64()
    with fastgraph.enabled(min_edges=0):
        torch.manual_seed(0)
        first, second = layer(x, EDGES), layer(x, EDGES)
        torch.manual_seed(0)
        again = layer(x, EDGES)
    assert torch.equal(first, again) and not torch.equal(first, second)
    assert traces(layer) == 1


def test_features_of_edges_in_another_order_are_left_to_upstream() -> None:
    """Upstream draws in the order in which values are in memory."""

    class OfEdges(Scaled):
        def forward(self, x: Tensor, edge_index: Tensor, a: Tensor) -> Tensor:
            return self.propagate(edge_index, x=x, a=a)

        def message(self, x_j: Tensor, a: Tensor) -> Tensor:
            return F.dropout(a, p=0.5) * x_j

    layer, x, a = OfEdges().double(), x64(), torch.randn(COUNT, CHANNELS).double()
    for number in range(3):
        torch.manual_seed(number)
        expected = layer(x, EDGES, a)
        with fastgraph.enabled(min_edges=0):
            torch.manual_seed(number)
            torch.testing.assert_close(layer(x, EDGES, a), expected)
        assert fastgraph.status().rows[0].programs == number + 1
    assert "not contiguous" in refused(layer, x, EDGES, a.t().contiguous().t())


def test_forks_of_random_states_are_left_to_upstream() -> None:
    class Forking(Scaled):
        def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
            with torch.random.fork_rng():
                return F.dropout(x_i * x_j, p=0.5)

    refused(Forking().double(), x64(), EDGES)


def test_tracing_asks_no_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads may draw meanwhile."""

    def fail(*_: object) -> None:
        raise AssertionError("the generator was set")

    monkeypatch.setattr(torch, "set_rng_state", fail)
    monkeypatch.setattr(torch, "manual_seed", fail)
    layer, x = DroppingTwice().double(), x64()
    with fastgraph.enabled(min_edges=0):
        layer(x, EDGES)
    assert fastgraph.status().rows[0].programs == 1


def test_tracing_draws_nothing() -> None:
    layer, x = Dropping().double(), x64()
    torch.manual_seed(0)
    layer(x, EDGES)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    with fastgraph.enabled(min_edges=0):
        layer(x, EDGES)
    assert torch.equal(torch.get_rng_state(), state)


def test_checkpoint_draws_the_same_again() -> None:
    layer, x = Dropping().double(), x64().requires_grad_()

    def gradient() -> Tensor:
        torch.manual_seed(0)
        out = checkpoint(layer, x, EDGES, use_reentrant=False)
        assert isinstance(out, Tensor)
        return torch.autograd.grad(out.square().sum(), x)[0]

    expected = gradient()
    with fastgraph.enabled(min_edges=0):
        found = gradient()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    layer, x = Dropping().to(dtype), x64().to(dtype)
    torch.manual_seed(1)
    expected = layer(x, EDGES)
    with fastgraph.enabled(min_edges=0):
        torch.manual_seed(1)
        found = layer(x, EDGES)
    assert fastgraph.status().rows[0].programs == 1
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-5  # rounding of sums of a few numbers
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_the_rate_may_change() -> None:
    class Rated(Scaled):
        rate = 0.5

        def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
            return F.dropout(x_i * x_j, p=self.rate)

    layer, x = Rated().double(), x64()
    first = routed(layer, x)
    layer.rate = 0.25
    assert not torch.equal(routed(layer, x), first)
    layer.rate = 0.0
    routed(layer, x)


def test_many_channels_are_refused() -> None:
    class Wide(Scaled):
        def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
            return F.dropout(torch.cat([x_i * x_j] * 9, -1), p=0.5)

    assert "more than 32 channels" in refused(Wide().double(), x64(), EDGES)
