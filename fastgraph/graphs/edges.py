"""The cache of graphs, looked up by the index tensors that operators take.

An operator takes ``edge_index``, or the two index tensors of a CSR matrix. :func:`graph_of` looks
up the :class:`fastgraph.Graph` of these tensors: it is sorted at the first call, and cached for as
long as the tensors live unchanged (:mod:`fastgraph.graphs.memo`). A graph that exists before
operators are called is found by its own CSR tensors, which are then passed to the operators.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import NamedTuple, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fastgraph.graphs.graph import MAX_INDEX, Graph, normal_mode
from fastgraph.graphs.memo import MEMO, remembered, tensor_key
from fastgraph.graphs.passes import given_entry, is_given
from fastgraph.graphs.repeats import REPEATS
from fastgraph.graphs.witness import Checksum
from fastgraph.machine import native
from fastgraph.machine.capture import refuse_to_capture
from fastgraph.plugins.refusal import Refusal

# Graphs by the ``id`` of CSR tensors that they hold: unique as long as these live.
_BY_OWN_INDEX: WeakValueDictionary[tuple[int, ...], Graph] = WeakValueDictionary()

_OWN = "_fastgraph_own"
"""An attribute of these tensors."""


Result = TypeVar("Result")


class Edges(NamedTuple):
    """The arguments by which operators take edges.

    Attributes:
        index: int32 or int64, ``[2, E]``, sources in row 0 and destinations in row 1; with ``ptr``
            ``[E]``, sources grouped by destination, or ``[2, E]`` with the number of each edge in
            row 1.
        ptr: int32 or int64 ``[destinations + 1]``, offsets of the groups.
        transpose: whether every edge is reversed.
        self_loops: the number of nodes whose self-loops the operator is to replace.
        values: one value for each edge that came with them, as those of a sparse matrix.
    """

    index: Tensor  # type: ignore[assignment]  # shadows tuple.index
    ptr: Tensor | None = None
    transpose: bool = False
    self_loops: int = 0
    values: Tensor | None = None

    @property
    def num_edges(self) -> int:
        """The number of edges that were given."""
        return self.index.shape[-1]

    def as_index(self) -> Tensor:
        """An ``edge_index`` with these edges in their order, as long as there are no self-loops."""
        if self.ptr is not None:
            index = remembered("entries", index_of_groups, self.index, self.ptr)
            return index.flip(0) if self.transpose else index
        return remembered("reversed", _reversed, self.index) if self.transpose else self.index


def index_of_groups(index: Tensor, ptr: Tensor) -> Tensor:
    """The ``edge_index`` of edges that are given by groups, in the order of their numbers."""
    rows = torch.repeat_interleave(ptr.diff(), output_size=index.shape[-1]).to(index.dtype)
    if index.dim() == 1:
        return torch.stack([index, rows])
    return torch.empty_like(index).index_copy_(1, index[1].long(), torch.stack([index[0], rows]))


def _reversed(index: Tensor) -> Tensor:
    return index.flip(0)


def has_parallel_edges(index: Tensor, num_src: int) -> bool:
    """True if two edges have the same ends, remembered as long as ``index`` lives unchanged.

    Args:
        index: int32 or int64 ``[2, E]``.
        num_src: number of source nodes.
    """
    return bool(remembered("parallel", _has_parallel_edges, index, num_src))


def _has_parallel_edges(index: Tensor, num_src: int) -> Tensor:
    """The answer on the CPU, so that nobody who asks again waits for a device."""
    pairs = index[1].long() * num_src + index[0]
    found = False
    if not bool((pairs[1:] > pairs[:-1]).all()):  # as entries of a matrix mostly ascend
        pairs = pairs.sort().values
        found = bool((pairs[1:] == pairs[:-1]).any())
    return torch.tensor(found, device="cpu")


def graph_of(
    index: Tensor, ptr: Tensor | None, num_src: int, num_dst: int, self_loops: int = 0
) -> Graph:
    """The cached graph of these index tensors, built at the first call; arguments as for Graph.

    Raises:
        RuntimeError: a graph is seen for the first time while a CUDA graph is captured.
    """
    known = known_graph(index, ptr, num_src, num_dst, self_loops)
    if known is not None:
        return known
    if ptr is not None and not self_loops:
        own = _BY_OWN_INDEX.get((id(index), id(ptr), num_src, num_dst))
        if own is not None:
            return own
    if index.is_inference() or (ptr is not None and ptr.is_inference()):
        # Inference tensors have no version counter, so an edit could not be seen.
        refuse_to_capture("the structure of a graph that inference tensors hold", index)
        return _build(index, ptr, num_src, num_dst, self_loops)
    key = _key(index, ptr, num_src, num_dst, self_loops)
    graph: Graph | None = MEMO.get(key, index, ptr)
    if graph is not None:
        return graph
    if is_found_by_content(index, ptr):
        checksum = Checksum([index])
        content = checksum.bits, index.shape, num_src, num_dst, self_loops
        graph = REPEATS.find(content, index)
        if graph is None:
            graph = _build(index, None, num_src, num_dst, self_loops)
            REPEATS.add(content, index, graph)
        MEMO.put(key, graph, index, checksum=checksum)
        return graph
    graph = _build(index, ptr, num_src, num_dst, self_loops)
    MEMO.put(key, graph, index, ptr)
    return graph


def given_graph(index: Tensor, num_src: int, num_dst: int, self_loops: int) -> Graph | None:
    """The graph of the forward pass, as :func:`graph_of` gives it, if a backward pass asks."""
    if not is_given():
        return None
    entry = given_entry(_key(index, None, num_src, num_dst, self_loops))
    return None if entry is None else entry.value


def is_found_by_content(index: Tensor, ptr: Tensor | None) -> bool:
    """True if the graph of these tensors may be that of others with the same content."""
    return ptr is None and index.is_cpu and index.dim() == 2 and native.is_available()


def _key(
    index: Tensor, ptr: Tensor | None, num_src: int, num_dst: int, self_loops: int
) -> tuple[object, ...]:
    ptr_key = None if ptr is None else tensor_key(ptr)
    return tensor_key(index), ptr_key, num_src, num_dst, self_loops


def is_remembered(index: Tensor, num_src: int, num_dst: int) -> bool:
    """True if :func:`graph_of` has the graph of an ``edge_index``, as far as torch counts edits."""
    return _key(index, None, num_src, num_dst, 0) in MEMO


class OutOfRange(Refusal):
    """No operator can take a graph: an index lies outside the nodes.

    Attributes:
        detail: names the index; no part of the reason, by which refusals are counted.
    """

    __slots__ = ("detail",)

    def __init__(self, detail: str, reason: str = "edge_index points outside the nodes") -> None:
        super().__init__(reason)
        self.detail = detail


def too_large(*counts: int) -> Refusal | None:
    """Why numbers of nodes or edges do not fit into a graph, if they do not."""
    return Refusal(f"more than {MAX_INDEX} nodes or edges") if max(counts) > MAX_INDEX else None


def unless_out_of_range(make: Callable[..., Result], *arguments: object) -> Result | OutOfRange:
    """The result of ``make``, or the reason to refuse if an index lies outside the nodes.

    A route calls this before it computes, and leaves such a call to upstream with its own error.

    Args:
        make: builds a graph, as :func:`graph_of` does, and does nothing else.
        arguments: its arguments.
    """
    try:
        return make(*arguments)
    except IndexError as error:
        return OutOfRange(str(error))


class KnownGraph(NamedTuple):
    """The graph of an ``edge_index`` that was looked up before operators are called."""

    graph: Graph
    index: Tensor  # type: ignore[assignment]  # shadows tuple.index
    ptr: Tensor | None = None

    def while_computing(self, compute: Callable[..., Result], *arguments: object) -> Result:
        """The result of ``compute(*arguments)``, in which the look-up of the graph is skipped.

        Nothing in it may edit the edges.
        """
        before, _THREAD.known = _THREAD.known, self
        try:
            return compute(*arguments)
        finally:
            _THREAD.known = before


def known_graph(
    index: Tensor, ptr: Tensor | None, num_src: int, num_dst: int, self_loops: int = 0
) -> Graph | None:
    """The :class:`KnownGraph` that arguments of :func:`graph_of` mean, if it is one."""
    known = _THREAD.known
    if known is None or index is not known.index or ptr is not known.ptr or self_loops:
        return None
    graph = known.graph
    return graph if num_src == graph.num_src and num_dst == graph.num_dst else None


class RenumberedGraph(NamedTuple):
    """A graph that operators find by tensors of its own instead of the caller's ``edge_index``.

    Attributes:
        graph: as :func:`named_by_itself` returns it.
        caller_index: the caller's tensor, where upstream saves it for its backward pass and so
            raises if it is edited before that; ``None`` where upstream saves edges of its own.
    """

    graph: Graph
    caller_index: Tensor | None

    def while_computing(self, compute: Callable[..., Result], *arguments: object) -> Result:
        """``compute(*arguments)``, in which autograd nodes save ``caller_index`` as upstream's do.

        See :func:`caller_index_of`.
        """
        before, _THREAD.renumbered = _THREAD.renumbered, self
        try:
            return compute(*arguments)
        finally:
            _THREAD.renumbered = before


def caller_index_of(index: Tensor) -> Tensor | None:
    """The caller's ``edge_index`` for which an operator was given ``index``, if it must not change.

    An autograd node saves it beside ``index``: torch then raises in the backward pass if it was
    edited in between.
    """
    renumbered = _THREAD.renumbered
    if renumbered is None or all(name is not index for name in renumbered.graph.names):
        return None
    caller_index = renumbered.caller_index
    # An inference tensor cannot be saved, and torch does not count its edits.
    return None if caller_index is None or caller_index.is_inference() else caller_index


def as_saved(index: Tensor, ptr: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The index tensors of an operator as its autograd node saves them: views of the same memory.

    ``index.data = other`` puts other memory behind a tensor, of which torch counts no edit. The
    views keep what the forward pass saw, as those of rows do that upstream saves, and count edits
    in place as the tensor does. Those of a graph of ours nobody else has; they are found by
    identity.
    """
    if torch.compiler.is_compiling() or type(index) is not Tensor or _OWN in vars(index):
        return index, ptr
    return index.detach(), None if ptr is None else ptr.detach()


class DerivedIndex(NamedTuple):
    """Edges that operators take, and the caller's tensors that upstream saves in their place.

    Attributes:
        index: an operator's argument.
        callers: tensors whose edit before the backward pass is an error, as it is upstream.
    """

    index: Tensor  # type: ignore[assignment]  # shadows tuple.index
    callers: tuple[Tensor, ...]

    def while_computing(self, compute: Callable[..., Result], *arguments: object) -> Result:
        """``compute(*arguments)``, in which autograd nodes save ``callers``.

        See :func:`callers_of`.
        """
        before, _THREAD.derived = _THREAD.derived, self
        try:
            return compute(*arguments)
        finally:
            _THREAD.derived = before


def callers_of(index: Tensor) -> tuple[Tensor, ...]:
    """The caller's tensors that must not change, for an operator that was given ``index``.

    That is what :func:`caller_index_of` says, and of a :class:`DerivedIndex`.
    """
    derived = _THREAD.derived
    if derived is not None and derived.index is index:
        return tuple(tensor for tensor in derived.callers if not tensor.is_inference())
    caller_index = caller_index_of(index)
    return () if caller_index is None else (caller_index,)


class _Thread(threading.local):
    """The graphs that a thread's call knows."""

    known: KnownGraph | None = None
    renumbered: RenumberedGraph | None = None
    derived: DerivedIndex | None = None


_THREAD = _Thread()


def _build(index: Tensor, ptr: Tensor | None, num_src: int, num_dst: int, loops: int) -> Graph:
    if ptr is not None and index.dim() == 2 and len(index) == 2:
        sources, edge_ids = index
        return Graph(sources, num_src, num_dst, ptr, edge_ids=edge_ids, self_loops=loops)
    return Graph(index, num_src, num_dst, ptr, self_loops=loops)


def named_by_itself(graph: Graph) -> Graph:
    """Have :func:`graph_of` find a graph by its ``by_destination.col`` and ``.ptr``, as it lives.

    Its edges must be numbered in the order of these tensors.
    """
    _name(graph, graph.by_destination.col)
    return graph


def _name(graph: Graph, index: Tensor) -> None:
    ptr = graph.by_destination.ptr
    graph.names += index, ptr
    setattr(index, _OWN, True)
    _BY_OWN_INDEX[id(index), id(ptr), graph.num_src, graph.num_dst] = graph


class Grouped:
    """A graph that came grouped by destination, and how operators name it.

    Operators get tensors of the graph's own, which say all of it: should it be forgotten between a
    forward pass and its backward pass, it is built from them once more.

    Args:
        graph: which nothing else is to use, as its numbers of edges may move in memory.
    """

    @classmethod
    def of(
        cls, index: Tensor, ptr: Tensor, edge_ids: Tensor | None, num_src: int, num_dst: int
    ) -> Grouped:
        """The graph of edges that are grouped by destination.

        Args:
            index: int32 or int64 ``[E]``, the sources of the edges.
            ptr: int32 or int64 ``[num_dst + 1]``, offsets of the groups.
            edge_ids: int32 or int64 ``[E]``, the number of each edge; default: in this order.
            num_src: number of source nodes.
            num_dst: number of destination nodes.

        Raises:
            IndexError, ValueError: as for :class:`Graph`.
        """
        return cls(Graph(index, num_src, num_dst, ptr, edge_ids=edge_ids))

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        rows = graph.by_destination
        names = rows.col
        if rows.edge_id is not None:
            names = rows.col.expand(2, -1)
            if rows.col is not rows.edge_id:
                names = torch.stack([rows.col, rows.edge_id])
            self.graph.by_destination = rows._replace(col=names[0], edge_id=names[1])
        _name(self.graph, names)
        self.edges = Edges(names, rows.ptr)

    @functools.cached_property
    def lonely(self) -> Tensor | None:
        """The zero in-degree destinations, bool ``[num_dst]``; ``None`` where there are none."""
        with normal_mode():  # a cached tensor must serve training as well
            is_lonely = self.graph.by_destination.ptr.diff() == 0
            return is_lonely if is_lonely.any() else None

    @property
    def nbytes(self) -> int:
        """Bytes of the graph."""
        return self.graph.nbytes


def named(graph: Graph, *, numbered: bool) -> tuple[Edges, object]:
    """The arguments by which operators find a graph, and an object that keeps it in the cache.

    Operators find the graph for as long as the caller holds that object.

    Args:
        graph: with edges in any order.
        numbered: whether a value is given or returned for each edge, in the order of the graph.
    """
    rows = graph.by_destination
    if numbered:
        kept = Grouped.of(rows.col, rows.ptr, rows.edge_id, graph.num_src, graph.num_dst)
        return kept.edges, kept
    return Edges(rows.col, rows.ptr), named_by_itself(graph.renumbered())


def renumbered_graph(index: Tensor, num_src: int, num_dst: int, self_loops: int) -> Graph:
    """The renumbered graph of ``edge_index``, remembered for as long as that lives unchanged.

    Arguments as for :class:`Graph`.
    """
    return remembered("renumbered", _make_renumbered, index, num_src, num_dst, self_loops)


def _make_renumbered(index: Tensor, num_src: int, num_dst: int, self_loops: int) -> Graph:
    graph = Graph(index, num_src, num_dst, self_loops=self_loops, numbered=False)
    return named_by_itself(graph)


def index_with_self_loops(index: Tensor, num_nodes: int) -> Tensor:
    """``edge_index`` with its self-loops replaced by one for each node, behind all other edges.

    It is int64, as in PyG, and remembered for as long as ``index`` lives unchanged, so that the
    graph of the result is, too.
    """
    return remembered("self_loops", _with_self_loops, index, num_nodes)


def _with_self_loops(index: Tensor, num_nodes: int) -> Tensor:
    return _followed_by_loops(other_edges(index).index, num_nodes)


def replace_self_loops(index: Tensor, num_nodes: int) -> Tensor:
    """:func:`index_with_self_loops`, made anew."""
    return _followed_by_loops(_without_self_loops(index).index, num_nodes)


def _followed_by_loops(index: Tensor, num_nodes: int) -> Tensor:
    loops = torch.arange(num_nodes, device=index.device)
    return torch.cat([index, loops.expand(2, num_nodes)], dim=1)


class OtherEdges(NamedTuple):
    """The edges that are no self-loops.

    Attributes:
        index: ``[2, E']``.
        chosen: which of all edges these are: their numbers, int64 ``[E']``; of a subclass of
            tensors a mask, bool ``[E]``, by which ranks need not send anything.
    """

    index: Tensor  # type: ignore[assignment]  # shadows tuple.index
    chosen: Tensor

    def of(self, values: Tensor) -> Tensor:
        """The rows of these edges, of values of all edges ``[E, *channels]``."""
        if self.chosen.dtype is torch.bool:
            return values[self.chosen]
        return values.index_select(0, self.chosen)  # takes a third of the time, backwards a half

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.index.nbytes + self.chosen.nbytes


def other_edges(index: Tensor) -> OtherEdges:
    """The edges that are no self-loops, remembered as long as ``index`` lives unchanged."""
    return remembered("other_edges", _without_self_loops, index)


def _without_self_loops(index: Tensor) -> OtherEdges:
    is_other = index[0] != index[1]
    if type(index) is not Tensor:
        return OtherEdges(index[:, is_other], is_other)
    numbers = is_other.nonzero().squeeze(1)
    ends = index[0].index_select(0, numbers), index[1].index_select(0, numbers)
    return OtherEdges(torch.stack(ends), numbers)
