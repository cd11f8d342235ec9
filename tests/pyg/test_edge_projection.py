"""Layers of attention with features of edges: all widths, what is frozen, and how much is done."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.nn import GATv2Conv, MessagePassing, TransformerConv

import fastgraph
from fastgraph.layers.edge_projection import (
    is_folded_by_operator,
    project_edge_channels,
    with_edge_channels,
)
from fastgraph.pyg import transformer_conv
from fastgraph.routing.conditions import INDIFFERENT_MODES
from tests.ab import arguments, assert_same
from tests.graphs import random_edges

NODES, CHANNELS = 24, 8
EDGES = random_edges(NODES, NODES, 90)


def features(*shape: int) -> Tensor:
    torch.manual_seed(4)
    return torch.randn(*shape)


def fold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fold the projection around an operator, as where no backend has one that does."""
    monkeypatch.setattr(transformer_conv, "is_folded_by_operator", lambda query: False)


@pytest.fixture(params=["within", "around"])
def folded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the projection of edges is folded: within the operator, or around it."""
    if request.param == "around":
        fold(monkeypatch)
    else:
        with fastgraph.enabled():
            if not is_folded_by_operator(torch.empty(0)):
                pytest.skip("this backend has no operator that folds")
    return str(request.param)


@pytest.mark.parametrize("heads", [1, 3, 4])
@pytest.mark.parametrize("edge_dim", [1, 3, 4, 16, 33])
@pytest.mark.parametrize("cls", [GATv2Conv, TransformerConv])
@pytest.mark.usefixtures("folded")
def test_every_width(cls: type[MessagePassing], edge_dim: int, heads: int) -> None:
    torch.manual_seed(0)
    module = cls(CHANNELS, 7, heads=heads, edge_dim=edge_dim)
    assert_same(module, arguments(features(NODES, CHANNELS), EDGES, features(90, edge_dim)))


@pytest.mark.parametrize("frozen", ["edge", "weight", "both"])
@pytest.mark.parametrize("cls", [GATv2Conv, TransformerConv])
@pytest.mark.usefixtures("folded")
def test_what_is_frozen_gets_no_gradient(cls: type[MessagePassing], frozen: str) -> None:
    torch.manual_seed(0)
    module = cls(CHANNELS, 7, heads=3, edge_dim=5).double()
    module.lin_edge.weight.requires_grad_(frozen == "edge")
    x, edge = features(NODES, CHANNELS).double(), features(90, 5).double()
    edge.requires_grad_(frozen == "weight")
    results = []
    for enabled in (False, True):
        module.zero_grad()
        edge.grad = None
        accelerated = fastgraph.enabled(min_edges=0, strict=True)
        with accelerated if enabled else contextlib.nullcontext():
            module(x, EDGES, edge).square().sum().backward()
        found = dict(module.named_parameters(), edge=edge)
        results.append({n: t.grad.clone() for n, t in found.items() if t.grad is not None})
    assert results[0].keys() == results[1].keys()
    for name, expected in results[0].items():
        torch.testing.assert_close(results[1][name], expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("function", [with_edge_channels, project_edge_channels])
def test_first_and_second_derivatives(function: Any) -> None:
    weight = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    width = 3 if function is with_edge_channels else 7
    x = torch.randn(5, 2, width, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, (x, weight))
    assert torch.autograd.gradgradcheck(function, (x, weight))


def test_no_nodes_and_no_channels() -> None:
    for nodes, heads, channels, edge_dim in ((0, 2, 3, 4), (5, 2, 0, 4), (5, 2, 3, 0)):
        weight = torch.randn(heads, channels, edge_dim, requires_grad=True)
        query = torch.randn(nodes, heads, channels, requires_grad=True)
        out = with_edge_channels(query, weight)
        assert out.shape == (nodes, heads, channels + edge_dim)
        folded = project_edge_channels(out, weight)
        assert folded.shape == query.shape
        folded.sum().backward()
        assert weight.grad is not None and bool(weight.grad.isfinite().all())


class _Products(TorchDispatchMode):
    """Counts products of matrices of several heads, and concatenations."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function._schema.name.removeprefix("aten::")
        if name in ("bmm", "baddbmm_", "cat", "einsum"):
            self.seen[name] += 1
        return function(*args, **(kwargs or {}))


INDIFFERENT_MODES.append(_Products)


@pytest.mark.parametrize(
    ("wanted", "products"), [("all", 6), ("weight", 5), ("nodes", 4), ("frozen", 4)]
)
def test_products_around_the_operator(wanted: str, products: int, folded: str) -> None:
    """Two fold, two are their gradients for nodes, and two those for the weight, if it is asked.

    Within the operator there are none that torch knows of.
    """
    module = TransformerConv(CHANNELS, 7, heads=3, edge_dim=5)
    weight = module.lin_edge.weight.requires_grad_(wanted != "frozen")
    x = features(NODES, CHANNELS).requires_grad_(wanted != "weight")
    if wanted == "weight":
        module.lin_query.requires_grad_(False)
    inputs = {"all": [x, weight], "weight": [weight]}.get(wanted, [x])
    with fastgraph.enabled(min_edges=0, strict=True):
        out = module(x, EDGES, features(90, 5))
        with _Products() as backward:
            torch.autograd.grad(out.sum(), inputs)
        with _Products() as forward:
            module(x, EDGES, features(90, 5))
    counts = forward.seen + backward.seen
    assert counts["bmm"] + counts["baddbmm_"] == (products if folded == "around" else 0)
    assert counts["cat"] == 0


def test_who_folds() -> None:
    with fastgraph.enabled(backend="cpu"):
        assert is_folded_by_operator(torch.empty(0))
        assert not is_folded_by_operator(torch.empty(0, dtype=torch.bfloat16))
        assert not is_folded_by_operator(torch.empty(0, device="meta"))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "averaged": {"concat": False},
    "beta": {"beta": True},
    "no root": {"root_weight": False, "bias": False},
}


@pytest.mark.parametrize("heads", [1, 3, 4])
@pytest.mark.parametrize("edge_dim", [1, 4, 33])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.usefixtures("folded")
def test_every_option(options: str, edge_dim: int, heads: int) -> None:
    torch.manual_seed(0)
    module = TransformerConv(CHANNELS, 7, heads=heads, edge_dim=edge_dim, **OPTIONS[options])
    assert_same(module, arguments(features(NODES, CHANNELS), EDGES, features(90, edge_dim)))


@pytest.mark.parametrize("order", ["any", "by destination"])
@pytest.mark.usefixtures("folded")
def test_awkward_graphs(order: str) -> None:
    """A hub, edges that occur twice, and nodes without any edge on either side."""
    sources = torch.tensor([0, 3, 3, 1, 1, 1, 4, 0, 2, 2, 0])
    destinations = torch.tensor([2, 2, 2, 0, 0, 2, 2, 2, 2, 2, 5])
    edges = torch.stack([sources, destinations])
    if order == "by destination":
        edges = edges[:, destinations.argsort(stable=True)]
    torch.manual_seed(0)
    module = TransformerConv((CHANNELS, 5), 3, heads=2, edge_dim=6)
    pair = (features(6, CHANNELS), features(7, 5))
    assert_same(module, arguments(pair, edges, features(11, 6)))
    none = torch.empty(2, 0, dtype=torch.long)
    assert_same(module, arguments(pair, none, features(0, 6)))


def test_weights_and_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights come in the order of edges, and the same edges are dropped either way."""
    torch.manual_seed(0)
    module = TransformerConv(CHANNELS, 7, heads=3, edge_dim=5, dropout=0.5).double()
    given = (features(NODES, CHANNELS).double(), EDGES, features(90, 5).double())
    found = []
    for is_around in (False, True):
        if is_around:
            fold(monkeypatch)
        torch.manual_seed(7)
        with fastgraph.enabled(min_edges=0, strict=True):
            found.append(module(*given))
    torch.testing.assert_close(*found)
    module.eval()
    expected, (_, alpha) = module(*given, return_attention_weights=True)
    with fastgraph.enabled(min_edges=0, strict=True):
        out, (_, weights) = module(*given, return_attention_weights=True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(weights, alpha)


@pytest.mark.parametrize("edited", ["edge_index", "edge_attr"])
@pytest.mark.usefixtures("folded")
def test_edits_between_the_passes(edited: str) -> None:
    module = TransformerConv(CHANNELS, 7, heads=3, edge_dim=5)
    index, edge = EDGES.clone(), features(90, 5)
    for enabled in (False, True):
        accelerated = fastgraph.enabled(min_edges=0, strict=True)
        with accelerated if enabled else contextlib.nullcontext():
            out = module(features(NODES, CHANNELS), index, edge)
            {"edge_index": index, "edge_attr": edge}[edited].zero_()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()
        index, edge = EDGES.clone(), features(90, 5)
