"""Comparison of the tensors of ranks with those of one process."""

from __future__ import annotations

from torch import Tensor


def deviation(
    expected: Tensor | None, found: Tensor | None, tolerance: float, scale: float | None = None
) -> str:
    """A text that says how a tensor is wrong; empty if it is right.

    Args:
        expected: what one process has.
        found: what ranks have.
        tolerance: of the scale, by which elements may be off.
        scale: of which size elements are; default: the largest that is expected. At least 1.
    """
    if expected is None or found is None:
        return "" if expected is found else "is None" if found is None else "is not None"
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return (
            f"is {list(found.shape)} of {found.dtype}, "
            f"expected {list(expected.shape)} of {expected.dtype}"
        )
    if not expected.numel():
        return ""
    if scale is None:
        scale = float(expected.double().abs().max())
    off = float((expected.double() - found.double()).abs().max()) / max(scale, 1.0)
    return "" if off <= tolerance else f"is off by {off:.1e}"
