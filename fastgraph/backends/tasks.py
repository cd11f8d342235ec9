"""Tasks, the units of work of GPU kernels on CSR rows, listed once for each grouping of a graph.

``csrc/include/fastgraph/tasks.h`` says what a task is. A GPU lists them in one pass over the rows,
which it does for every graph, those of mini-batches too. How many there are is counted when the
edges are sorted, where the host waits for numbers anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastgraph.graphs.graph import Csr, Graph, beside
from fastgraph.graphs.memo import MEMO
from fastgraph.machine.capture import refuse_to_capture

CHUNK = 256
"""A row with more entries is cut; ``kChunk`` of ``tasks.h``."""
SMALL_CHUNK = 64
"""The same in a small graph."""
SMALL = 2**19
"""Entries and rows together of a graph that is not small any more: a GPU needs about as long for
these as a group of its lanes, which takes entries in turn, for a chunk of 256. With fewer it waits
for the longest task, and a shorter one is worth more pieces to merge."""


def chunk_of(num_rows: int, num_entries: int) -> int:
    """How many entries of a row stay together."""
    return SMALL_CHUNK if num_rows + num_entries < SMALL else CHUNK


def count_cuts(ptr: Tensor, num_entries: int) -> list[Tensor]:
    """How many rows are cut, and how many pieces these make together."""
    chunk = chunk_of(ptr.numel() - 1, num_entries)
    pieces = (ptr.diff() + (chunk - 1)) // chunk
    is_cut = pieces > 1
    return [is_cut.sum(), (pieces * is_cut).sum()]


class _Listed:
    """Of a graph: its groupings with their tasks, by transposition."""

    def __init__(self) -> None:
        self.rows: dict[bool, Csr] = {}

    @property
    def nbytes(self) -> int:
        return sum(rows.order.nbytes for rows in self.rows.values() if rows.order is not None)


class Tasks:
    """Gives the edges of a graph with their tasks, which it lists at first.

    Args:
        library: gives the native library; asked when tasks are listed.
    """

    def __init__(self, library: Callable[[], Any]) -> None:
        self._library = library

    def __call__(
        self,
        graph: Graph,
        gathered: Tensor,
        *,
        transpose: bool,
        attention: bool = False,
        ascending: bool = False,
        numbered: bool = True,
    ) -> Csr:
        """The same for whatever is gathered.

        Raises:
            RuntimeError: they are not listed yet, and a CUDA graph is being captured.
        """
        listed = beside(graph, "tasks", _Listed)
        rows = listed.rows.get(transpose)
        if rows is None:
            rows = listed.rows[transpose] = self._list(graph.grouped(transpose=transpose))
            MEMO.recount()
        return rows

    def _list(self, rows: Csr) -> Csr:
        refuse_to_capture("the tasks of kernels", rows.ptr)
        num_rows, num_entries = rows.ptr.numel() - 1, rows.col.numel()
        num_cut, num_pieces = rows.num_cut, rows.num_pieces
        if num_pieces is None:
            num_cut, num_pieces = torch.stack(count_cuts(rows.ptr, num_entries)).tolist()
        with torch.inference_mode(False):  # what is made here must still serve training
            tasks = rows.col.new_empty((num_rows + num_pieces, 4))
            chunk = chunk_of(num_rows, num_entries)
            self._library().make_tasks(rows.ptr, chunk, num_cut, tasks)
        return rows._replace(num_cut=num_cut, order=tasks, num_pieces=num_pieces)
