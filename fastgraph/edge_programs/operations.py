"""The element-wise instructions of edge programs: how many arguments each takes, and its meaning.

Their gradients are in :mod:`fastgraph.edge_programs.gradients`. The order of the table numbers them
for kernels: ``fastgraph/csrc/include/fastgraph/edge_code.h`` has the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Operation(NamedTuple):
    """An element-wise instruction.

    Attributes:
        arity: how many values it takes.
        evaluate: what it computes, given tensors of one width.
    """

    arity: int
    evaluate: Callable[..., Tensor]


def _compare(compare: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda a, b: compare(a, b).to(a.dtype)


def _leaky_relu(x: Tensor, slope: Tensor) -> Tensor:
    return torch.where(x > 0, x, x * slope)


def _elu(x: Tensor, alpha: Tensor) -> Tensor:
    # Not of a positive x: infinity times an unused gradient would be NaN.
    return torch.where(x > 0, x, alpha * torch.expm1(torch.where(x > 0, 0, x)))


def _clamp(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return torch.clamp(x, low, high)


ELEMENTWISE: dict[str, Operation] = {
    "add": Operation(2, torch.add),
    "sub": Operation(2, torch.sub),
    "mul": Operation(2, torch.mul),
    "div": Operation(2, torch.div),
    "maximum": Operation(2, torch.maximum),
    "minimum": Operation(2, torch.minimum),
    "pow": Operation(2, torch.pow),
    "atan2": Operation(2, torch.atan2),
    "eq": Operation(2, _compare(torch.eq)),
    "ne": Operation(2, _compare(torch.ne)),
    "lt": Operation(2, _compare(torch.lt)),
    "le": Operation(2, _compare(torch.le)),
    "where": Operation(3, lambda mask, a, b: torch.where(mask != 0, a, b)),
    "clamp": Operation(3, _clamp),
    "neg": Operation(1, torch.neg),
    "abs": Operation(1, torch.abs),
    "sign": Operation(1, torch.sign),
    "sqrt": Operation(1, torch.sqrt),
    "exp": Operation(1, torch.exp),
    "expm1": Operation(1, torch.expm1),
    "log": Operation(1, torch.log),
    "log1p": Operation(1, torch.log1p),
    "sin": Operation(1, torch.sin),
    "cos": Operation(1, torch.cos),
    "erf": Operation(1, torch.erf),
    "sigmoid": Operation(1, torch.sigmoid),
    "tanh": Operation(1, torch.tanh),
    "softplus": Operation(1, F.softplus),
    "relu": Operation(1, torch.relu),
    "leaky_relu": Operation(2, _leaky_relu),
    "elu": Operation(2, _elu),
}
"""By name. Comparisons give 1 or 0, and ``where`` takes its first choice where its mask is not 0.

The second argument of ``leaky_relu`` is the slope, of ``elu`` its alpha; both are constants, and
have no gradient, as those of ``clamp`` have none. ``softplus`` is torch's with its defaults: above
20 it is the value itself.
"""

ROUND = "round"
"""The rounding to the dtype of the operands, which is the identity for float32 and float64."""

CONSTANT, SPREAD, FOLD, DOT = "constant", "spread", "fold", "dot"
"""A number; each value repeated for the channels of its head; the sum of each head's channels; and
the sum of each head's products of two values."""

TILE, SUM_TILES = "tile", "sum_tiles"
"""All channels repeated for each head; and the sum over heads of each of their channels."""

FOLD_MAX, FIRST = "fold_max", "first"
"""The largest of each head's channels, of which equal ones share the gradient; and of each head 1
for its first channel that is not 0, and 0 for all others."""

SLICE, PAD = "slice", "pad"
"""Some channels of each head, from one of them on; and such channels in a wider head of zeros."""

DETACH = "detach"
"""The value itself, of which there is no gradient."""

PRODUCT, PRODUCT_T = "product", "product_t"
"""The product of a value, a row of K numbers, with a matrix ``[K, M]`` of parameters; and with the
transpose of one ``[M, K]``."""

OUTER = "outer"
"""A reduction of two values: the sum over all edges of their outer products, ``[K, M]``, which is
the gradient of a matrix."""

EXTREMA = {"max": "max_ties", "min": "min_ties"}
"""Reductions whose gradient needs a record, and the reduction that is the record."""

SOFTMAX, SOFTMAX_MAX, SOFTMAX_SCALE = "softmax", "softmax_max", "softmax_scale"
"""The sum of values weighted by the softmax of scores over the edges of a row, and the records that
its gradient needs: the largest score, rounded to the dtype of operands, and 1 over the sum of
``exp(score - largest)``."""

VAR, STD = "var", "std"
"""Reductions that are computed from the means of values and of their squares."""

REDUCTIONS = (
    VAR,
    STD,
    "sum",
    "mean",
    *EXTREMA,
    *EXTREMA.values(),
    "edge",
    "total",
    SOFTMAX,
    SOFTMAX_MAX,
    SOFTMAX_SCALE,
    OUTER,
)
"""Over the edges of each row, but for ``edge``, the value of each edge, and ``total`` and
``outer``, sums over all edges. ``max_ties`` is the number of shares, int32, into which the gradient
of a maximum is split."""
