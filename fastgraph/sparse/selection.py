"""Rows and columns of sparse matrices: chosen, sampled, and with the empty ones left out.

What is chosen is told as a pattern and the groups by which its values are gathered.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastgraph.graphs.graph import normal_mode
from fastgraph.sparse.groups import Groups
from fastgraph.sparse.pattern import Compressed, Pattern


class Selected(NamedTuple):
    """Entries of a matrix in a pattern of their own.

    Attributes:
        pattern: the result.
        entries: which entry of the original each of them is; one may be chosen several times.
    """

    pattern: Pattern
    entries: Groups

    def values(self, val: Tensor) -> Tensor:
        """The values of the result, given those of the original."""
        return self.entries.gather(val)


def check_dim(dim: int) -> None:
    """A dimension of a matrix.

    Raises:
        ValueError: it is neither 0 nor 1.
    """
    if dim not in (0, 1):
        raise ValueError(f"dim must be 0 or 1, got {dim}")


def index_select(pattern: Pattern, dim: int, index: Tensor) -> Selected:
    """The rows, for ``dim`` 0, or the columns, for 1, of these numbers, in their order.

    Args:
        pattern: of the matrix.
        dim: of what ``index`` holds numbers.
        index: int64 or int32 ``[chosen]``; a number may occur several times.

    Raises:
        ValueError: ``dim`` is neither.
        TypeError: ``index`` is not a tensor.
        RuntimeError: it has another dtype, shape or device.
        IndexError: it leads outside the matrix.
    """
    check_dim(dim)
    _check_numbers("index", index, pattern.shape[dim], pattern.device)
    with normal_mode(), torch.no_grad():
        compressed, entries = _chosen(pattern, dim, index.long())
        return Selected(_of_compressed(pattern, dim, compressed), Groups(entries, pattern.nnz))


def _chosen(pattern: Pattern, dim: int, index: Tensor) -> tuple[Compressed, Tensor]:
    """The chosen rows or columns, and which entry of the original each of theirs is."""
    ptr, other, ids = pattern.grouped(dim)
    counts = ptr.diff()[index]
    ends = counts.cumsum(0)
    first = ptr[index] - (ends - counts)
    chosen = torch.repeat_interleave(counts)
    position = torch.arange(len(chosen), device=pattern.device) + first[chosen]
    new_ptr = torch.cat([ends.new_zeros(1), ends]).to(ptr.dtype)
    entries = position if ids is None else ids[position].long()
    return Compressed(new_ptr, other[position], None), entries


def _of_compressed(pattern: Pattern, dim: int, compressed: Compressed) -> Pattern:
    shape = len(compressed.ptr) - 1, pattern.shape[1 - dim]
    rows = Pattern(shape, compressed)
    return rows if dim == 0 else rows.transposed()


def _check_numbers(name: str, index: object, size: int, device: torch.device) -> None:
    if not isinstance(index, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(index).__name__}")
    if index.dtype not in (torch.int64, torch.int32) or index.dim() != 1:
        raise RuntimeError(
            f"{name} must be one-dimensional, int64 or int32, "
            f"got shape {list(index.shape)} of {index.dtype}"
        )
    if index.device != device:
        raise RuntimeError(f"{name} must be on the matrix's device, {device}, got {index.device}")
    if index.numel() > 0:
        low, high = map(int, torch.aminmax(index))
        if low < 0 or high >= size:
            raise IndexError(
                f"{name} holds {low if low < 0 else high}, expected 0 <= {name} < {size}"
            )


def range_select(pattern: Pattern, dim: int, index: slice) -> Selected:
    """Consecutive rows or columns.

    Args:
        pattern: of the matrix.
        dim: 0 for rows, 1 for columns.
        index: with step 1; negative ends count from behind, as in Python.

    Raises:
        ValueError: ``dim`` is neither.
        TypeError: ``index`` is not a slice.
        NotImplementedError: it has a step.
        RuntimeError: it leads outside the matrix, or backwards.
    """
    check_dim(dim)
    if not isinstance(index, slice):
        raise TypeError(f"index must be a slice, got {type(index).__name__}")
    if index.step not in (None, 1):
        raise NotImplementedError(f"index must have step 1, got {index.step}")
    size = pattern.shape[dim]
    start = 0 if index.start is None else index.start
    stop = size if index.stop is None else index.stop
    start, stop = (end + size if end < 0 else end for end in (start, stop))
    if not 0 <= start <= stop <= size:
        raise RuntimeError(f"index must be a slice of 0 to {size}, got {index}")
    with normal_mode(), torch.no_grad():
        ptr, other, ids = pattern.grouped(dim)
        low, high = int(ptr[start]), int(ptr[stop])
        compressed = Compressed(ptr[start : stop + 1] - low, other[low:high].clone(), None)
        numbers = torch.arange(low, high, device=pattern.device)
        entries = numbers if ids is None else ids[low:high].long()
        return Selected(_of_compressed(pattern, dim, compressed), Groups(entries, pattern.nnz))


def sample(
    pattern: Pattern,
    val: Tensor,
    dim: int,
    fanout: int,
    ids: Tensor | None,
    replace: bool,
    bias: bool,
) -> Selected:
    """At most so many entries of each of these rows or columns, drawn by torch's generator.

    Args:
        pattern: of the matrix.
        val: its values, ``[nnz]`` with ``bias``.
        dim: 0 for entries of rows, 1 of columns.
        fanout: how many; -1 for all, without replacement.
        ids: the rows or columns, as for :func:`index_select`; default: all.
        replace: draw exactly ``fanout`` entries of each row that has any, which may be the same.
        bias: draw entries in proportion to their values; those of value 0 are never drawn.

    Raises:
        ValueError: ``dim`` or ``fanout`` is no such number, or a value is negative with ``bias``.
        TypeError, RuntimeError, IndexError: as for :func:`index_select`.
    """
    check_dim(dim)
    if int(fanout) != fanout or fanout < (0 if replace else -1):
        least = "0 with replacement" if replace else "-1"
        raise ValueError(f"fanout must be an integer >= {least}, got {fanout}")
    if bias and (val.dim() != 1 or (val < 0).any()):
        raise ValueError(
            f"bias must be given for values [nnz] that are not negative, got {list(val.shape)}"
        )
    with normal_mode(), torch.no_grad():
        if ids is None:
            ids = torch.arange(pattern.shape[dim], device=pattern.device)
        _check_numbers("ids", ids, pattern.shape[dim], pattern.device)
        compressed, entries = _chosen(pattern, dim, ids.long())
        weight = None
        if bias:
            weight = val.double()[entries]
            compressed, entries, weight = _positive(compressed, entries, weight)
        counts = compressed.ptr.diff().long()
        if replace:
            position, rows = _with_replacement(counts, fanout, weight)
        else:
            position, rows = _without_replacement(counts, fanout, weight)
        drawn = torch.zeros_like(counts).index_add_(0, rows, torch.ones_like(rows)).cumsum(0)
        ptr = torch.cat([drawn.new_zeros(1), drawn]).to(compressed.ptr.dtype)
        sampled = Compressed(ptr, compressed.indices[position], None)
        return Selected(
            _of_compressed(pattern, dim, sampled), Groups(entries[position], pattern.nnz)
        )


def _positive(
    compressed: Compressed, entries: Tensor, weight: Tensor
) -> tuple[Compressed, Tensor, Tensor]:
    """The entries that may be drawn."""
    kept = weight > 0
    before = torch.cat([kept.new_zeros(1, dtype=torch.int64), kept.cumsum(0)])
    ptr = before[compressed.ptr.long()]
    return Compressed(ptr, compressed.indices[kept], None), entries[kept], weight[kept]


def _with_replacement(counts: Tensor, fanout: int, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """The positions that are drawn, ascending by row, and the row of each."""
    rows = counts.nonzero().squeeze(1).repeat_interleave(fanout)
    first = (counts.cumsum(0) - counts)[rows]
    uniform = torch.rand(len(rows), dtype=torch.float64, device=counts.device)
    last = first + counts[rows] - 1
    if weight is None:
        position = first + (uniform * counts[rows]).long()
    else:
        # In the running sum of all weights a row has a span as long as its weights together.
        ends = torch.cat([weight.new_zeros(1), weight.cumsum(0)])
        target = ends[first] + uniform * (ends[last + 1] - ends[first])
        position = torch.searchsorted(ends, target, right=True) - 1
    return position.clamp(first, last), rows


def _without_replacement(
    counts: Tensor, fanout: int, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The same; each position once at most.

    Every entry draws a waiting time, exponential at the rate of its weight; the first ones come.
    """
    rows = torch.repeat_interleave(counts)
    if fanout == -1:
        return torch.arange(len(rows), device=rows.device), rows
    time = torch.empty(len(rows), dtype=torch.float64, device=rows.device).exponential_()
    if weight is not None:
        time = time / weight
    order = torch.argsort(time)
    order = order[torch.argsort(rows[order], stable=True)]
    rank = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    position = order[rank < fanout].sort().values
    return position, rows[position]


def compact(pattern: Pattern, dim: int, leading_indices: Tensor | None) -> tuple[Pattern, Tensor]:
    """The rows or columns that have entries, or are asked for, renumbered.

    Args:
        pattern: of the matrix.
        dim: 0 for rows, 1 for columns.
        leading_indices: int64 or int32, those that come first, in this order, with or without
            entries; the others follow in ascending order.

    Returns:
        The pattern, with entries in their order, and the old number of each row or column.

    Raises:
        ValueError: ``dim`` is neither.
        TypeError, RuntimeError, IndexError: as for :func:`index_select`.
    """
    check_dim(dim)
    pattern.check_whole()
    with normal_mode(), torch.no_grad():
        ends = pattern.indices[dim].long()
        if leading_indices is None:
            leading = ends.new_empty(0)
        else:
            _check_numbers("leading_indices", leading_indices, pattern.shape[dim], pattern.device)
            leading = leading_indices.long()
        size = pattern.shape[dim]
        # The position of the first mention of each, behind which come all others in their order.
        key = torch.full((size,), len(leading), dtype=torch.int64, device=pattern.device)
        numbers = torch.arange(len(leading), device=pattern.device)
        key.scatter_reduce_(0, leading, numbers, "amin")
        is_kept = key < len(leading)
        is_kept[ends] = True
        kept = is_kept.nonzero().squeeze(1)
        kept = kept[torch.argsort(key[kept], stable=True)]
        renumbered = torch.empty_like(key)
        renumbered[kept] = torch.arange(len(kept), device=pattern.device)
        indices = pattern.indices.clone()
        indices[dim] = renumbered[ends].to(indices.dtype)
        shape = (len(kept), pattern.shape[1]) if dim == 0 else (pattern.shape[0], len(kept))
        return Pattern(shape, indices), kept.to(pattern.dtype)
