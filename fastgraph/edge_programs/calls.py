"""Calls of torch's operators that are no element-wise ones, and the operators by their kinds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

aten = torch.ops.aten

# Operators that give numbers of Python, which branches take.
LOOKS = (aten.item, aten.is_nonzero, aten._local_scalar_dense, aten.equal, aten.allclose)
DROPOUTS = (aten.dropout, aten.alpha_dropout, aten.feature_dropout, aten.feature_alpha_dropout)

# Operators that keep the order of numbers, which are row-wise where they keep the rows.
RESHAPES = (
    *(aten.view, aten.reshape, aten.flatten, aten.unflatten, aten.unsqueeze, aten.squeeze),
    *(aten.clone, aten.contiguous, aten.alias, aten.to, aten._to_copy),
    *(aten.view_as, aten.reshape_as),
)
CONVERSIONS = (aten.to, aten._to_copy, aten.type_as)
EXPANSIONS = (aten.expand, aten.expand_as, aten.broadcast_to)
MULTIPLES, SUMS = (aten.mul, aten.div, aten.neg), (aten.add, aten.sub)
PRODUCTS = (aten.linear, aten.matmul, aten.mm)
SLICES = (aten.select, aten.slice)

# Operators whose results are numbers of the same dtype, which need no rounding.
EXACT = (
    *(*RESHAPES, *EXPANSIONS, aten.repeat, aten.cat, aten.stack, *SLICES),
    *(aten.neg, aten.abs, aten.sign, aten.relu),
)


class Call:
    """A call of an operator, with all its arguments by name."""

    def __init__(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.operation = func.overloadpacket
        self.given = {
            a.name: args[k] if k < len(args) else kwargs.get(a.name, a.default_value)
            for k, a in enumerate(func._schema.arguments)
        }


def repeats_ones(given: Mapping[str, Any]) -> bool:
    """True if a tensor is repeated only along dimensions of size 1."""
    shape, repeats = given["self"].shape, given["repeats"]
    return len(shape) == len(repeats) and all(
        count == 1 or size == 1 for size, count in zip(shape, repeats, strict=True)
    )


def factors(call: Call) -> tuple[Any, Any, Any]:
    """The values, the matrix and the bias of a product."""
    given = call.given
    if call.operation is aten.linear:
        return given["input"], given["weight"], given["bias"]
    return given["self"], given["other" if call.operation is aten.matmul else "mat2"], None
