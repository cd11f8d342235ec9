"""Element-wise operators of torch as instructions of edge programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastgraph.edge_programs.builder import Builder, Value

aten = torch.ops.aten


@dataclass(frozen=True)
class Rule:
    """An element-wise operator as instructions.

    Attributes:
        make: the value, of a builder and the arguments that follow.
        values: the names of those that are tensors or numbers.
        numbers: of those that must be numbers or ``None``.
        fixed: others, and the only value that they may have.
        is_mask: True if it compares.
        is_filled: True if ``value`` must be a number of the dtype of ``self``.
    """

    make: Callable[..., Value]
    values: tuple[str, ...] = ("self",)
    numbers: tuple[str, ...] = ()
    fixed: Mapping[str, object] = field(default_factory=dict)
    is_mask: bool = False
    is_filled: bool = False

    def unknown(self, given: Mapping[str, object]) -> str | None:
        """The name of an argument that the rule does not know; ``None`` if it knows all."""
        for name, argument in given.items():
            is_number = isinstance(argument, (int, float)) and not isinstance(argument, bool)
            if self.is_filled and name == "value" and not _fits(argument, given["self"]):
                return name
            if (
                (name in self.values and (is_number or isinstance(argument, Tensor)))
                or (name in self.numbers and (is_number or argument is None))
                or (name in self.fixed and argument == self.fixed[name])
            ):
                continue
            return name
        return None


def _fits(number: Any, tensor: Any) -> bool:
    """False for a finite number that is beyond the dtype of a tensor."""
    is_finite = isinstance(number, (int, float)) and math.isfinite(number)
    return not is_finite or abs(number) <= torch.finfo(tensor.dtype).max


def _plain(operation: str, *values: str) -> Rule:
    return Rule(lambda b, *given: b.apply(operation, *given), values or ("self",))


def _comparison(operation: str, *, is_swapped: bool = False) -> Rule:
    def make(b: Builder, x: Any, y: Any) -> Value:
        return b.apply(operation, *((y, x) if is_swapped else (x, y)))

    return Rule(make, ("self", "other"), is_mask=True)


def _multiple(b: Builder, x: Any, factor: float) -> Any:
    return x if factor == 1 else b.apply("mul", x, factor)


def _power(b: Builder, x: Any, exponent: Any) -> Value:
    # A square is a product; its gradient is the same.
    return b.apply("mul", x, x) if exponent == 2 else b.apply("pow", x, exponent)


def _clamp(b: Builder, x: Value, low: float | None, high: float | None) -> Value:
    return b.apply(
        "clamp", x, -math.inf if low is None else low, math.inf if high is None else high
    )


def _hardtanh(b: Builder, x: Value, low: float, high: float) -> Value:
    # Unlike a clamp's, the gradient at a bound is zero.
    inside = b.apply("where", b.apply("le", high, x), high, x)
    return b.apply("where", b.apply("le", x, low), low, inside)


_BOTH = ("self", "other")

ELEMENTWISE: dict[Any, Rule] = {
    aten.add: Rule(lambda b, x, y, a: b.apply("add", x, _multiple(b, y, a)), _BOTH, ("alpha",)),
    aten.sub: Rule(lambda b, x, y, a: b.apply("sub", x, _multiple(b, y, a)), _BOTH, ("alpha",)),
    aten.rsub: Rule(lambda b, x, y, a: b.apply("sub", y, _multiple(b, x, a)), _BOTH, ("alpha",)),
    aten.mul: _plain("mul", *_BOTH),
    aten.div: Rule(lambda b, x, y: b.apply("div", x, y), _BOTH, fixed={"rounding_mode": None}),
    aten.maximum: _plain("maximum", *_BOTH),
    aten.minimum: _plain("minimum", *_BOTH),
    aten.atan2: _plain("atan2", *_BOTH),
    aten.pow: Rule(_power, ("self", "exponent")),
    aten.square: Rule(lambda b, x: b.apply("mul", x, x)),
    aten.eq: _comparison("eq"),
    aten.ne: _comparison("ne"),
    aten.lt: _comparison("lt"),
    aten.le: _comparison("le"),
    aten.gt: _comparison("lt", is_swapped=True),
    aten.ge: _comparison("le", is_swapped=True),
    aten.where: _plain("where", "condition", *_BOTH),
    aten.masked_fill: Rule(
        lambda b, x, mask, y: b.apply("where", mask, y, x),
        ("self", "mask"),
        ("value",),
        is_filled=True,
    ),
    aten.clamp: Rule(_clamp, numbers=("min", "max")),
    aten.relu6: Rule(lambda b, x: _hardtanh(b, x, 0, 6)),
    aten.hardtanh: Rule(_hardtanh, numbers=("min_val", "max_val")),
    aten.clamp_min: Rule(lambda b, x, low: _clamp(b, x, low, None), numbers=("min",)),
    aten.clamp_max: Rule(lambda b, x, high: _clamp(b, x, None, high), numbers=("max",)),
    aten.reciprocal: Rule(lambda b, x: b.apply("div", 1.0, x)),
    aten.rsqrt: Rule(lambda b, x: b.apply("div", 1.0, b.apply("sqrt", x))),
    aten.silu: Rule(lambda b, x: x * b.apply("sigmoid", x)),
    aten.gelu: Rule(lambda b, x: b.gelu(x), fixed={"approximate": "none"}),
    aten.softplus: Rule(lambda b, x: b.apply("softplus", x), fixed={"beta": 1, "threshold": 20}),
    aten.leaky_relu: Rule(
        lambda b, x, slope: b.apply("leaky_relu", x, slope), numbers=("negative_slope",)
    ),
    aten.elu: Rule(
        lambda b, x, alpha: b.apply("elu", x, alpha),
        numbers=("alpha",),
        fixed={"scale": 1, "input_scale": 1},
    ),
    **{
        getattr(aten, name): _plain(name)
        for name in (
            *("neg", "abs", "sign", "sqrt", "exp", "expm1", "log", "log1p", "sin", "cos", "erf"),
            *("sigmoid", "tanh", "relu"),
        )
    },
}
