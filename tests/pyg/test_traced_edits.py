"""Tensors that are edited between the passes: upstream's gradients, or its error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import FastRGCNConv, MessagePassing

import fastgraph
from tests.pyg.traced_layers import CHANNELS, EDGES, x64

# What functions keep for their backward passes is the same for every backend.
pytestmark = pytest.mark.repeats

NUM_EDGES = EDGES.shape[1]


def heads(x: Tensor) -> Tensor:
    return x.view(-1, 2, CHANNELS // 2)


class Edited(MessagePassing):
    """A layer of a message that takes features of edges, and has parameters and buffers."""

    def __init__(self, function: Callable[..., Tensor], aggr: str) -> None:
        super().__init__(aggr=aggr)
        self.function = function
        self.first = nn.Linear(2, CHANNELS)
        self.lin = nn.Linear(CHANNELS + 2, CHANNELS)
        self.last = nn.Linear(CHANNELS, CHANNELS)
        self.weight = nn.Parameter(torch.randn(CHANNELS))
        self.register_buffer("factor", torch.randn(CHANNELS))

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, e=e)

    def message(self, x_i: Tensor, x_j: Tensor, e: Tensor) -> Tensor:
        return self.function(self, x_i, x_j, e)


MESSAGES: dict[str, Any] = {
    "added": lambda self, x_i, x_j, e: F.relu(x_j + e[:, :1]) * x_i,
    "multiplied": lambda self, x_i, x_j, e: F.relu(x_j * e[:, 1:]),
    "concatenated": lambda self, x_i, x_j, e: torch.tanh(self.lin(torch.cat([x_j * x_i, e], -1))),
    "mapped": lambda self, x_i, x_j, e: torch.sigmoid(self.first(e) + x_j),
    "of heads": lambda self, x_i, x_j, e: F.elu(heads(x_i) + e.view(-1, 2, 1)).flatten(1),
    "a bias": lambda self, x_i, x_j, e: self.last(F.relu(x_i + x_j + e[:, :1])),
    "by a parameter": lambda self, x_i, x_j, e: torch.tanh(x_j * self.weight + x_i),
    "a parameter added": lambda self, x_i, x_j, e: torch.tanh(x_j - x_i + self.weight),
    "by a buffer": lambda self, x_i, x_j, e: torch.tanh(x_j * self.factor) * x_i,
    "a buffer added": lambda self, x_i, x_j, e: torch.exp(x_j - self.factor) * x_i,
    "twice": lambda self, x_i, x_j, e: torch.sin(x_j + e[:, :1]) * e[:, 1:],
}

EDITS: dict[str, Callable[[Edited, Tensor, Tensor], Any]] = {
    "nothing": lambda layer, x, e: None,
    "edges": lambda layer, x, e: e.add_(1),
    "edges scaled": lambda layer, x, e: e.mul_(0.5),
    "edges in a view": lambda layer, x, e: e[0].fill_(3),
    "edges emptied": lambda layer, x, e: e.zero_(),
    "features": lambda layer, x, e: x.add_(1),
    "a bias": lambda layer, x, e: layer.last.bias.add_(1),
    "a matrix": lambda layer, x, e: layer.last.weight.add_(1),
    "a split matrix": lambda layer, x, e: layer.lin.weight.mul_(2),
    "a parameter": lambda layer, x, e: layer.weight.add_(1),
    "a buffer": lambda layer, x, e: layer.factor.add_(1),
}


def gradients(
    layer: Any, edit: Callable[..., Any], wanted: str, *others: Tensor
) -> list[Tensor] | str:
    """The gradients after an edit between the passes, or the error."""
    torch.manual_seed(1)
    x, e = x64(), x64(NUM_EDGES, 2)
    leaves = [t.requires_grad_() for name, t in (("x", x), ("e", e)) if name in wanted]
    state = {name: p.detach().clone() for name, p in layer.state_dict().items()}
    own_x, own_e = x * 1, e * 1
    out = layer(own_x, EDGES, own_e, *others)
    with torch.no_grad():
        edit(layer, own_x, own_e)
    try:
        leaves += layer.parameters() if "p" in wanted else ()
        return list(torch.autograd.grad(out.square().sum(), leaves, materialize_grads=True))
    except RuntimeError as error:
        return str(error).partition(":")[0]
    finally:
        layer.load_state_dict(state)


def assert_edits_are_upstreams(layer: Any, edit: Callable[..., Any], wanted: str) -> None:
    layer.requires_grad_("p" in wanted)
    expected = gradients(layer, edit, wanted)
    fastgraph.status().reset()
    with fastgraph.enabled(min_edges=0):
        found = gradients(layer, edit, wanted)
    assert fastgraph.status().row(type(layer).__name__).routed == 1
    if isinstance(expected, str) and edit is EDITS["a split matrix"]:
        # A program has a copy of its parts, and the gradients of what was there.
        expected = found if found == expected else gradients(layer, EDITS["nothing"], wanted)
    if isinstance(expected, str) or isinstance(found, str):
        assert found == expected
    else:
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("wanted", ["xep", "x", "e", "p"])
@pytest.mark.parametrize("aggr", ["sum", "max"])
@pytest.mark.parametrize("name", MESSAGES)
def test_edits_between_the_passes(name: str, aggr: str, wanted: str) -> None:
    torch.manual_seed(0)
    layer = Edited(MESSAGES[name], aggr).double()
    for edit in EDITS.values():
        assert_edits_are_upstreams(layer, edit, wanted)


@pytest.mark.parametrize("name", ["weight", "comp", "root", "bias"])
def test_matrices_of_types_are_edited_between_the_passes(name: str) -> None:
    torch.manual_seed(0)
    layer = FastRGCNConv(CHANNELS, 3, 2, num_bases=2).double()
    x, types = x64().requires_grad_(), torch.arange(NUM_EDGES) % 2
    leaves = [x, *layer.parameters()]

    def after_an_edit() -> list[Tensor] | str:
        out = layer(x, EDGES, types)
        with torch.no_grad():
            getattr(layer, name).add_(1)
        try:
            return list(torch.autograd.grad(out.square().sum(), leaves))
        except RuntimeError as error:
            return str(error).partition(":")[0]
        finally:
            with torch.no_grad():
                getattr(layer, name).sub_(1)

    expected = after_an_edit()
    with fastgraph.enabled(min_edges=0):
        found = after_an_edit()
    assert fastgraph.status().row("FastRGCNConv").routed == 1
    assert isinstance(found, str) == isinstance(expected, str)
    if isinstance(expected, str):
        assert found == expected
    else:
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_nothing_is_copied_that_upstream_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = Edited(MESSAGES["multiplied"], "sum").double(), x64().requires_grad_()
    e, copied = x64(NUM_EDGES, 2), []
    clone = Tensor.clone
    monkeypatch.setattr(Tensor, "clone", lambda t, **given: copied.append(t) or clone(t, **given))
    with fastgraph.enabled(min_edges=0):
        layer(x, EDGES, e)
        copied.clear()
        layer(x, EDGES, e)
    assert not any(tensor is e for tensor in copied)
    assert any(tensor is x for tensor in copied)


def test_wide_features_of_edges_are_not_copied() -> None:
    """A copy would be all that a program spares, so edits are an error here alone."""
    layer, x = Edited(lambda self, x_i, x_j, e: F.relu(x_j + e), "sum").double(), x64()
    for min_edges, is_error in ((1000, False), (0, True)):  # upstream, ours
        e = x64(NUM_EDGES, CHANNELS)
        with fastgraph.enabled(min_edges=min_edges):
            out = layer(x.requires_grad_(), EDGES, e)
        e += 1
        if is_error:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()
        else:
            out.sum().backward()
    assert fastgraph.status().row("Edited").routed == 1
