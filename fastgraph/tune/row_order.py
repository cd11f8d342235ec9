"""The order of CSR rows in which CPU kernels visit them, chosen once for each graph.

Rows with neighbours in common are visited one after the other, if that saves enough cache misses
(``csrc/cpu/row_order.cpp``). Results are the same in any order. An order that was measured
(:mod:`fastgraph.tune.choices`) is preferred to one that a model of the cache predicts.
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
"""Uses of a CSR matrix before its rows are ordered.

Ordering takes as long as several uses, and the graph of a mini-batch is used only once or twice by
each layer of a model: it should never be ordered.
"""


class _Learnt:
    """The state of the choice for one graph, cached with the graph.

    Attributes:
        ordered: the chosen CSR matrices, by transposition and whether they are for attention.
        uses: the number of uses so far, by transposition.
        most_gathered: bytes of the widest features that were gathered.
        chosen: the measured orders; ``None`` until they are looked up.
        by_bytes: the CSR matrices in measured orders, by transposition and bytes of a feature row.
    """

    def __init__(self) -> None:
        self.chosen: Orders | None = None
        self.by_bytes: dict[tuple[bool, int], Csr] = {}
        self.ordered: dict[tuple[bool, bool], Csr] = {}
        self.uses = [0, 0]
        self.most_gathered = 0
        self.nbytes = 0


class RowOrder:
    """The choice of the order of rows, made once for each CSR matrix of a graph.

    It is made for the widest features that were gathered until then.

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
        numbered: bool = True,
    ) -> Csr:
        """The CSR matrix of a graph whose rows are the aggregating nodes, in the chosen order.

        For features much narrower than those the choice was made for, rows are in ascending order.

        Args:
            graph: any graph; only rows of those with one set of nodes are ordered.
            gathered: the features that the kernel gathers, one row for each node.
            transpose: as for :meth:`fastgraph.Graph.grouped`.
            attention: whether the kernel is one of attention, which gains less from an order.
            ascending: whether the kernel needs rows in ascending order.
            numbered: whether the kernel looks at the numbers of edges.
        """
        if ascending:
            return graph.grouped(transpose=transpose)
        learnt = beside(graph, "row_order", _Learnt)
        if learnt.chosen is None:
            learnt.chosen = choices.orders_of(graph)
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
                grouped = graph.grouped if numbered else graph.ends
                return grouped(transpose=transpose)
            self._decide(graph, learnt, transpose)
            rows = learnt.ordered[transpose, attention]
        if rows.order is not None and 4 * gathered.nbytes < learnt.most_gathered:
            return graph.grouped(transpose=transpose)
        return rows

    def _chosen(self, graph: Graph, learnt: _Learnt, transpose: bool, row_bytes: int) -> Csr:
        """The rows in the measured order for feature rows of so many bytes; 0: ascending."""
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
            with torch.inference_mode(False):  # a cached tensor must serve training as well
                for_sums, for_attention = ordered(self._library(), for_sums, row_bytes)
        learnt.ordered[transpose, False] = for_sums
        learnt.ordered[transpose, True] = for_attention
        if for_sums.order is not None:
            learnt.nbytes += for_sums.nbytes
            MEMO.recount()


def ordered(library: Any, rows: Csr, row_bytes: int) -> tuple[Csr, Csr]:
    """The rows of a square CSR matrix in the order for sums, and in that for attention.

    Where no order saves enough, rows stay as they are.

    Args:
        library: of the CPU.
        rows: in ascending order.
        row_bytes: bytes of the feature row that is gathered for each entry.
    """
    ptr, row_id = torch.empty_like(rows.ptr), rows.col.new_empty(rows.ptr.numel() - 1)
    col, edge_id = torch.empty_like(rows.col), torch.empty_like(rows.col)
    # `RowOrder` of csrc/cpu/kernels.h: 0 for none, 1 for sums, 2 for attention as well.
    helped = library.order_rows(*rows[:4], row_bytes, ptr, col, edge_id, row_id)
    found = Csr(ptr, col, edge_id, order=row_id)
    return found if helped > 0 else rows, found if helped > 1 else rows
