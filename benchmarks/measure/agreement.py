"""Comparison of the results of the columns of a cell."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from measure.routing import ColumnError

# Errors up to this are not held against a column. In float32 sums in another order and fast
# exponentials make a few 1e-6, the products of TF32 2.4e-4, and a self-loop too few or another
# scale 1e-2 and more. In bfloat16 it is eight roundings.
TOLERANCES = {torch.float32: 2e-4, torch.bfloat16: 8 * 2**-8}

# Upstream rounds each message to a short dtype, so its own error may be larger. Others round, too,
# elsewhere.
_FACTOR = 2.0

# Where rounding takes the score of an edge across the bend of leaky_relu, the gradients of its two
# ends jump: so many nodes may.
_JUMPING = 8


@dataclass
class Reference:
    """The result of a layer, with which each column of a cell is compared.

    Args:
        column: who computed it, in float64 if there was memory.
        out: the output, ``[nodes, width]``.
        grad: the gradient of the features, of the same shape.
        given: the gradient of the output that this follows from, in the dtype of the cell.

    Attributes:
        allowed: the largest error that is not held against a column.
    """

    column: str
    out: Tensor
    grad: Tensor
    given: Tensor
    allowed: float = field(init=False)

    def __post_init__(self) -> None:
        self.allowed = TOLERANCES[self.given.dtype]

    def errors(self, column: str, out: Tensor, grad: Tensor) -> dict[str, Any]:
        """The errors of a column, for its row; upstream's own may be allowed to others.

        That of the output is its largest difference over its largest magnitude. Of the gradient it
        is the norm of the differences over its norm, without the few nodes whose differences are
        largest, as there it may jump; ``largest_gradient`` is that of all, for information.
        ``allowed`` is ``None`` for the column that has computed the reference.
        """
        found = {"output": _largest(out, self.out), "gradient": _error(grad, self.grad)}
        is_own, error = column == self.column, max(found.values())
        if is_own and self.given.dtype != torch.float32 and math.isfinite(error):
            self.allowed = max(self.allowed, _FACTOR * error)
        return {
            **found,
            "largest_gradient": _largest(grad, self.grad),
            "of": self.column,
            "allowed": None if is_own else self.allowed,
        }


def _difference(found: Tensor, expected: Tensor) -> Tensor:
    return found.detach().to(expected.dtype).reshape(expected.shape) - expected


def _largest(found: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest magnitude; infinite where one is not finite."""
    error = float(_difference(found, expected).abs().amax())
    return error / (float(expected.abs().amax()) or 1.0) if math.isfinite(error) else math.inf


def _error(found: Tensor, expected: Tensor) -> float:
    """The norm of the differences over that of what is expected, a few rows left out."""
    by_row = torch.linalg.vector_norm(_difference(found, expected), dim=1)
    if not bool(by_row.isfinite().all()):
        return math.inf
    kept = by_row.sort().values[: max(1, len(by_row) - _JUMPING)]
    return float(torch.linalg.vector_norm(kept) / (torch.linalg.vector_norm(expected) or 1.0))


def worst(errors: dict[str, Any]) -> float:
    return float(max(errors["output"], errors["gradient"]))


def require(errors: dict[str, Any]) -> None:
    """Refuse a column that computes something else, or what is not finite.

    Raises:
        ColumnError: an error is larger than what is allowed.
    """
    found, allowed = worst(errors), errors["allowed"]
    if not math.isfinite(found) or (allowed is not None and found > allowed):
        allowance = "" if allowed is None else f", {allowed:.1e} is allowed"
        raise ColumnError(
            f"differs from {errors['of']} by {errors['output']:.1e} in the output and "
            f"{errors['gradient']:.1e} in the gradient{allowance}"
        )
