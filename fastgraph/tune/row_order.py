"""The order in which kernels of the CPU visit the rows of a graph.

Nodes that have neighbours in common follow each other, if that saves enough reads from memory
(``csrc/cpu/row_order.cpp``). Kernels take rows in any order, to the same result. What was measured
(:mod:`fastgraph.tune.choices`) decides before what a model says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastgraph.graphs.graph import Csr, Graph, beside
from fastgraph.graphs.memo import MEMO
from fastgraph.tune import choices
from fastgraph.tune.choices import Orders, Use

USES_BEFORE_ORDERING = 32
"""How often kernels use a grouping as it is. Ordering its rows takes as long as several uses, and a
model of several layers uses the graph of a mini-batch as often as it has layers, or twice."""


class _Learnt:
    """Of a graph.

    Attributes:
        ordered: the rows as they are to be visited, by transposition and kind of kernel.
        uses: of each grouping so far.
        most_gathered: bytes of the widest features that were gathered.
        chosen: by measurement, once that was asked for.
        by_bytes: the rows in the orders that were chosen, by transposition and the bytes for which.
    """

    def __init__(self) -> None:
        self.chosen: Orders | None = None
        self.by_bytes: dict[tuple[bool, int], Csr] = {}
        self.ordered: dict[tuple[bool, bool], Csr] = {}
        self.uses = [0, 0]
        self.most_gathered = 0
        self.nbytes = 0


class RowOrder:
    """Decides once for each grouping, for features as wide as the widest until then.

    Args:
        library: gives the native library; asked when rows are ordered.
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
    ) -> Csr:
        """The edges of a graph, grouped by the node that aggregates.

        Features much narrower than those that were decided on get the rows as they are.

        Args:
            graph: any graph; only rows of those with one set of nodes are ordered.
            gathered: the features that the kernel gathers, one row for each node.
            transpose: as for :meth:`fastgraph.Graph.grouped`.
            attention: whether the kernel is one of attention, which needs more of a saving.
            ascending: whether the kernel needs the rows as they are.
        """
        if ascending:
            return graph.grouped(transpose=transpose)
        learnt = beside(graph, "row_order", _Learnt)
        if learnt.chosen is None:
            learnt.chosen = choices.of(graph)
        if learnt.chosen is not choices.NOTHING:
            use = Use(transpose, attention, gathered.nbytes // max(len(gathered), 1))
            row_bytes = learnt.chosen.get(use)
            if row_bytes is not None:
                return self._chosen(graph, learnt, transpose, row_bytes)
        rows = learnt.ordered.get((transpose, attention))
        if rows is None:
            learnt.uses[transpose] += 1
            learnt.most_gathered = max(learnt.most_gathered, gathered.nbytes)
            if learnt.uses[transpose] <= USES_BEFORE_ORDERING:
                return graph.grouped(transpose=transpose)
            self._decide(graph, learnt, transpose)
            rows = learnt.ordered[transpose, attention]
        if rows.order is not None and 4 * gathered.nbytes < learnt.most_gathered:
            return graph.grouped(transpose=transpose)
        return rows

    def _chosen(self, graph: Graph, learnt: _Learnt, transpose: bool, row_bytes: int) -> Csr:
        """The rows in the order for gathering so many bytes each; as they are for none."""
        rows = learnt.by_bytes.get((transpose, row_bytes))
        if rows is None:
            rows = grouped = graph.grouped(transpose=transpose)
            if row_bytes and graph.num_src == graph.num_dst:
                with torch.inference_mode(False):
                    rows, _ = ordered(self._library(), grouped, row_bytes)
            learnt.by_bytes[transpose, row_bytes] = rows
            if rows is not grouped:
                learnt.nbytes += rows.nbytes
                MEMO.recount()
        return rows

    def _decide(self, graph: Graph, learnt: _Learnt, transpose: bool) -> None:
        for_sums = for_attention = graph.grouped(transpose=transpose)
        if graph.num_src == graph.num_dst:
            row_bytes = learnt.most_gathered // max(graph.num_src, 1)
            with torch.inference_mode(False):  # what is made here must still serve training
                for_sums, for_attention = ordered(self._library(), for_sums, row_bytes)
        learnt.ordered[transpose, False] = for_sums
        learnt.ordered[transpose, True] = for_attention
        if for_sums.order is not None:
            learnt.nbytes += for_sums.nbytes
            MEMO.recount()


def ordered(library: Any, rows: Csr, row_bytes: int) -> tuple[Csr, Csr]:
    """The rows of a square matrix as sums and as attention should visit them; as they are for none.

    Args:
        library: of the CPU.
        rows: in ascending order.
        row_bytes: of what is gathered for each entry.
    """
    ptr, row_id = torch.empty_like(rows.ptr), rows.col.new_empty(rows.ptr.numel() - 1)
    col, edge_id = torch.empty_like(rows.col), torch.empty_like(rows.col)
    # `RowOrder` of csrc/cpu/kernels.h: 0 for none, 1 for sums, 2 for attention as well.
    helped = library.order_rows(*rows[:4], row_bytes, ptr, col, edge_id, row_id)
    found = Csr(ptr, col, edge_id, order=row_id)
    return found if helped > 0 else rows, found if helped > 1 else rows
