"""The error of a tensor against the same computed in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

FACTOR = 2.0
"""Our error may be this many times upstream's own: both round, in another order."""

ROUNDINGS = 16
"""And so many roundings of the dtype more: where few sums cancel, errors are matters of luck.

With 8, a few in a thousand calls of DGL's own tests, on graphs of some ten nodes, were refused.
"""

# A gradient this much smaller than the largest one, in float64, is zero in exact arithmetic.
_VANISHING = 1e-12


@dataclass(frozen=True)
class TensorError:
    """One output or gradient.

    Errors are the largest absolute difference from the float64 result divided by ``scale``.

    Attributes:
        name: an output (``output``, ``output[0]``), or the parameter or input whose gradient it is.
        kind: ``output``, ``gradient of input`` or ``gradient of parameter``.
        shape: as upstream returns it.
        dtype: as upstream returns it.
        scale: the largest magnitude in float64; for a gradient that is zero in exact arithmetic,
            that of the largest gradient of its kind.
        upstream: upstream's own error.
        ours: our error.
        limit: what our error may be.
        worst: index of the element where ours is farthest from float64.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    scale: float
    upstream: float
    ours: float
    limit: float
    worst: tuple[int, ...]

    @property
    def ok(self) -> bool:
        """True if our error is within the limit."""
        return self.ours <= self.limit

    @property
    def share(self) -> float:
        """Our error as a share of the limit."""
        return self.ours / self.limit if self.limit else self.ours

    @property
    def ratio(self) -> float:
        """Our error as a multiple of upstream's; 1 where both are zero."""
        if self.upstream == 0:
            return 1.0 if self.ours == 0 else float("inf")
        return self.ours / self.upstream


def compare_tensors(
    kind: str,
    truth: Mapping[str, Tensor],
    upstream: Mapping[str, Tensor],
    ours: Mapping[str, Tensor],
    factor: float,
) -> list[TensorError]:
    """The errors of all tensors of one kind.

    Args:
        kind: as in :class:`TensorError`.
        truth: the float64 results by name; tensors that are not floating point must be equal.
        upstream: upstream's results.
        ours: our results. A missing tensor, or one of another shape or dtype, has infinite error.
        factor: the multiple of upstream's error that is allowed.
    """
    exact = {name: tensor.detach().double() for name, tensor in truth.items()}
    scales = {name: _magnitude(tensor) for name, tensor in exact.items()}
    largest = max(scales.values(), default=0.0)
    errors = []
    for name, reference in exact.items():
        scale = scales[name]
        if kind != "output" and scale <= _VANISHING * largest:
            scale = largest
        theirs, own = upstream[name].detach(), ours.get(name)
        upstream_error, _ = largest_difference(theirs, reference)
        if own is None or own.shape != theirs.shape or own.dtype != theirs.dtype:
            our_error, worst = float("inf"), (0,) * theirs.dim()
        else:
            our_error, worst = largest_difference(own.detach(), reference)
        unit = scale or 1.0
        eps = torch.finfo(theirs.dtype).eps if theirs.is_floating_point() else 0.0
        limit = factor * upstream_error / unit + ROUNDINGS * eps
        errors.append(
            TensorError(
                name=name,
                kind=kind,
                shape=tuple(theirs.shape),
                dtype=theirs.dtype,
                scale=scale,
                upstream=upstream_error / unit,
                ours=our_error / unit,
                limit=limit,
                worst=worst,
            )
        )
    return errors


def _magnitude(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def largest_difference(value: Tensor, truth: Tensor) -> tuple[float, tuple[int, ...]]:
    """The largest absolute difference and its index; equal infinities and two NaN do not differ."""
    if truth.numel() == 0:
        return 0.0, ()
    if value.shape != truth.shape:
        return float("inf"), (0,) * truth.dim()
    value = value.double()
    same = (value == truth) | (value.isnan() & truth.isnan())
    difference = (value - truth).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
    difference = difference.masked_fill(same, 0.0)
    position = difference.argmax()
    index = torch.unravel_index(position, truth.shape)
    return float(difference.flatten()[position]), tuple(int(i) for i in index)
