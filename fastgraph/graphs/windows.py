"""The edges of a graph by windows of 16 nodes and the columns of nodes at their other ends.

A column has a bit for each node of its window with an edge to its node: sub-blocks of 16 rows,
which are full where all bits are set. An edge that is there n times has its column n times.
Attention by sub-blocks takes them (``csrc/cpu/block_attention.h``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastgraph.graphs.graph import Csr, Graph, beside, normal_mode
from fastgraph.graphs.memo import MEMO
from fastgraph.graphs.offsets import offsets_of

ROWS = 16


class Windows(NamedTuple):
    """Edges by windows; arguments of native functions.

    Attributes:
        ptr: int64 ``[windows + 1]``, delimits the columns of each.
        node: int32 ``[columns]``, at the other end.
        lanes: int32 ``[columns]``, bit i of which is for the i-th node of the window.
        first: int64 ``[columns + 1]``, where the edges of each column begin in ``edge``.
        edge: int32 ``[edges]``, their numbers, those of a column in the order of its bits.
    """

    ptr: Tensor
    node: Tensor
    lanes: Tensor
    first: Tensor
    edge: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(part.nbytes for part in self)

    @property
    def fill(self) -> float:
        """Edges of a column, from 1 to 16; 0 where there is none."""
        return len(self.edge) / max(len(self.node), 1)


class _Known:
    """The windows of a graph, by transposition."""

    def __init__(self) -> None:
        self.windows: dict[bool, Windows] = {}

    @property
    def nbytes(self) -> int:
        return sum(windows.nbytes for windows in self.windows.values())


def windows_beside(graph: Graph, *, transpose: bool) -> Windows:
    """The windows of the nodes that aggregate, made once for a graph; by source if transposed."""
    known = beside(graph, "windows", _Known).windows
    if transpose not in known:
        with normal_mode():  # a graph that is first used in inference mode must serve training
            known[transpose] = windows_of(graph.grouped(transpose=transpose))
        MEMO.recount()
    return known[transpose]


def windows_of(rows: Csr) -> Windows:
    """The windows of edges that are grouped by row, on the CPU.

    Args:
        rows: in ascending order.

    Raises:
        ValueError: the rows are in another order.
    """
    if rows.order is not None:
        raise ValueError("rows must be in ascending order, got rows in another one")
    num_rows = rows.ptr.numel() - 1
    row = torch.arange(num_rows, device="cpu").repeat_interleave(rows.ptr.diff())
    number = torch.arange(len(row), dtype=torch.int32, device="cpu")
    edge = number if rows.edge_id is None else rows.edge_id
    most = int(rows.col.max()) + 1 if len(row) else 1
    key = ((row // ROWS) * most + rows.col) * ROWS + row % ROWS  # of window, column and lane
    order = key.argsort(stable=True)
    key, edge = key[order], edge[order]
    copy = _numbers_within(key)  # of an edge that is there several times
    copies = int(copy.max()) + 1 if len(copy) else 1
    if copies > 1:
        column, lane = key // ROWS * copies + copy, key % ROWS
        order = (column * ROWS + lane).argsort()
        column, lane, edge = column[order], lane[order], edge[order]
    else:
        column, lane = key // ROWS, key % ROWS
    column, number_of, counts = column.unique_consecutive(return_inverse=True, return_counts=True)
    lanes = torch.zeros(len(column), dtype=torch.int64, device="cpu")
    lanes.index_add_(0, number_of, 1 << lane)
    window = column // (most * copies)
    of_windows = torch.bincount(window, minlength=-(-num_rows // ROWS))
    return Windows(
        offsets_of(of_windows),
        (column // copies % most).int(),
        lanes.int(),
        offsets_of(counts),
        edge.int(),
    )


def _numbers_within(key: Tensor) -> Tensor:
    """The number of each among equal ones, which follow each other."""
    _, group, counts = key.unique_consecutive(return_inverse=True, return_counts=True)
    return torch.arange(len(key), device="cpu") - offsets_of(counts)[group]
