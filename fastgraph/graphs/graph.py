"""The topology of a graph: its edges as CSR by destination and by source, sorted once."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fastgraph.machine.capture import refuse_to_capture
from fastgraph.plugins.backend import Builder
from fastgraph.registry.registry import REGISTRY

MAX_INDEX = 2**31 - 1


class Csr(NamedTuple):
    """Entries of a sparse matrix grouped by row.

    Attributes:
        ptr: int64 ``[rows + 1]``, delimits the rows.
        col: int32 ``[entries]``, the column of each entry.
        edge_id: int32 ``[entries]``, the position of each entry in the caller's edge order;
            ``None`` stands for the identity.
        num_cut: how many rows a GPU cuts into pieces, if ``num_pieces`` is known.
        order: in which kernels visit the rows. For those of the CPU, int32 ``[rows]``, the rows in
            the order in which their entries stand; ``None`` is ascending order. For those of a GPU,
            int32 ``[rows + num_pieces, 4]``, the tasks (``csrc/include/fastgraph/tasks.h``).
        num_pieces: how many pieces these are; ``None`` where nobody has counted.
    """

    ptr: Tensor
    col: Tensor
    edge_id: Tensor | None
    num_cut: int = 0
    order: Tensor | None = None
    num_pieces: int | None = None

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor | None, int, Tensor | None]:
        """As native functions take them."""
        return self[:5]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self if isinstance(t, Tensor))


class Graph:
    """An immutable, possibly bipartite graph, sorted by destination, and by source on demand.

    It keeps no reference to the tensors it was built from. What is learnt about it while it is used
    is kept :func:`beside` it.

    Args:
        index: int32 or int64. Without ``ptr``: ``[2, E]``, sources in row 0 and destinations in
            row 1 (PyG's ``edge_index``), or these two one by one, ``[E]`` each (DGL's ``edges()``).
            With ``ptr``: ``[E]``, the sources of the edges grouped by destination (the column
            indices of PyG's ``adj_t`` in CSR, the row indices of DGL's ``adj_tensors("csc")``).
        num_src: number of source nodes.
        num_dst: number of destination nodes.
        ptr: int32 or int64 ``[num_dst + 1]``, the row pointers of ``adj_t``.
        edge_ids: int32 or int64 ``[E]``, with ``ptr``: the number of each edge, by which its weight
            and its features are found; default: in the order of ``index``.
        self_loops: replace the self-loops in ``index`` by one for each of so many nodes, which
            follow all other edges; not together with ``ptr``.
        numbered: whether edges keep the numbers that they have in ``index``; without ``ptr``. If
            not, as in :meth:`renumbered`, which takes less time.

    Raises:
        IndexError: an index lies outside its node range.
        ValueError: wrong shape or dtype, edges that do not have each number once, a negative number
            of nodes or more self-loops than nodes, or more than 2^31 - 1 nodes or edges.
        TypeError: an argument is not a tensor, or a number of nodes not an integer.
    """

    def __init__(
        self,
        index: Tensor | tuple[Tensor, Tensor],
        num_src: int,
        num_dst: int,
        ptr: Tensor | None = None,
        *,
        edge_ids: Tensor | None = None,
        self_loops: int = 0,
        numbered: bool = True,
    ) -> None:
        destinations: Tensor | None = None
        if ptr is not None:
            sources = _checked("index", index, 1)
            _checked("ptr", ptr, 1)
        elif edge_ids is not None:
            raise ValueError("edge_ids must be given together with ptr, got them alone")
        else:
            sources, destinations = _ends(index)
        _check_count("num_src", num_src)
        _check_count("num_dst", num_dst)
        _check_count("self_loops", self_loops)
        if self_loops > min(num_src, num_dst) or (self_loops and ptr is not None):
            raise ValueError(
                f"self_loops must be at most the number of nodes, and 0 with ptr, got {self_loops} "
                f"for {num_src} sources and {num_dst} destinations"
            )
        most_edges = len(sources) + self_loops
        if max(num_src, num_dst, most_edges) > MAX_INDEX:
            raise ValueError(
                f"fastgraph supports at most {MAX_INDEX} nodes and edges, got {num_src} sources, "
                f"{num_dst} destinations and {most_edges} edges"
            )
        self.num_src = num_src
        self.num_dst = num_dst
        with normal_mode():
            rows: Csr
            build, size = _builder(sources), (num_dst, num_src)
            if destinations is None:
                assert ptr is not None
                rows = build.check_csr(ptr, sources, *size)
            elif self_loops:
                rows = build.build_csr_with_loops(
                    destinations, sources, *size, self_loops, numbered
                )
            else:
                rows = build.build_csr(destinations, sources, *size, numbered)
            if edge_ids is not None:
                rows = rows._replace(edge_id=_checked_ids(edge_ids, sources))
        self.num_edges = rows.col.numel()
        self.by_destination = rows
        """Edges grouped by destination; ``col`` holds sources."""
        self.names: tuple[Tensor, ...] = ()
        """Tensors by which :func:`fastgraph.graphs.edges.graph_of` finds it, if there are any."""
        self._by_source: Csr | None = None
        self._ends_by_source: Csr | None = None
        self._inverse_degrees: dict[tuple[bool, torch.dtype], Tensor] = {}
        self._num_rows: dict[bool, int] = {}
        self._beside: dict[Hashable, Any] = {}

    @property
    def by_source(self) -> Csr:
        """Edges grouped by source, in ascending destination order; ``col`` holds destinations."""
        if self._by_source is None:
            refuse_to_capture("the edges by source", self.by_destination.ptr)
            with normal_mode():
                build = _builder(self.by_destination.ptr)
                self._by_source = build.transpose_csr(self.by_destination, self.num_src, True)
                self._ends_by_source = None
        return self._by_source

    def ends(self, *, transpose: bool) -> Csr:
        """:meth:`grouped`, for a caller that does not look at ``edge_id``, which may be missing."""
        if not transpose or self._by_source is not None:
            return self.grouped(transpose=transpose)
        if self._ends_by_source is None:
            refuse_to_capture("the edges by source", self.by_destination.ptr)
            with normal_mode():
                build = _builder(self.by_destination.ptr)
                found = build.transpose_csr(self.by_destination, self.num_src, False)
                self._ends_by_source = found
        return self._ends_by_source

    def grouped(self, *, transpose: bool) -> Csr:
        """Edges grouped by the node that aggregates.

        Args:
            transpose: by source, as where edges are reversed; else by destination.

        Returns:
            :attr:`by_source` or :attr:`by_destination`.
        """
        return self.by_source if transpose else self.by_destination

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
        """``1 / max(degree, 1)`` of the aggregating nodes.

        Args:
            transpose: of the sources; else of the destinations.
            dtype: of the result, ``[nodes]``.
        """
        key = (transpose, dtype)
        if key not in self._inverse_degrees:
            refuse_to_capture("the degrees of nodes", self.by_destination.ptr)
            with normal_mode():
                ptr = self.grouped(transpose=transpose).ptr
                self._inverse_degrees[key] = _builder(ptr).inverse_degree(ptr, dtype)
        return self._inverse_degrees[key]

    def count_rows(self, *, transpose: bool) -> int:
        """The aggregating nodes up to the last one that has edges: a sampler's leaves are behind.

        Args:
            transpose: of the sources; else of the destinations.
        """
        if transpose not in self._num_rows:
            refuse_to_capture("the nodes that have edges", self.by_destination.ptr)
            with normal_mode():
                ptr = self.ends(transpose=transpose).ptr
                self._num_rows[transpose] = int(torch.searchsorted(ptr, self.num_edges))
        return self._num_rows[transpose]

    def renumbered(self) -> Graph:
        """The same graph with its edges in ascending destination order."""
        graph = copy.copy(self)
        graph.by_destination = self.by_destination._replace(edge_id=None)
        graph._by_source, graph._beside = None, {}
        return graph

    def backwards(self) -> Graph:
        """The same graph, the edges of each destination from the last to the first.

        They are numbered in this order.
        """
        graph = copy.copy(self)
        with normal_mode():
            rows = self.by_destination
            graph.by_destination = _builder(rows.ptr).reverse_rows(rows)
        graph._by_source = graph._ends_by_source = None
        graph.names, graph._beside = (), {}
        return graph

    def from_each_edge(self, destinations: Tensor) -> Graph:
        """Edges to the same destinations, each from a source of its own: that of its number.

        Args:
            destinations: int32 ``[E]``, those of the edges by number.
        """
        rows, size = self.by_destination, self.num_edges
        numbers = rows.edge_id
        with normal_mode():
            if numbers is None:
                numbers = torch.arange(size, dtype=rows.col.dtype, device=rows.col.device)
            by_source = Csr(torch.arange(size + 1, device=rows.col.device), destinations, None)
        graph = copy.copy(self)
        graph.by_destination, graph.num_src = rows._replace(col=numbers), size
        graph._by_source, graph._ends_by_source = by_source, None
        graph._inverse_degrees, graph._num_rows, graph._beside = {}, {}, {}
        return graph

    def from_sources(self, sources: Tensor, num_src: int) -> Graph:
        """Edges of the same numbers to the same destinations, from others; no tensor is shared.

        Args:
            sources: int32 ``[E]``, the new ends, in the order of ``by_destination.col``. They are
                kept, and must be in range.
            num_src: how many nodes these are among.
        """
        graph = copy.copy(self)
        rows = self.by_destination
        edge_id, order = (None if t is None else t.clone() for t in (rows.edge_id, rows.order))
        rows = rows._replace(ptr=rows.ptr.clone(), col=sources, edge_id=edge_id, order=order)
        graph.by_destination = rows
        graph.num_src = num_src
        graph._by_source = graph._ends_by_source = None
        graph._inverse_degrees, graph._num_rows = {}, {}
        graph.names, graph._beside = (), {}
        return graph

    def __getstate__(self) -> dict[str, object]:
        """Without its names and what is beside it: a copy, maybe elsewhere, is another graph."""
        return {**vars(self), "names": (), "_beside": {}}

    @property
    def nbytes(self) -> int:
        """Bytes of both groupings, whether they exist yet or not, and of what is beside them.

        Tensors that a graph beside this one shares with it count once.
        """
        by_source = 8 * (self.num_src + 1) + 2 * 4 * self.num_edges
        beside = shared = 0
        for learnt in tuple(self._beside.values()):
            beside += getattr(learnt, "nbytes", 0)
            if isinstance(learnt, Graph):
                shared += self._shared_bytes(learnt)
        return self.by_destination.nbytes + by_source + beside - shared

    def _shared_bytes(self, other: Graph) -> int:
        """Bytes of the tensors that another graph's edges by destination have from this one's."""
        own = {id(t) for t in self.by_destination if isinstance(t, Tensor)}
        theirs = (t for t in other.by_destination if isinstance(t, Tensor))
        return sum(t.nbytes for t in theirs if id(t) in own)

    def __repr__(self) -> str:
        return f"Graph(num_src={self.num_src}, num_dst={self.num_dst}, num_edges={self.num_edges})"


Learnt = TypeVar("Learnt")


def beside(graph: Graph, name: Hashable, start: Callable[[], Learnt]) -> Learnt:
    """The object cached with a graph under this name, made by ``start()``; it lives with the graph.

    What has an attribute ``nbytes`` is part of the graph's.
    """
    found: Learnt | None = graph._beside.get(name)
    return graph._beside.setdefault(name, start()) if found is None else found


def _builder(like: Tensor) -> Builder:
    return REGISTRY.builder(like.device.type)


def normal_mode() -> AbstractContextManager[object]:
    """A graph that is first used in inference mode must still serve training afterwards."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def _check_count(name: str, count: int) -> None:
    try:
        is_negative = operator.index(count) < 0
    except TypeError:
        raise TypeError(f"{name} must be an integer >= 0, got {count!r}") from None
    if is_negative:
        raise ValueError(f"{name} must be an integer >= 0, got {count}")


def _ends(index: object) -> tuple[Tensor, Tensor]:
    """The sources and the destinations of edges that are not grouped."""
    if not isinstance(index, tuple):
        sources, destinations = _checked("edge_index", index, 2)
        return sources, destinations
    if len(index) != 2:
        raise ValueError(f"edge_index must be sources and destinations, got {len(index)} entries")
    sources = _checked("sources", index[0], 1)
    destinations = _checked("destinations", index[1], 1)
    kinds = [(t.numel(), t.dtype, t.device) for t in (sources, destinations)]
    if kinds[0] != kinds[1]:
        raise ValueError(
            "sources and destinations must be as many, of one dtype and on one device, got "
            + " and ".join(f"{n} of {dtype} on {device}" for n, dtype, device in kinds)
        )
    return sources, destinations


def _checked(name: str, index: object, dim: int) -> Tensor:
    if not isinstance(index, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(index).__name__}")
    if index.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{name} must be int64 or int32, got {index.dtype}")
    if index.dim() != dim or (dim == 2 and index.shape[0] != 2):
        expected = "[2, num_edges]" if dim == 2 else "one-dimensional"
        raise ValueError(f"{name} must be {expected}, got shape {list(index.shape)}")
    return index


def _checked_ids(edge_ids: Tensor, index: Tensor) -> Tensor:
    _checked("edge_ids", edge_ids, 1)
    num_edges = index.numel()
    if edge_ids.numel() != num_edges or edge_ids.device != index.device:
        raise ValueError(
            f"edge_ids must have {num_edges} elements on {index.device}, "
            f"got {edge_ids.numel()} on {edge_ids.device}"
        )
    is_found = edge_ids.new_zeros(num_edges, dtype=torch.bool)
    if num_edges > 0:
        low, high = map(int, torch.aminmax(edge_ids))
        if low < 0 or high >= num_edges:
            raise IndexError(
                f"edge_ids holds {low if low < 0 else high}, expected 0 <= edge id < {num_edges}"
            )
        is_found[edge_ids.long()] = True
    if not is_found.all():
        raise ValueError("edge_ids must hold each number once, got one of them twice")
    return edge_ids.int() if edge_ids.dtype != torch.int32 else edge_ids.clone()


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
