"""The topology of a graph, and the memo that lets operators take plain index tensors.

An operator receives the index tensor that the user passed (``edge_index``, or the two index tensors
of a compressed sparse matrix). :func:`graph_of` turns it into a :class:`Graph`, which sorts the
edges once and is remembered for as long as the tensor lives unchanged (:mod:`fastgraph.memo`).
"""

from __future__ import annotations

import copy
import operator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fastgraph import native
from fastgraph.capture import refuse_to_capture
from fastgraph.memo import MEMO, remembered, tensor_key

MAX_INDEX = 2**31 - 1

USES_BEFORE_ORDERING = 32
"""How often kernels use a grouping as it is. Ordering its rows takes as long as several uses, and a
model of several layers uses the graph of a mini-batch as often as it has layers, or twice."""


class Csr(NamedTuple):
    """Entries of a sparse matrix grouped by row.

    ``ptr`` (int64, [rows + 1]) delimits the rows, ``col`` (int32, [entries]) holds the column of
    each entry, and ``edge_id`` (int32, [entries]) the position of each entry in the caller's edge
    order; ``None`` stands for the identity. ``longest`` is the number of entries of the longest
    row, or any upper bound. ``row_id`` (int32, [rows]) holds the rows in the order in which their
    entries stand; ``None`` is ascending order.
    """

    ptr: Tensor
    col: Tensor
    edge_id: Tensor | None
    longest: int
    row_id: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self if isinstance(t, Tensor))


class Graph:
    """An immutable, possibly bipartite graph, sorted by destination, and by source on demand.

    It keeps no reference to the tensors it was built from.

    Args:
        index: int32 or int64. Without ``ptr``: ``[2, E]``, sources in row 0 and destinations in
            row 1 (PyG's ``edge_index``). With ``ptr``: ``[E]``, the sources of the edges grouped
            by destination (the column indices of PyG's ``adj_t`` in CSR).
        num_src: number of source nodes.
        num_dst: number of destination nodes.
        ptr: int32 or int64 ``[num_dst + 1]``, the row pointers of ``adj_t``.
        self_loops: replace the self-loops in ``index`` by one for each of so many nodes, which
            follow all other edges; not together with ``ptr``.

    Raises:
        IndexError: an index lies outside its node range.
        ValueError: wrong shape or dtype, a negative number of nodes or more self-loops than nodes,
            or more than 2^31 - 1 nodes or edges.
        TypeError: ``index`` or ``ptr`` is not a tensor, or a number of nodes not an integer.
    """

    def __init__(
        self,
        index: Tensor,
        num_src: int,
        num_dst: int,
        ptr: Tensor | None = None,
        *,
        self_loops: int = 0,
    ) -> None:
        _check_index("edge_index" if ptr is None else "index", index, 2 if ptr is None else 1)
        if ptr is not None:
            _check_index("ptr", ptr, 1)
        _check_count("num_src", num_src)
        _check_count("num_dst", num_dst)
        _check_count("self_loops", self_loops)
        if self_loops > min(num_src, num_dst) or (self_loops and ptr is not None):
            raise ValueError(
                f"self_loops must be at most the number of nodes, and 0 with ptr, got {self_loops} "
                f"for {num_src} sources and {num_dst} destinations"
            )
        most_edges = index.shape[-1] + self_loops
        if max(num_src, num_dst, most_edges) > MAX_INDEX:
            raise ValueError(
                f"fastgraph supports at most {MAX_INDEX} nodes and edges, got {num_src} sources, "
                f"{num_dst} destinations and {most_edges} edges"
            )
        self.num_src = num_src
        self.num_dst = num_dst
        with _normal_mode():
            if ptr is not None:
                rows = _check_csr(ptr, index, num_dst, num_src)
            elif self_loops:
                rows = _compress_with_loops(index, num_dst, num_src, self_loops)
            else:
                rows = _compress(index[1], index[0], num_dst, num_src)
        self.num_edges = rows.col.numel()
        self.by_destination = rows
        """Edges grouped by destination; ``col`` holds sources."""
        self._by_source: Csr | None = None
        self._inverse_degrees: dict[tuple[bool, torch.dtype], Tensor] = {}
        self._uses = [0, 0]
        self._most_gathered = 0
        self._ordered: dict[tuple[bool, bool], Csr] = {}
        self.fastest: dict[tuple[object, ...], str] = {}
        """What :mod:`fastgraph.backends.fastest` has found out, by kind of product."""

    @property
    def by_source(self) -> Csr:
        """Edges grouped by source, in ascending destination order; ``col`` holds destinations."""
        if self._by_source is None:
            refuse_to_capture("the edges by source", self.by_destination.ptr)
            with _normal_mode():
                self._by_source = _transpose(self.by_destination, self.num_src)
        return self._by_source

    def grouped(self, *, transpose: bool) -> Csr:
        """Edges grouped by the node that aggregates: destination, or source when transposed."""
        return self.by_source if transpose else self.by_destination

    def in_any_order(self, gathered: Tensor, *, transpose: bool, attention: bool = False) -> Csr:
        """:meth:`grouped` for kernels of the CPU that take rows in any order, to the same result.

        Once it was used a few times, nodes that have neighbours in common follow each other, if
        that saves enough reads from memory (``csrc/cpu/row_order.cpp``). This is decided once, for
        features as wide as the widest that were ``gathered`` until then; much narrower ones get the
        rows as they are.

        Args:
            gathered: the features that the kernel gathers, one row for each node.
            transpose: as for :meth:`grouped`.
            attention: whether the kernel is one of attention, which needs more of a saving.
        """
        rows = self._ordered.get((transpose, attention))
        if rows is None:
            self._uses[transpose] += 1
            self._most_gathered = max(self._most_gathered, gathered.nbytes)
            if self._uses[transpose] <= USES_BEFORE_ORDERING:
                return self.grouped(transpose=transpose)
            self._decide_order(transpose)
            rows = self._ordered[transpose, attention]
        if rows.row_id is not None and 4 * gathered.nbytes < self._most_gathered:
            return self.grouped(transpose=transpose)
        return rows

    def _decide_order(self, transpose: bool) -> None:
        rows = self.grouped(transpose=transpose)
        for_sums, for_attention = rows, rows
        if self._may_be_ordered:
            row_bytes = self._most_gathered // max(self.num_src, 1)
            with _normal_mode():
                for_sums, for_attention = _order_rows(rows, row_bytes)
        self._ordered[transpose, False] = for_sums
        self._ordered[transpose, True] = for_attention

    @property
    def _may_be_ordered(self) -> bool:
        return self.num_src == self.num_dst and self.by_destination.ptr.device.type == "cpu"

    def edge_list(self) -> tuple[Tensor, Tensor]:
        """Sources and destinations in the caller's edge order, each int64 ``[E]``."""
        rows = self.by_destination
        dst = torch.repeat_interleave(rows.ptr.diff(), output_size=self.num_edges)
        src = rows.col.long()
        if rows.edge_id is None:
            return src, dst
        order = rows.edge_id.long()
        return torch.empty_like(src).scatter_(0, order, src), torch.empty_like(dst).scatter_(
            0, order, dst
        )

    def inverse_degree(self, *, transpose: bool, dtype: torch.dtype) -> Tensor:
        """``1 / max(degree, 1)`` of the aggregating nodes, in ``dtype``."""
        key = (transpose, dtype)
        if key not in self._inverse_degrees:
            refuse_to_capture("the degrees of nodes", self.by_destination.ptr)
            with _normal_mode():
                degree = self.grouped(transpose=transpose).ptr.diff().clamp_(min=1)
                self._inverse_degrees[key] = degree.to(dtype).reciprocal_()
        return self._inverse_degrees[key]

    def renumbered(self) -> Graph:
        """The same graph with its edges in ascending destination order.

        Operators find it by its own ``by_destination.col`` and ``by_destination.ptr``, given as
        ``index`` and ``ptr``, for as long as it lives.
        """
        graph = copy.copy(self)
        graph.by_destination = self.by_destination._replace(edge_id=None)
        graph._by_source = None
        graph._uses = [0, 0]
        graph._ordered = {}
        graph.fastest = {}
        rows = graph.by_destination
        if not rows.ptr.is_inference():
            key = (tensor_key(rows.col), tensor_key(rows.ptr), graph.num_src, graph.num_dst, 0)
            _BY_OWN_INDEX[key] = graph
        return graph

    @property
    def nbytes(self) -> int:
        """Bytes of both groupings and of both once more in order, whether they exist yet or not."""
        ptr, edges = 8 * (self.num_src + 1), 2 * 4 * self.num_edges
        nbytes = self.by_destination.nbytes + ptr + edges
        if self._may_be_ordered:
            nbytes += 2 * (ptr + edges + 4 * self.num_src)
        return nbytes

    def __repr__(self) -> str:
        return f"Graph(num_src={self.num_src}, num_dst={self.num_dst}, num_edges={self.num_edges})"


# Graphs by tensors that they hold, whose addresses are not used again as long as they live.
_BY_OWN_INDEX: WeakValueDictionary[tuple[object, ...], Graph] = WeakValueDictionary()


def _normal_mode() -> AbstractContextManager[object]:
    """A graph that is first used in inference mode must still serve training afterwards."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def _check_count(name: str, count: int) -> None:
    try:
        is_negative = operator.index(count) < 0
    except TypeError:
        raise TypeError(f"{name} must be an integer >= 0, got {count!r}") from None
    if is_negative:
        raise ValueError(f"{name} must be an integer >= 0, got {count}")


def _check_index(name: str, index: object, dim: int) -> None:
    if not isinstance(index, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(index).__name__}")
    if index.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{name} must be int64 or int32, got {index.dtype}")
    if index.dim() != dim or (dim == 2 and index.shape[0] != 2):
        expected = "[2, num_edges]" if dim == 2 else "one-dimensional"
        raise ValueError(f"{name} must be {expected}, got shape {list(index.shape)}")


def _compress(row: Tensor, col: Tensor, num_rows: int, num_cols: int) -> Csr:
    if row.device.type == "cpu" and native.is_available():
        ptr = row.new_empty(num_rows + 1, dtype=torch.int64)
        index, edge_id = (row.new_empty(row.numel(), dtype=torch.int32) for _ in range(2))
        is_sorted = native.library().build_csr(row, col, num_rows, num_cols, ptr, index, edge_id)
        return Csr(ptr, index, None if is_sorted else edge_id, row.numel())
    if row.numel() == 0:
        empty = row.new_empty(0, dtype=torch.int32)
        return Csr(row.new_zeros(num_rows + 1, dtype=torch.int64), empty, None, 0)
    # Indices out of range may do what they like to the order: the caller learns of them below.
    keys, order = torch.sort(row.int(), stable=True)
    ptr = _starts(keys, num_rows)
    # All that the host must know, in one transfer.
    numbers = [*torch.aminmax(row), *torch.aminmax(col), _longest(ptr), (row.diff() >= 0).all()]
    low_row, high_row, low_col, high_col, longest, is_sorted = _to_host(numbers)
    check_range(low_col, high_col, num_cols, 0)
    check_range(low_row, high_row, num_rows, 1)
    if is_sorted:
        return Csr(ptr, col.int(), None, longest)
    return Csr(ptr, col[order].int(), order.int(), longest)


def _compress_with_loops(index: Tensor, num_rows: int, num_cols: int, num_loops: int) -> Csr:
    """The compressed rows of :func:`_replace_self_loops`."""
    if index.device.type != "cpu" or not native.is_available():
        col, row = _replace_self_loops(index, num_loops)
        return _compress(row, col, num_rows, num_cols)
    ptr = index.new_empty(num_rows + 1, dtype=torch.int64)
    most = index.shape[1] + num_loops
    col, edge_id = (index.new_empty(most, dtype=torch.int32) for _ in range(2))
    num_kept = native.library().build_csr_with_loops(
        index[1], index[0], num_rows, num_cols, num_loops, ptr, col, edge_id
    )
    num_edges = num_kept + num_loops
    return Csr(ptr, col[:num_edges], edge_id[:num_edges], num_edges)


def _check_csr(ptr: Tensor, index: Tensor, num_rows: int, num_cols: int) -> Csr:
    out_ptr = ptr.new_empty(num_rows + 1, dtype=torch.int64)
    out_index = index.new_empty(index.numel(), dtype=torch.int32)
    if ptr.device.type == "cpu" and native.is_available():
        if ptr.dtype != index.dtype:
            ptr, index = ptr.long(), index.long()
        native.library().check_csr(ptr, index, num_rows, num_cols, out_ptr, out_index)
        return Csr(out_ptr, out_index, None, index.numel())
    if ptr.numel() != num_rows + 1:
        raise ValueError(f"ptr must have {num_rows + 1} elements, got {ptr.numel()}")
    bounds = torch.aminmax(index) if index.numel() else ()
    numbers = [ptr[0], ptr[-1], (ptr.diff() >= 0).all(), _longest(ptr), *bounds]
    first, last, rises, longest, *low_and_high = _to_host(numbers)
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
    return Csr(out_ptr.copy_(ptr), out_index.copy_(index), None, longest)


def check_range(low: int, high: int, size: int, row: int) -> None:
    """The smallest and the largest index in a row of ``edge_index`` are those of nodes.

    Raises:
        IndexError: one of them is not.
    """
    if low < 0 or high >= size:
        raise IndexError(
            f"edge_index holds index {low if low < 0 else high} in row {row}, "
            f"expected 0 <= index < {size}"
        )


def _transpose(rows: Csr, num_cols: int) -> Csr:
    if rows.ptr.device.type == "cpu" and native.is_available():
        ptr = rows.ptr.new_empty(num_cols + 1)
        index, edge_id = torch.empty_like(rows.col), torch.empty_like(rows.col)
        native.library().transpose_csr(*rows[:4], num_cols, ptr, index, edge_id)
        return Csr(ptr, index, edge_id, index.numel())
    row_of_entry = torch.repeat_interleave(rows.ptr.diff(), output_size=rows.col.numel())
    keys, order = torch.sort(rows.col, stable=True)
    ptr = _starts(keys, num_cols)
    edge_id = order.int() if rows.edge_id is None else rows.edge_id[order]
    return Csr(ptr, row_of_entry[order].int(), edge_id, int(_longest(ptr)))


def _order_rows(rows: Csr, row_bytes: int) -> tuple[Csr, Csr]:
    """The rows as sums and as attention should visit them, where they gather so many bytes each."""
    ptr, row_id = torch.empty_like(rows.ptr), rows.col.new_empty(rows.ptr.numel() - 1)
    col, edge_id = torch.empty_like(rows.col), torch.empty_like(rows.col)
    # `RowOrder` of csrc/cpu/kernels.h: 0 for none, 1 for sums, 2 for attention as well.
    helped = native.library().order_rows(*rows[:4], row_bytes, ptr, col, edge_id, row_id)
    ordered = Csr(ptr, col, edge_id, rows.longest, row_id)
    return ordered if helped > 0 else rows, ordered if helped > 1 else rows


def _starts(keys: Tensor, size: int) -> Tensor:
    """Where each of ``size`` keys begins among the sorted ones, and where the last ends."""
    return torch.searchsorted(keys, torch.arange(size + 1, dtype=keys.dtype, device=keys.device))


def _longest(ptr: Tensor) -> Tensor:
    return ptr.diff().amax() if ptr.numel() > 1 else ptr.new_zeros(())


def _to_host(numbers: list[Tensor]) -> list[int]:
    found: list[int] = torch.stack([number.long() for number in numbers]).tolist()
    return found


def graph_of(
    index: Tensor, ptr: Tensor | None, num_src: int, num_dst: int, self_loops: int = 0
) -> Graph:
    """The graph of these index tensors, built on first sight; arguments as for :class:`Graph`.

    Raises:
        RuntimeError: a graph is seen for the first time while a CUDA graph is captured.
    """
    if index.is_inference() or (ptr is not None and ptr.is_inference()):
        # Inference tensors have no version counter, so an edit could not be seen.
        refuse_to_capture("the structure of a graph that inference tensors hold", index)
        return Graph(index, num_src, num_dst, ptr, self_loops=self_loops)
    ptr_key = None if ptr is None else tensor_key(ptr)
    key = (tensor_key(index), ptr_key, num_src, num_dst, self_loops)
    graph: Graph | None = None if ptr is None else _BY_OWN_INDEX.get(key)
    if graph is None:
        graph = MEMO.get(key, index, ptr)
    if graph is None:
        graph = Graph(index, num_src, num_dst, ptr, self_loops=self_loops)
        MEMO.put(key, graph, index, ptr)
    return graph


def renumbered_graph(index: Tensor, num_src: int, num_dst: int, self_loops: int) -> Graph:
    """The renumbered graph of ``edge_index``, remembered for as long as that lives unchanged.

    Arguments as for :class:`Graph`.
    """
    return remembered("renumbered", _make_renumbered, index, num_src, num_dst, self_loops)


def _make_renumbered(index: Tensor, num_src: int, num_dst: int, self_loops: int) -> Graph:
    return Graph(index, num_src, num_dst, self_loops=self_loops).renumbered()


def index_with_self_loops(index: Tensor, num_nodes: int) -> Tensor:
    """``edge_index`` with its self-loops replaced by one for each node, behind all other edges.

    It is int64, as in PyG, and remembered for as long as ``index`` lives unchanged, so that the
    graph of the result is, too.
    """
    return remembered("self_loops", _replace_self_loops, index, num_nodes)


def _replace_self_loops(index: Tensor, num_nodes: int) -> Tensor:
    loops = torch.arange(num_nodes, device=index.device)
    return torch.cat([index[:, index[0] != index[1]], loops.expand(2, num_nodes)], dim=1)
