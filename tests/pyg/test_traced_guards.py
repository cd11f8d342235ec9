"""A message is traced anew when what it reads has changed, and not before."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fastgraph
from tests.pyg.traced_layers import (
    CHANNELS,
    EDGES,
    NODES,
    Scaled,
    of_its_object,
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


class Settings:
    scale = 2.0


@pytest.mark.parametrize("place", ["attribute", "closure", "variable"])
def test_an_attribute_of_a_class_that_is_taken_as_a_value(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = Settings

    def of_a_closure(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
        return local.scale * x_i * x_j

    def of_a_variable(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
        settings = Settings
        return settings.scale * x_i * x_j

    messages = {"attribute": of_its_object, "closure": of_a_closure, "variable": of_a_variable}
    layer, x = with_message(messages[place])().double(), x64()
    layer.config = Settings
    first = routed(layer, x)
    monkeypatch.setattr(Settings, "scale", 3.0)
    torch.testing.assert_close(routed(layer, x), 1.5 * first)


def test_an_attribute_that_a_pattern_reads() -> None:
    class Matched(Scaled):
        def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
            match self:
                case Scaled(scale=scale):
                    return scale * x_i * x_j
            raise AssertionError

    layer, x = Matched().double(), x64()
    first = routed(layer, x)
    layer.scale = 1.5
    torch.testing.assert_close(routed(layer, x), 3 * first)


def test_a_builtin_that_is_defined_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = with_message(lambda self, x_i, x_j: abs(x_i) * x_j)().double(), x64()
    routed(layer, x)
    monkeypatch.setitem(globals(), "abs", lambda x: 5 * x)
    routed(layer, x)


def test_parameters_are_told_from_buffers() -> None:
    class Told(Scaled):
        def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
            return x_i * (x_j * 2 if isinstance(self.weight, nn.Parameter) else x_j)

    routed(Told().double(), x64())


def test_a_method_that_comes_after_a_call() -> None:
    layer, x = Scaled().double(), x64()
    cls = type("Later", (Scaled,), {})
    layer.__class__ = cls
    routed(layer, x)
    cls.aggregate = lambda self, inputs, index, ptr=None, dim_size=None: (
        2 * self.aggr_module(inputs, index, ptr=ptr, dim_size=dim_size, dim=self.node_dim)
    )
    assert refused(layer, x, EDGES) == "aggregate is overridden"


class Acting(nn.Module):
    """A module with an attribute of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = 0.1

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x, self.slope)


def test_an_attribute_is_changed() -> None:
    layer, x = Scaled(act=Acting()).double(), x64()
    found = [routed(layer, x)]
    layer.scale = 2.0
    found.append(routed(layer, x))
    layer.act.slope = 0.9
    found.append(routed(layer, x))
    layer.act = nn.Tanh()
    found.append(routed(layer, x))
    layer.act = nn.Sequential(nn.Tanh(), nn.Sigmoid())
    found.append(routed(layer, x))
    layer.act = nn.Sequential(nn.Sigmoid(), nn.Tanh())
    found.append(routed(layer, x))
    layer.lin = nn.Linear(2 * CHANNELS, CHANNELS, bias=False).double()
    found.append(routed(layer, x))
    assert traces(layer) == len(found) == 7
    assert all(not torch.allclose(a, b) for a, b in pairwise(found))
    layer.scale = 0.5
    layer.weight = nn.Parameter(x64(1))  # which is broadcast
    routed(layer, x)


def test_zeros_of_both_signs() -> None:
    class Inverse(Scaled):
        def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
            return x_i.sign() * x_j.abs() / (x_j * 0 + 1) + 1 / (self.scale * x_j.square() - 1)

    layer, x = Inverse().double(), x64()
    layer.scale = 0.0
    routed(layer, x)
    layer.scale = -0.0
    routed(layer, x)
    assert traces(layer) == 2


def test_a_change_of_class_attributes_globals_and_closures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer, x = Reading().double(), x64()
    first = routed(layer, x)
    monkeypatch.setattr(Reading, "factor", 7.0)
    second = routed(layer, x)
    monkeypatch.setitem(globals(), "FACTOR", 11.0)
    third = routed(layer, x)
    monkeypatch.setitem(globals(), "helper", lambda x: x.cos())
    fourth = routed(layer, x)
    monkeypatch.setattr(Constants, "shift", 13.0)
    fifth = routed(layer, x)
    monkeypatch.setattr(Reading, "message", lambda _, x_i, x_j: x_i * x_j)
    sixth = routed(layer, x)
    monkeypatch.undo()
    monkeypatch.setattr(Derived, "rotated", lambda _, x: x.exp())
    layer = Derived().double()
    seventh = routed(layer, x)
    monkeypatch.setattr(Derived, "rotated", Reading.rotated)
    eighth = routed(layer, x)
    assert not torch.allclose(seventh, eighth)
    found = [first, second, third, fourth, fifth, sixth]
    assert all(not torch.allclose(a, b) for a, b in pairwise(found))


FACTOR = 3.0


class Constants:
    shift = 1.0


def helper(x: Tensor) -> Tensor:
    return x.sin()


class Reading(Scaled):
    factor = 2.0

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.factor * helper(x_i) * self.rotated(x_j) + FACTOR + Constants.shift

    def rotated(self, x: Tensor) -> Tensor:
        return x.cos()


class Derived(Reading):
    """Inherits all."""


def test_a_variable_of_a_function_around() -> None:
    gain = 2.0

    class Own(Scaled):
        def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
            return gain * x_i * x_j

    layer, x = Own().double(), x64()
    first = routed(layer, x)
    gain = 3.0
    torch.testing.assert_close(routed(layer, x), 1.5 * first)


def test_modes_of_a_layer_with_dropout() -> None:
    class Dropping(Scaled):
        def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
            return F.dropout(x_i * x_j, p=0.5, training=self.training)

    layer, x = Dropping().double(), x64()
    first = routed(layer, x)
    assert not torch.equal(routed(layer.eval(), x), first)
    assert torch.equal(routed(layer.train(), x), first)
    assert traces(layer) == 2


def test_parameters_of_another_dtype() -> None:
    layer, x = Scaled(), torch.randn(NODES, CHANNELS)
    with fastgraph.enabled(min_edges=0):
        layer(x, EDGES)
        assert fastgraph.status().row("Scaled").routed == 1
    layer.weight.data = layer.weight.data.double()
    expected = layer(x, EDGES)
    with fastgraph.enabled(min_edges=0):
        found = layer(x, EDGES)
        assert fastgraph.status().row("Scaled").routed == 2
    assert found.dtype is torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    routed(layer.double(), x64())


def test_parameters_that_come_and_go() -> None:
    layer, x = Scaled().double(), x64()
    routed(layer, x)
    del layer.weight
    layer.register_parameter("weight", None)
    layer.weight = nn.Parameter(x64(CHANNELS))
    routed(layer, x)
    with torch.no_grad():
        layer.weight.mul_(2)
    routed(layer, x)
    layer.weight.data = x64(CHANNELS)
    routed(layer, x)
    assert traces(layer) == 1
