"""Layers add bias and root term to the memory of what they aggregated, if nobody can see it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import GCNConv, GraphConv, Linear, SAGEConv

import fastgraph
from fastgraph.layers import modules
from fastgraph.layers.aggregation import Aggregation
from tests.ab import arguments, assert_same
from tests.graphs import random_edges

EDGES = random_edges(12, 12, 40)


def features() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(12, 4)


@pytest.fixture
def aggregated(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What the routed aggregations returned."""
    found: list[Tensor] = []
    placed = Aggregation._placed

    def recording(aggregation: Aggregation, out: Tensor) -> Tensor:
        found.append(placed(aggregation, out))
        return found[-1]

    monkeypatch.setattr(Aggregation, "_placed", recording)
    return found


def without_linear(conv: SAGEConv) -> SAGEConv:
    conv.lin_l = conv.lin_r = torch.nn.Identity()
    return conv


@pytest.mark.parametrize(
    ("conv", "owned"),
    [
        (GCNConv(4, 5), True),
        (GCNConv(4, 5, bias=False), True),
        (without_linear(SAGEConv(4, 4)), True),
        (without_linear(SAGEConv(4, 4, aggr="max")), False),  # its gradient needs the maxima
        (SAGEConv(4, 4), False),
        (GraphConv(4, 4), False),
    ],
)
def test_what_becomes_of_the_aggregation(conv: Any, owned: bool, aggregated: list[Tensor]) -> None:
    with fastgraph.enabled(strict=True):
        out = conv(features(), EDGES)
    assert (out.data_ptr() == aggregated[0].data_ptr()) is owned
    assert_same(conv, arguments(features(), EDGES))


@pytest.mark.parametrize("conv", [SAGEConv(4, 5), SAGEConv(4, 5, aggr="max"), GraphConv(4, 5)])
def test_the_root_term_is_added_to_the_product(conv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Tensor] = []
    upstream = modules.linear
    monkeypatch.setattr(modules, "linear", lambda *a: made.append(upstream(*a)) or made[-1])
    with fastgraph.enabled(strict=True):
        out = conv(features(), EDGES)
    assert len(made) == 2 and out.data_ptr() == made[0].data_ptr()


def observed(module: Linear) -> Linear:
    module.register_forward_hook(lambda module, given, out: setattr(module, "seen", out))
    return module


@pytest.mark.parametrize(
    ("conv", "name"), [(SAGEConv(4, 5), "lin_l"), (GraphConv(4, 5), "lin_rel")]
)
def test_a_hook_sees_what_it_would_see_upstream(conv: Any, name: str) -> None:
    module, x = observed(getattr(conv, name)), features()
    expected = conv(x, EDGES)
    seen = module.seen.clone()
    del module.seen
    with fastgraph.enabled(strict=True):
        torch.testing.assert_close(conv(x, EDGES), expected)
    torch.testing.assert_close(module.seen, seen)


def test_global_hooks_see_what_they_would_see_upstream() -> None:
    conv, x, seen = SAGEConv(4, 5), features(), {}

    def hook(module: torch.nn.Module, given: Any, out: Tensor) -> None:
        seen[module] = out

    handle = torch.nn.modules.module.register_module_forward_hook(hook)
    try:
        conv(x, EDGES)
        expected = {module: out.clone() for module, out in seen.items()}
        seen.clear()
        with fastgraph.enabled(strict=True):
            conv(x, EDGES)
    finally:
        handle.remove()
    for module in (conv, conv.lin_l, conv.lin_r):
        torch.testing.assert_close(seen[module], expected[module])


@pytest.mark.parametrize(
    ("conv", "names"),
    [(SAGEConv(4, 5), ("lin_l", "lin_r")), (GraphConv(4, 5), ("lin_rel", "lin_root"))],
)
def test_modules_are_called_in_upstreams_order(conv: Any, names: tuple[str, ...]) -> None:
    """They may draw random numbers."""
    for name in names:
        setattr(conv, name, torch.nn.Sequential(getattr(conv, name), torch.nn.Dropout()))
    x = features()
    torch.manual_seed(1)
    expected = conv(x, EDGES)
    torch.manual_seed(1)
    with fastgraph.enabled(strict=True):
        torch.testing.assert_close(conv(x, EDGES), expected)


def test_a_replaced_linear_keeps_its_result() -> None:
    """A module may return what it keeps, and then nothing may be added to it."""

    class Constant(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value = torch.ones(12, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.value

    conv = SAGEConv(4, 5)
    conv.lin_l = Constant()
    with fastgraph.enabled(strict=True):
        conv(features(), EDGES)
    assert torch.equal(conv.lin_l.value, torch.ones(12, 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_bias_of_another_dtype(dtype: torch.dtype) -> None:
    conv, x = GCNConv(4, 5), features()
    conv.bias = torch.nn.Parameter(torch.randn(5, dtype=dtype))
    expected = conv(x, EDGES)
    with fastgraph.enabled(strict=True):
        out = conv(x, EDGES)
    assert out.dtype == expected.dtype
    torch.testing.assert_close(out, expected)


def test_second_derivatives() -> None:
    def gradient(conv: Any) -> Tensor:
        x = features().double().requires_grad_()
        (first,) = torch.autograd.grad(conv(x, EDGES).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    for conv in (GCNConv(4, 5), SAGEConv(4, 5), GraphConv(4, 5), SAGEConv(4, 5, aggr="max")):
        expected = gradient(conv.double())
        with fastgraph.enabled(strict=True):
            torch.testing.assert_close(gradient(conv), expected)
