"""Numbers of few nodes in place of numbers of many."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fastgraph.sampling.native_calls import call_native, check_all_tensors


def unique_and_compact(ids: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The distinct values of some tensors in order of first occurrence, and positions in them.

    Args:
        ids: Non-negative numbers, each ``[any]``, all int32 or all int64.

    Returns:
        ``unique``, ``[distinct]``, and for each tensor the position in it of each value:
        ``unique[positions[i]]`` equals ``ids[i]``. All of the dtype of ``ids``.

    Raises:
        TypeError: An argument has another type or dtype.
        ValueError: ``ids`` is empty, or a tensor has another number of dimensions.
        IndexError: A value is negative.
    """
    check_all_tensors("ids", enumerate(ids))
    unique, *positions = call_native("unique_and_compact", [one.contiguous() for one in ids])
    return unique, positions
