"""Building graphs: by the C++ kernels for the CPU, and by torch's operations on any device.

See :class:`fastgraph.plugins.backend.Builder` for what each method does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastgraph.backends.tasks import count_cuts
from fastgraph.graphs.edges import replace_self_loops
from fastgraph.graphs.graph import Csr, check_range


class NativeBuilder:
    """Builds by a native library.

    Args:
        library: gives it; asked at each call.
    """

    def __init__(self, library: Callable[[], Any]) -> None:
        self._library = library

    def build_csr(
        self, row: Tensor, col: Tensor, num_rows: int, num_cols: int, numbered: bool
    ) -> Csr:
        ptr, index, edge_id = _empty(row, num_rows, row.numel(), numbered)
        is_sorted = self._library().build_csr(row, col, num_rows, num_cols, ptr, index, edge_id)
        return Csr(ptr, index, None if is_sorted else edge_id)

    def build_csr_with_loops(
        self,
        row: Tensor,
        col: Tensor,
        num_rows: int,
        num_cols: int,
        num_loops: int,
        numbered: bool,
    ) -> Csr:
        ptr, index, edge_id = _empty(row, num_rows, row.numel() + num_loops, numbered)
        num_kept = self._library().build_csr_with_loops(
            row, col, num_rows, num_cols, num_loops, ptr, index, edge_id
        )
        num_edges = num_kept + num_loops
        return Csr(ptr, index[:num_edges], None if edge_id is None else edge_id[:num_edges])

    def check_csr(self, ptr: Tensor, index: Tensor, num_rows: int, num_cols: int) -> Csr:
        if ptr.dtype != index.dtype:
            ptr, index = ptr.long(), index.long()
        out_ptr, out_index, _ = _empty(index, num_rows, index.numel(), numbered=False)
        self._library().check_csr(ptr, index, num_rows, num_cols, out_ptr, out_index)
        return Csr(out_ptr, out_index, None)

    def transpose_csr(self, rows: Csr, num_cols: int, numbered: bool) -> Csr:
        ptr, index, edge_id = _empty(rows.col, num_cols, rows.col.numel(), numbered)
        self._library().transpose_csr(*rows.arguments[:4], num_cols, ptr, index, edge_id)
        return Csr(ptr, index, edge_id)

    def reverse_rows(self, rows: Csr) -> Csr:
        col = torch.empty_like(rows.col)
        self._library().reverse_rows(rows.ptr, rows.col, col)
        return Csr(rows.ptr, col, None)

    def inverse_degree(self, ptr: Tensor, dtype: torch.dtype) -> Tensor:
        if dtype not in (torch.float32, torch.float64):
            return BY_TORCH.inverse_degree(ptr, dtype)
        out = ptr.new_empty(ptr.numel() - 1, dtype=dtype)
        self._library().inverse_degree(ptr, out)
        return out


def _empty(
    like: Tensor, num_rows: int, num_entries: int, numbered: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    ptr = like.new_empty(num_rows + 1, dtype=torch.int64)
    index = like.new_empty(num_entries, dtype=torch.int32)
    return ptr, index, torch.empty_like(index) if numbered else None


class TorchBuilder:
    """Builds by torch's operations, on any device."""

    def build_csr(
        self, row: Tensor, col: Tensor, num_rows: int, num_cols: int, numbered: bool
    ) -> Csr:
        if row.numel() == 0:
            empty = row.new_empty(0, dtype=torch.int32)
            return Csr(row.new_zeros(num_rows + 1, dtype=torch.int64), empty, None, num_pieces=0)
        # Indices out of range may do what they like to the order: the caller learns of them below.
        keys, order = torch.sort(row.int(), stable=True)
        ptr = _starts(keys, num_rows)
        # All that the host must know, in one transfer.
        numbers = [*torch.aminmax(row), *torch.aminmax(col), (row.diff() >= 0).all()]
        low_row, high_row, low_col, high_col, is_sorted, num_cut, num_pieces = _to_host(
            [*numbers, *count_cuts(ptr, row.numel())]
        )
        check_range(low_col, high_col, num_cols, 0)
        check_range(low_row, high_row, num_rows, 1)
        if is_sorted:
            own = col.to(torch.int32, copy=True)  # the caller may edit theirs
            return Csr(ptr, own, None, num_cut, num_pieces=num_pieces)
        edge_id = order.int() if numbered else None
        return Csr(ptr, col[order].int(), edge_id, num_cut, num_pieces=num_pieces)

    def build_csr_with_loops(
        self,
        row: Tensor,
        col: Tensor,
        num_rows: int,
        num_cols: int,
        num_loops: int,
        numbered: bool,
    ) -> Csr:
        col, row = replace_self_loops(torch.stack([col, row]), num_loops)
        return self.build_csr(row, col, num_rows, num_cols, numbered)

    def check_csr(self, ptr: Tensor, index: Tensor, num_rows: int, num_cols: int) -> Csr:
        if ptr.numel() != num_rows + 1:
            raise ValueError(f"ptr must have {num_rows + 1} elements, got {ptr.numel()}")
        bounds = torch.aminmax(index) if index.numel() else ()
        numbers = [
            ptr[0],
            ptr[-1],
            (ptr.diff() >= 0).all(),
            *count_cuts(ptr, index.numel()),
            *bounds,
        ]
        first, last, rises, num_cut, num_pieces, *low_and_high = _to_host(numbers)
        if first != 0 or last != index.numel() or not rises:
            raise ValueError(
                f"ptr must rise from 0 to the number of edges ({index.numel()}) without falling"
            )
        if low_and_high:
            low, high = low_and_high
            if low < 0 or high >= num_cols:
                position = int(((index < 0) | (index >= num_cols)).nonzero()[0])
                raise IndexError(
                    f"index holds {int(index[position])} at position {position}, "
                    f"expected 0 <= index < {num_cols}"
                )
        out_ptr, out_index, _ = _empty(index, num_rows, index.numel(), numbered=False)
        return Csr(out_ptr.copy_(ptr), out_index.copy_(index), None, num_cut, num_pieces=num_pieces)

    def transpose_csr(self, rows: Csr, num_cols: int, numbered: bool) -> Csr:
        row_of_entry = torch.repeat_interleave(rows.ptr.diff(), output_size=rows.col.numel())
        keys, order = torch.sort(rows.col, stable=True)
        ptr = _starts(keys, num_cols)
        edge_id = None
        if numbered:
            edge_id = order.int() if rows.edge_id is None else rows.edge_id[order]
        num_cut, num_pieces = _to_host(count_cuts(ptr, rows.col.numel()))
        return Csr(ptr, row_of_entry[order].int(), edge_id, num_cut, num_pieces=num_pieces)

    def reverse_rows(self, rows: Csr) -> Csr:
        first, last = rows.ptr[:-1], rows.ptr[1:] - 1
        size = rows.col.numel()
        mirrored = torch.repeat_interleave(first + last, rows.ptr.diff(), output_size=size)
        order = mirrored - torch.arange(size, device=mirrored.device)
        return rows._replace(col=rows.col[order], edge_id=None)

    def inverse_degree(self, ptr: Tensor, dtype: torch.dtype) -> Tensor:
        return ptr.diff().clamp_(min=1).to(dtype).reciprocal_()


BY_TORCH = TorchBuilder()


def _starts(keys: Tensor, size: int) -> Tensor:
    """Where each of ``size`` keys begins among the sorted ones, and where the last ends."""
    return torch.searchsorted(keys, torch.arange(size + 1, dtype=keys.dtype, device=keys.device))


def _to_host(numbers: list[Tensor]) -> list[int]:
    found: list[int] = torch.stack([number.long() for number in numbers]).tolist()
    return found
