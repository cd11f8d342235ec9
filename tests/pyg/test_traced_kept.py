"""Values of edges that a message leaves in its layer come from the same program."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import softmax

import fastgraph
from tests.ab import Arguments, arguments
from tests.graphs import Case, quantised, random_edges, square_cases
from tests.outcomes import differences
from tests.pyg.traced_layers import (
    CHANNELS,
    EDGES,
    NODES,
    Scaled,
    refused,
    routed,
    second_derivative,
    traces,
    x64,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::fastgraph.FallbackWarning"),
    pytest.mark.usefixtures("nothing_known"),
]


class Leaving(Scaled):
    """A layer that leaves its weights, of each head, in an attribute that nothing clears."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.weights: Tensor | None = None

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        weights = (x_i * x_j).view(-1, 2, 2).sum(-1).tanh()
        self.weights = weights
        return (weights.unsqueeze(-1) * x_j.view(-1, 2, 2)).view(-1, 4)


class Giving(Leaving):
    """A layer that returns what its message has left."""

    def forward(self, x: Any, edge_index: Tensor) -> Any:
        return super().forward(x, edge_index), self.weights


def fa(case: Case, **options: Any) -> Arguments:
    x, first = quantised(case.num_src, CHANNELS), quantised(case.num_src, CHANNELS, seed=1)
    return arguments(x, first, case.edge_index, **options)


def calls_of(**options: Any) -> dict[str, Arguments]:
    cases = [case for case in square_cases() if case.name not in ("int32", "hub")]
    return {case.name: fa(case, **options) for case in cases}


@pytest.mark.parametrize("gives", [None, True, False])
@pytest.mark.parametrize("cached", [True, False])
def test_attention_of_fa_conv(gives: bool | None, cached: bool) -> None:
    torch.manual_seed(0)
    layer = pyg.FAConv(CHANNELS, cached=cached).double()
    calls = calls_of(return_attention_weights=gives)
    assert differences(layer, calls) == {}
    row = fastgraph.status().row("FAConv")
    assert (dict(row.reasons), row.programs) == ({}, len(calls))
    assert layer._alpha is None


class Attending(Giving):
    """A layer that returns the softmax over neighbours by which its message is weighted."""

    def message(self, x_i: Tensor, x_j: Tensor, index: Tensor) -> Tensor:
        weights = softmax((x_i * x_j).view(-1, 2, 2).sum(-1), index)
        self.weights = weights
        return (weights.unsqueeze(-1) * x_j.view(-1, 2, 2)).view(-1, 4)


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_softmaxes_that_a_user_gives(flow: str) -> None:
    torch.manual_seed(0)
    calls = {
        case.name: arguments(quantised(case.num_src, CHANNELS), case.edge_index)
        for case in square_cases()
        if case.name not in ("int32", "hub")
    }
    assert differences(Attending(flow=flow).double(), calls) == {}
    (row,) = fastgraph.status().rows
    assert row.programs == len(calls)


def test_weights_of_edges_that_a_user_gives() -> None:
    torch.manual_seed(0)
    layer = pyg.FAConv(CHANNELS, normalize=False).double()
    calls = {
        case.name: arguments(
            *fa(case)[0], quantised(case.num_edges, seed=2), return_attention_weights=True
        )
        for case in square_cases()
        if case.name not in ("int32", "hub")
    }
    assert differences(layer, calls) == {}
    assert not fastgraph.status().row("FAConv").reasons


def test_dropout_of_what_is_left() -> None:
    layer = pyg.FAConv(CHANNELS, dropout=0.5).double()
    call = x64(), x64(), EDGES
    for number in (1, 2):
        torch.manual_seed(0)
        expected = layer(*call)
        torch.manual_seed(0)
        with fastgraph.enabled(min_edges=0):
            torch.testing.assert_close(layer(*call), expected)
        assert fastgraph.status().row("FAConv").programs == number
        layer.eval()


def test_a_layer_of_a_user() -> None:
    torch.manual_seed(0)
    layer = Giving().double()
    calls = {
        case.name: arguments(quantised(case.num_src, CHANNELS), case.edge_index)
        for case in square_cases()
        if case.name not in ("int32", "hub")
    }
    assert differences(layer, calls) == {}
    assert not fastgraph.status().row("Giving").reasons


def test_what_is_left_is_replaced_at_every_call() -> None:
    layer, x = Leaving().double(), x64()
    routed(layer, x)
    first = layer.weights
    edges = random_edges(NODES, NODES, 50)
    routed(layer, x, edges)
    second = layer.weights
    assert first is not None and second is not None
    assert (first.shape, second.shape) == ((40, 2), (50, 2))
    torch.testing.assert_close(
        second, (x[edges[1]] * x[edges[0]]).view(-1, 2, 2).sum(-1).tanh(), rtol=1e-12, atol=1e-12
    )
    assert traces(layer) == 1  # although the layer has another value of its own now
    del layer.weights
    routed(layer, x)
    assert layer.weights is not None


@pytest.mark.parametrize("leaf", ["x", "value", None])
def test_what_is_left_has_a_gradient_where_upstream_has(leaf: str | None) -> None:
    class Own(Scaled):
        def forward(self, x: Tensor, value: Tensor, edge_index: Tensor) -> Tensor:
            return self.propagate(edge_index, x=x, value=value)

        def message(self, x_i: Tensor, x_j: Tensor, value_j: Tensor) -> Tensor:
            self.weights = (x_i * x_j).tanh()
            weights = (x_i * x_j).tanh()
            return weights * value_j

    tensors = {"x": x64(), "value": x64()}
    if leaf is not None:
        tensors[leaf].requires_grad_()
    layer, found = Own().double(), []
    for min_edges in (1000, 0):  # upstream, ours
        with fastgraph.enabled(min_edges=min_edges):
            layer(*tensors.values(), EDGES)
        found.append(layer.weights)
    assert fastgraph.status().row("Own").programs == 1
    expected, ours = found
    torch.testing.assert_close(ours, expected)
    assert ours.requires_grad == expected.requires_grad == (leaf == "x")
    if leaf == "x":
        x = tensors["x"]
        grads = [torch.autograd.grad(out.square().sum(), x) for out in found]
        torch.testing.assert_close(grads[1], grads[0], rtol=1e-12, atol=1e-12)


def test_second_derivatives() -> None:
    torch.manual_seed(0)
    layer, x = Giving().double(), x64().requires_grad_()

    def loss() -> Tensor:
        out, weights = layer(x, EDGES)
        return out.square().sum() + weights.square().sum()

    expected = second_derivative(loss, x)
    with fastgraph.enabled(min_edges=0):
        found = second_derivative(loss, x)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert fastgraph.status().row("Giving").programs == 1


def test_what_is_left_is_told() -> None:
    layer = Leaving().double()
    routed(layer, x64())
    text = fastgraph.explain(layer)
    assert "\n  edge t1\n" in text and "\nleft in weights: t1\n" in text


def of_an_argument(self: Any, x_j: Tensor, e: Tensor) -> Tensor:
    self.kept = e.view(-1, 2, 2)[:, 1]
    return x_j * e


def of_a_parameter(self: Any, x_j: Tensor, e: Tensor) -> Tensor:
    self.kept = self.weight * 2
    return x_j * e


def of_a_mask(self: Any, x_j: Tensor, e: Tensor) -> Tensor:
    self.kept = x_j > e
    return x_j * e


def a_number(self: Any, x_j: Tensor, e: Tensor) -> Tensor:
    self.kept = 3
    return x_j * e


def under_a_condition(self: Any, x_j: Tensor, e: Tensor) -> Tensor:
    if not self.training:
        self.kept = x_j * e
    return x_j * e


def twice(self: Any, x_j: Tensor, e: Tensor) -> Tensor:
    self.kept = self.other = (x_j * e).sin()
    return x_j * e


def viewed(self: Any, x_j: Tensor, e: Tensor) -> Tensor:
    kept = (x_j * e).sin()
    self.kept, self.other = kept, kept.view(-1, 2, 2)
    return x_j * e


def weights(self: Any, x_j: Tensor, e: Tensor, index: Tensor) -> Tensor:
    kept = softmax(e, index) * 2
    self.kept = kept
    return x_j * kept


def read(self: Any, x_j: Tensor, e: Tensor) -> Tensor:
    self.kept = x_j * e
    return self.kept


def of_another(self: Any, x_j: Tensor, e: Tensor) -> Tensor:
    self.act.kept = x_j * e
    return x_j * e


def of_other_code(self: Any, x_j: Tensor, e: Tensor) -> Tensor:
    def leave(self: Any, value: Tensor) -> Tensor:
        self.kept = value
        return value

    return leave(self, x_j * e)


def renamed(self: Any, x_j: Tensor, e: Tensor) -> Tensor:
    out = x_j * e
    self = self.act
    self.kept = out
    return out


LEFT = {
    of_an_argument: "it leaves a tensor in kept that is no new one of edges",
    of_a_parameter: "it leaves a tensor in kept that is no new one of edges",
    of_a_mask: "it leaves a tensor in kept that is no new one of edges",
    a_number: "it sets the attribute kept",
    under_a_condition: "it sets the attribute kept",
    twice: "it leaves the same values of edges in kept and other",
    viewed: "it leaves the same values of edges in kept and other",
    weights: "it leaves a multiple of a softmax over neighbours in kept",
    read: "it sets the attribute kept",
    of_another: "it sets the attribute kept",
    of_other_code: "it sets the attribute kept",
    renamed: "it sets the attribute kept",
}


class OfEdges(MessagePassing):
    """No layer with a `propagate` that PyG has made: it finds no source of the classes below."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")
        self.act = torch.nn.ReLU()
        self.weight = torch.nn.Parameter(torch.randn(CHANNELS))

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, e=e)


@pytest.mark.parametrize("function", LEFT, ids=lambda function: function.__name__)
def test_what_is_left_to_upstream(function: Any) -> None:
    message = types.FunctionType(function.__code__, globals(), "message")
    layer = type("Own", (OfEdges,), {"message": message})().double()
    reason = refused(layer, x64(), EDGES, x64(EDGES.shape[1], CHANNELS))
    assert reason == f"its message is no edge program: {LEFT[function]}"
