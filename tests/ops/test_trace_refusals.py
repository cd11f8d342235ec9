"""Messages of layers and of users of which no program can be made, each refused with its reason."""

from __future__ import annotations

import random
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.nn import functional as F

from fastgraph.edge_programs.node_counts import NUM_ROWS
from fastgraph.edge_programs.trace import trace
from fastgraph.edge_programs.traced import Argument
from fastgraph.plugins.refusal import Refusal
from tests.ops.test_trace import INDEX, MESSAGES, X_I, X_J, E, of


class Straight(torch.autograd.Function):
    """A step with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Layer(nn.Module):
    """A layer with state that messages might change, and values that they might look at."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.seen: list[object] = []
        self.calls = 0
        self.message: Any = None


def counts(self: Layer, x_j: Tensor) -> Tensor:
    self.calls += 1
    return x_j * 2


def remembers(self: Layer, x_j: Tensor) -> Tensor:
    self.seen.append(x_j.shape)
    return x_j * 2


def edits(self: Layer, x_j: Tensor) -> Tensor:
    self.lin.bias.data.add_(1)
    return x_j * 2


def looks_at_state(self: Layer, x_j: Tensor) -> Tensor:
    return x_j if self.lin.bias[0] > 0 else -x_j


def swallows(self: Layer, x_j: Tensor) -> Tensor:
    try:
        return x_j * 2 if x_j.sum(0).max() > 0 else x_j
    except BaseException:
        return x_j * 3


KEPT: list[Tensor] = []


def leaks(x_j: Tensor) -> Tensor:
    KEPT.append(x_j)
    return x_j * 2


def grads_off(x_i: Tensor, x_j: Tensor) -> Tensor:
    with torch.no_grad():
        gate = torch.sigmoid(x_i)
    return gate * x_j


CONSTANT = torch.full((8,), 2.0)
NODES = {"x_i": X_I, "x_j": X_J}

REFUSED: dict[str, tuple[Callable[..., Any], dict[str, object], str]] = {
    "a branch": (lambda x_j: x_j if x_j.sum() > 0 else -x_j, {"x_j": X_J}, "across edges"),
    "a branch on an edge": (
        lambda x_j: x_j if x_j.amax(-1).select(0, 0) > 0 else -x_j,
        {"x_j": X_J},
        "across edges",
    ),
    "a branch on state": (looks_at_state, {"x_j": X_J}, "depends on the values"),
    "a number": (lambda x_j, p: x_j * p.item(), {"x_j": X_J, "p": of("parameter")}, "the values"),
    "numpy": (lambda x_j: x_j * float(x_j.numpy()[0, 0]), {"x_j": X_J}, "it raises TypeError"),
    "a mask of edges": (lambda x_j: x_j[x_j[:, 0] > 0], {"x_j": X_J}, "aten"),
    "dropout of many channels": (
        lambda x_j: F.dropout(torch.cat([x_j] * 5, -1), 0.5, True),
        {"x_j": X_J},
        "draws random numbers for more than 32 channels",
    ),
    "dropout of parameters": (
        lambda x_j, p: x_j * F.dropout(p, 0.5, True),
        {"x_j": X_J, "p": of("parameter")},
        "draws random numbers for what is no value of edges",
    ),
    "another dropout": (
        lambda x_j: F.alpha_dropout(x_j, 0.5, True),
        {"x_j": X_J},
        "draws random numbers",
    ),
    "noise": (lambda x_j: x_j + torch.rand_like(x_j), {"x_j": X_J}, "draws random numbers"),
    "noise of no argument": (lambda x_j: x_j * torch.rand(8), {"x_j": X_J}, "draws random"),
    "a random branch": (lambda x_j: x_j * random.random(), {"x_j": X_J}, "another one every time"),
    "a softmax over edges": (lambda x_j: x_j.softmax(0), {"x_j": X_J}, "across edges"),
    "a sum over edges": (lambda x_j: x_j - x_j.mean(0), {"x_j": X_J}, "across edges"),
    "neighbouring edges": (lambda x_j: torch.cat([x_j[1:], x_j[:1]]), {"x_j": X_J}, "across edges"),
    "a running sum": (lambda x_j: x_j.cumsum(0), {"x_j": X_J}, "not known to be row-wise"),
    "rolled edges": (lambda x_j: x_j.roll(1, 0), {"x_j": X_J}, "not known to be row-wise"),
    "flipped edges": (lambda x_j: x_j.flip(0), {"x_j": X_J}, "not known to be row-wise"),
    "products of edges": (lambda x_i, x_j: x_i @ x_j.t() @ x_j, NODES, "aten"),
    "regrouped edges": (
        lambda x_j: x_j.view(8, -1).sum(0).view(-1, 1) * x_j,
        {"x_j": X_J},
        "across edges",
    ),
    "crossed dimensions": (
        lambda w, x_j: (w * x_j.view(-1, 8, 1)).squeeze(),
        {"w": of("edge"), "x_j": X_J},
        "across edges",
    ),
    "the graph": (
        lambda x_j, index: x_j * index.view(-1, 1),
        {"x_j": X_J, "index": INDEX},
        "takes index",
    ),
    "a number of nodes": (
        lambda x_j, n: x_j / n,
        {"x_j": X_J, "n": NUM_ROWS},
        "it takes the number of nodes",
    ),
    "the degree": (lambda x_j: x_j / x_j.shape[0], {"x_j": X_J}, "the number of edges"),
    "few edges": (
        lambda x_j: x_j * (2.0 if x_j.shape[0] < 50 else 3.0),
        {"x_j": X_J},
        "the number of edges",
    ),
    "millions of edges": (
        lambda x_j: x_j * (2.0 if x_j.shape[0] < 5_000_000 else 3.0),
        {"x_j": X_J},
        "the number of edges",
    ),
    "a sum of masks": (
        lambda x_i, x_j: x_i * ((x_i > 9) + (x_j > 9)),
        {"x_i": X_I, "x_j": X_J},
        "it makes a mask (aten.add.Tensor)",
    ),
    "a mask of numbers": (lambda x_j: x_j * x_j.bool(), {"x_j": X_J}, "it makes a mask"),
    "work in place": (lambda x_j, w: w.mul_(2) * x_j, {"x_j": X_J, "w": of("edge")}, "others see"),
    "work in place on a part": (
        lambda x_i, x_j: (x_i * x_j)[:, :2].relu_(),
        {"x_i": X_I, "x_j": X_J},
        "others see",
    ),
    "a counter": (counts, {"x_j": X_J}, "it changes calls"),
    "a list": (remembers, {"x_j": X_J}, "it changes seen"),
    "an edited parameter": (edits, {"x_j": X_J}, "aten"),
    "a leak": (leaks, {"x_j": X_J}, "keeps values"),
    "a swallowed refusal": (swallows, {"x_j": X_J}, "across edges"),
    "a foreign tensor": (lambda x_j: x_j * CONSTANT, {"x_j": X_J}, "no argument, parameter"),
    "a new tensor": (lambda x_j: x_j * torch.ones(8), {"x_j": X_J}, "makes a tensor"),
    "a detached value": (lambda x_i, x_j: x_i.detach() * x_j, NODES, "stops gradients"),
    "no gradients": (grads_off, NODES, "gradients are not"),
    "another gradient": (lambda x_i, x_j: Straight.apply(x_i - x_j), NODES, "gradients are not"),
    "another dtype": (lambda x_i, x_j: (x_i * x_j).float(), NODES, "torch.float32"),
    "an unknown function": (lambda x_i, x_j: torch.lgamma(x_i + x_j), NODES, "aten.lgamma"),
    "another beta": (lambda x_i, x_j: F.softplus(x_i + x_j, 2.0), NODES, "with such beta"),
    "other gelu": (lambda x_i, x_j: F.gelu(x_i + x_j, approximate="tanh"), NODES, "approximate"),
    "a floor": (
        lambda x_i, x_j: torch.div(x_i, x_j, rounding_mode="floor"),
        NODES,
        "with such rounding_mode",
    ),
    "stacked edges": (lambda x_i, x_j: torch.stack([x_i, x_j]).sum(0), NODES, "across edges"),
    "repeated edges": (lambda x_j: x_j.repeat(2, 1), {"x_j": X_J}, "across edges"),
    "repeated channels": (lambda x_j: x_j.repeat(1, 2), {"x_j": X_J}, "not known to be row-wise"),
    "a norm over edges": (lambda x_j: x_j / x_j.norm(dim=0), {"x_j": X_J}, "across edges"),
    "a sum over heads": (
        lambda x_i, x_j: (x_i * x_j).view(-1, 2, 2, 2).sum(2),
        NODES,
        "sums over heads between other dimensions",
    ),
    "no tensor": (lambda x_j: (x_j, x_j), {"x_j": X_J}, "no tensor of edges"),
    "a tensor of no edge": (
        lambda x_j, p: p * 2,
        {"x_j": X_J, "p": of("parameter", 8)},
        "no tensor",
    ),
    "an error": (lambda x_j: x_j.missing, {"x_j": X_J}, "raises AttributeError"),
    "integers alone": (
        lambda x_j: x_j,
        {"x_j": Argument("gathered", (8,), torch.int64)},
        "no tensors of a floating-point dtype",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_message_that_is_no_program_is_refused(name: str) -> None:
    function, arguments, reason = REFUSED[name]
    if function in (counts, remembers, edits, looks_at_state, swallows):
        layer = Layer().double()
        before = {key: tensor.clone() for key, tensor in layer.state_dict().items()}
        refusal = trace(function.__get__(layer), arguments)
        assert layer.calls == 0 and layer.seen == []
        torch.testing.assert_close(layer.state_dict(), before, rtol=0, atol=0)
    else:
        refusal = trace(function, arguments)
    assert isinstance(refusal, Refusal)
    assert reason in refusal.reason


REFUSED_LAYERS = {
    "EdgeConv with statistics": (
        lambda: pyg.EdgeConv(nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8))),
        NODES,
        "statistics of the batch",
    ),
    "GeneralConv with an unknown softmax": (
        lambda: pyg.GeneralConv(8, 8, attention=True, heads=2),
        MESSAGES["GeneralConv"].arguments,
        "the number of nodes",
    ),
    "NNConv": (
        lambda: pyg.NNConv(8, 4, nn.Sequential(nn.Linear(3, 32), nn.ReLU())),
        {"x_j": X_J, "edge_attr": of("edge", 3)},
        "a matrix of each edge",
    ),
}


@pytest.mark.parametrize("name", REFUSED_LAYERS)
def test_a_layer_whose_message_is_no_program_is_refused(name: str) -> None:
    make, arguments, reason = REFUSED_LAYERS[name]
    layer = make().double()
    before = {key: tensor.clone() for key, tensor in layer.state_dict().items()}
    refusal = trace(layer.message, arguments)
    assert isinstance(refusal, Refusal)
    assert reason in refusal.reason
    torch.testing.assert_close(layer.state_dict(), before, rtol=0, atol=0)


def test_an_argument_that_is_called_as_a_parameter_is_refused() -> None:
    layer = nn.Module()
    layer.factor = nn.Parameter(torch.randn(8, dtype=torch.float64))
    layer.message = types.MethodType(lambda self, x_j, factor: x_j * factor, layer)
    refusal = trace(layer.message, {"x_j": X_J, "factor": of("parameter", 8)})
    assert isinstance(refusal, Refusal)
    assert "takes factor, as a parameter of its layer is called" in refusal.reason


def test_a_layer_without_its_shapes_is_refused() -> None:
    layer = pyg.GENConv(-1, 8)
    layer.lin_edge = nn.LazyLinear(8)
    refusal = trace(layer.message, {"x_j": X_J, "edge_attr": E})
    assert isinstance(refusal, Refusal)
    assert "without a shape" in refusal.reason
