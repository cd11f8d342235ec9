"""The edges of a graph as tiles for tensor cores, and how many of them a graph would have.

Rows come in windows of 16. The columns in which a window has entries stand side by side, and each
eight of them are a block of 16 x 8 slots, one bit each. A window without entries has no block, and
columns behind the last one of a window are filled up with -1. An edge that is there n times takes
n slots: its column is packed n times. So every edge has a slot of its own, by which its weight and
its features are found (``csrc/cpu/tiles.cpp``; as in TC-GNN, USENIX ATC 2023).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastgraph.graphs.graph import Csr
from fastgraph.machine import native

ROWS = 16
"""Of a window."""

COLUMNS = 8
"""Of a block."""


class Tiles(NamedTuple):
    """A sparse matrix in blocks.

    Attributes:
        ptr: int64 ``[windows + 1]``, delimits the blocks of each window.
        col: int32 ``[8 * blocks]``, the column of each packed one; -1 for those left over.
        bits: int64 ``[blocks, 2]``, whether a slot has an edge: slot ``8 * row + column`` is bit
            ``slot % 64`` of word ``slot // 64``.
        first: int64 ``[blocks + 1]``, where the edges of each block begin in ``edge_id``.
        edge_id: int32 ``[edges]``, the number of the edge in each slot that has one, by blocks and
            in each of them by slots.
        num_rows: of the matrix.
        num_cols: of the matrix.
    """

    ptr: Tensor
    col: Tensor
    bits: Tensor
    first: Tensor
    edge_id: Tensor
    num_rows: int
    num_cols: int

    @property
    def num_blocks(self) -> int:
        """The number of blocks."""
        return len(self.bits)

    @property
    def fill(self) -> float:
        """Edges of a block, from 1 to 128; 0 where there is none."""
        return self.edge_id.numel() / max(self.num_blocks, 1)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self if isinstance(t, Tensor))

    def slots(self) -> tuple[Tensor, Tensor]:
        """Row and packed column of each edge in the order of ``edge_id``, int64 ``[edges]`` each.

        The packed column is a position in ``col``.
        """
        in_rows = self.bits.view(torch.uint8).view(-1, ROWS, 1)
        is_set = (in_rows >> torch.arange(COLUMNS, dtype=torch.uint8, device="cpu")) & 1
        block, row, column = is_set.nonzero(as_tuple=True)
        windows = torch.arange(len(self.ptr) - 1, device="cpu")
        window = windows.repeat_interleave(self.ptr.diff(), output_size=self.num_blocks)
        return ROWS * window[block] + row, COLUMNS * block + column


def tiles_of(rows: Csr, num_cols: int) -> Tiles:
    """The tiles of edges that are grouped by row.

    Args:
        rows: on the CPU, in ascending order.
        num_cols: of the matrix.

    Raises:
        ValueError: the rows are in another order.
    """
    _check_order(rows)
    num_rows = rows.ptr.numel() - 1
    windows = torch.arange(-(-num_rows // ROWS), dtype=torch.int32, device="cpu")
    ptr = torch.zeros(windows.numel() + 1, dtype=torch.int64, device="cpu")
    ptr[1:] = blocks_of(rows, windows).cumsum(0)
    num_blocks = int(ptr[-1])
    tiles = Tiles(
        ptr,
        torch.empty(COLUMNS * num_blocks, dtype=torch.int32, device="cpu"),
        torch.empty(num_blocks, 2, dtype=torch.int64, device="cpu"),
        torch.empty(num_blocks + 1, dtype=torch.int64, device="cpu"),
        torch.empty_like(rows.col),
        num_rows,
        num_cols,
    )
    native.library().fill_tiles(*rows.arguments[:4], *tiles[:5])
    return tiles


def packed_columns(rows: Csr, windows: Tensor) -> Tensor:
    """How many columns windows pack, int64 ``[windows]``.

    Args:
        rows: as for :func:`tiles_of`.
        windows: int32, numbers of windows, in any order and as often as one likes.

    Raises:
        IndexError: there is no such window.
        ValueError: the rows are in another order.
    """
    _check_order(rows)
    columns = torch.empty(windows.numel(), dtype=torch.int64, device="cpu")
    native.library().count_tile_columns(*rows.arguments[:4], windows, columns)
    return columns


def blocks_of(rows: Csr, windows: Tensor) -> Tensor:
    """How many blocks windows have; arguments as for :func:`packed_columns`."""
    return (packed_columns(rows, windows) + COLUMNS - 1) // COLUMNS


def _check_order(rows: Csr) -> None:
    if rows.order is not None:
        raise ValueError("rows must be in ascending order, got rows in another one")
