"""The graphs that DGL holds, as the index tensors that operators take.

DGL passes an *index object* to its message passing, whose edges it has in up to three formats. Ours
are made of the CSC, edges grouped by destination, which message passing in DGL itself uses. It is
looked at without a copy, and kept as a view for as long as the index object lives: an edit of a
DGL graph replaces that object by another. Where samplers leave COO, whose destinations ascend, it
is used instead: making a CSC takes DGL longer than making a graph takes us.

Taking one relation of a graph, or reversing it, makes a new index object at every call, over the
same edges. So index objects are told where they come from, when they are made.

Index objects that are not DGL's own (:data:`FOREIGN`) bring structures of a class of their own.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from dgl.heterograph_index import HeteroGraphIndex
from torch import Tensor

from fastgraph.graphs.edges import Edges, Grouped
from fastgraph.graphs.graph import Graph, beside, normal_mode
from fastgraph.graphs.memo import is_recording, recalled
from fastgraph.plugins.patching import Patches
from fastgraph.plugins.refusal import Refusal
from fastgraph.routing.conditions import plain_tensor

Value = TypeVar("Value")

SEVERAL_RELATIONS = Refusal("several relations at once")


class Named(Protocol):
    """Edges as operators take them."""

    @property
    def edges(self) -> Edges:
        """Their names."""


class Relation(Named, Protocol):
    """All edges of one relation as operators take them."""

    @property
    def lonely(self) -> Tensor | None:
        """Which destinations have no edge, bool ``[num_dst]``; ``None`` where all have one."""


class Structure:
    """The edges of one relation, grouped by destination: views of DGL's own memory.

    The graphs made of it are remembered for as long as it lives, as far as memory allows, and made
    anew where its content was edited, which only happens through tensors that DGL has given out.

    Attributes:
        index: int32 or int64 ``[E]``, the source of each edge.
        ptr: int32 or int64 ``[num_dst + 1]``, where the edges of each destination begin.
        edge_ids: DGL's number of each edge; ``None`` where that is the order of ``index``.
        num_src: number of source nodes.
        num_dst: number of destination nodes.
    """

    def __init__(
        self, index: Tensor, ptr: Tensor, edge_ids: Tensor | None, num_src: int, num_dst: int
    ) -> None:
        self.index, self.ptr, self.edge_ids = index, ptr, edge_ids
        self.num_src, self.num_dst = num_src, num_dst
        self._identity = object()

    def refusal(self, name: str, value: object) -> Refusal | None:
        """Why a tensor cannot be handed to an operator together with these edges."""
        return plain_tensor(name, value)

    def degrees(self) -> Tensor:
        """The in-degree of each destination, ``[num_dst]``."""
        return self.ptr.diff()

    def receivers(self) -> Tensor:
        """The destinations that have edges, int64, in ascending order."""
        return self.remembered("receivers", _receivers)

    def plain(self) -> Relation:
        """For operators to which edges are nothing but their ends."""
        return self._grouped(numbered=False)

    def numbered(self) -> Relation:
        """With DGL's numbers of edges, by which weights are found."""
        return self._grouped(numbered=True)

    def _grouped(self, *, numbered: bool) -> Grouped:
        return self.remembered("CSC", Grouped.of, self.num_src, self.num_dst, numbered=numbered)

    def backwards(self) -> Relation:
        """As :meth:`plain`, with the edges of each destination from the last to the first."""
        return self.remembered("CSC backwards", _backwards, self.num_src, self.num_dst)

    def incidence(self, *, transpose: bool = False, backwards: bool = False) -> Relation:
        """With edges in the place of their sources: node ``i`` has the edges that lead to it.

        Args:
            transpose: the edges that leave it instead.
            backwards: from the last to the first; not together with ``transpose``.
        """
        graph = self._grouped(numbered=True).graph
        name = f"incidence, transpose={transpose}, backwards={backwards}"
        found: Grouped = beside(graph, name, lambda: _incidence(graph, transpose, backwards))
        return found

    def remembered(
        self, name: str, compute: Callable[..., Value], *options: object, numbered: bool = False
    ) -> Value:
        """``compute(index, ptr, edge_ids, *options)``, for as long as this lives unchanged.

        Args:
            name: as for :func:`fastgraph.graphs.memo.remembered`.
            compute: as there.
            options: anything that can be hashed.
            numbered: whether ``edge_ids`` are not ``None``.
        """
        edge_ids = self.edge_ids if numbered else None
        tensors = [self.index, self.ptr] if edge_ids is None else [self.index, self.ptr, edge_ids]
        given = (self.index, self.ptr, edge_ids, *options)
        if is_recording():
            return compute(*given)
        return recalled((self._identity, name, len(tensors), *options), compute, given, tensors)


def _receivers(index: Tensor, ptr: Tensor, edge_ids: None) -> Tensor:
    return ptr.diff().nonzero().squeeze(1)


_LEAST_ASCENDING = 20_000
"""For fewer edges DGL makes a CSC in less time than it takes to look at its COO."""

_LOOKED_AT = 64
"""At how many destinations, to find that they do not ascend before all edges are sorted."""


class _Ascending(Structure):
    """Of edges that DGL has no CSC of, in the order of their destinations: in memory of our own.

    The graph is made once, as DGL would make its CSC, and goes with DGL's.
    """

    def __init__(self, graph: Graph) -> None:
        rows = graph.by_destination
        super().__init__(rows.col, rows.ptr, None, graph.num_src, graph.num_dst)
        self._graph = Grouped(graph)

    def _grouped(self, *, numbered: bool) -> Grouped:
        return self._graph


def _backwards(index: Tensor, ptr: Tensor, edge_ids: None, num_src: int, num_dst: int) -> Grouped:
    first, last = ptr[:-1].long(), ptr[1:].long() - 1
    mirrored = torch.repeat_interleave(first + last, ptr.diff().long(), output_size=len(index))
    order = mirrored - torch.arange(len(index), device=index.device)
    return Grouped.of(index[order], ptr, edge_ids, num_src, num_dst)


def _incidence(graph: Graph, transpose: bool, backwards: bool) -> Grouped:
    with normal_mode():  # what is remembered must serve training as well
        rows = graph.grouped(transpose=transpose)
        numbers = rows.edge_id
        if numbers is None:
            numbers = torch.arange(graph.num_edges, dtype=torch.int32, device=rows.ptr.device)
        make = _backwards if backwards else Grouped.of
        return make(numbers, rows.ptr, None, graph.num_edges, len(rows.ptr) - 1)


class _Source:
    """The edges that several index objects share.

    Attributes:
        reversed: the source whose edges these are the other way round, if there is one.
        relations: sources of single relations, by number.
        latest: the index object that was made last.
    """

    def __init__(self, reversed_source: _Source | None = None) -> None:
        self.reversed = reversed_source
        self.relations: dict[int, _Source] = {}
        self.latest: weakref.ref[Any] | None = None
        self._structure: Structure | Refusal | None = None

    def structure(self) -> Structure | Refusal | None:
        """The edges, or why they cannot be taken; ``None`` where no index object is left."""
        if self._structure is None and self.latest is not None:
            gidx = self.latest()
            if gidx is not None:
                self._structure = _read(gidx)
        return self._structure


def _read(gidx: Any) -> Structure | Refusal:
    if gidx.number_of_etypes() != 1:
        return SEVERAL_RELATIONS
    formats = gidx.formats()
    if "csc" not in formats["created"] + formats["not created"]:
        return Refusal("a graph that is restricted to formats without CSC")
    with normal_mode():  # what is read must serve training as well
        if formats["created"] == ["coo"] and gidx.number_of_edges(0) >= _LEAST_ASCENDING:
            found = _read_ascending(gidx)
            if found is not None:
                return found
        num_dst, num_src, ptr, index, edge_ids = gidx.adjacency_matrix_tensors(0, True, "csr")
    has_ids = len(index) > 0 and len(edge_ids) == len(index)
    return Structure(index, ptr, edge_ids if has_ids else None, num_src, num_dst)


def _read_ascending(gidx: Any) -> Structure | None:
    src, dst, _ = gidx.edges(0, "eid")
    some = dst[:: len(dst) // _LOOKED_AT + 1].tolist()
    if some != sorted(some):
        return None
    graph = Graph((src, dst), *map(gidx.num_nodes, gidx.metagraph.find_edge(0)))
    return _Ascending(graph) if graph.by_destination.edge_id is None else None


# By identity, because DGL's objects cannot be hashed; an entry goes with its index object.
_SOURCES: dict[int, tuple[weakref.ref[Any], _Source]] = {}


def _source_of(gidx: Any) -> _Source:
    entry = _SOURCES.get(id(gidx))
    return _join(gidx, _Source()) if entry is None else entry[1]


def _join(gidx: Any, source: _Source) -> _Source:
    key = id(gidx)
    source.latest = weakref.ref(gidx)
    # Bound, because names of modules may be gone when the interpreter ends.
    forget = functools.partial(_forget, _SOURCES, key)
    _SOURCES[key] = weakref.ref(gidx, forget), source
    return source


def _forget(sources: dict[int, Any], key: int, _: object) -> None:
    sources.pop(key, None)


FOREIGN: dict[type, Callable[[Any], Structure | Refusal]] = {}
"""Functions that give the edges of index objects that are not DGL's own, by their class."""


def structure_of(gidx: Any) -> Structure | Refusal:
    """The edges of an index object with one relation, or the reason why they cannot be taken."""
    if type(gidx) in FOREIGN:
        return FOREIGN[type(gidx)](gidx)
    found = _source_of(gidx).structure()
    assert found is not None  # it is alive
    return found


def directed_structure_of(gidx: Any, *, may_turn: bool = True) -> tuple[Structure, bool] | Refusal:
    """The same, or those of the graph that it reverses, and whether edges are to be turned round.

    Args:
        gidx: DGL's index object.
        may_turn: whether the order of the edges of a node may be another than DGL's.
    """
    found: Structure | Refusal | None
    if type(gidx) in FOREIGN:
        found = FOREIGN[type(gidx)](gidx)
    else:
        source = _source_of(gidx)
        if may_turn and source.reversed is not None:
            turned = source.reversed.structure()
            if isinstance(turned, Structure):
                return turned, True
        found = source.structure()
    assert found is not None  # it is alive
    return found if isinstance(found, Refusal) else (found, False)


def install(patches: Patches) -> None:
    """Have index objects that DGL makes of others remember where they come from."""
    relation, reverse = HeteroGraphIndex.get_relation_graph, HeteroGraphIndex.reverse

    @functools.wraps(relation)
    def get_relation_graph(self: Any, etype: int) -> Any:
        found = relation(self, etype)
        _join(found, _source_of(self).relations.setdefault(int(etype), _Source()))
        return found

    @functools.wraps(reverse)
    def reversed_index(self: Any) -> Any:
        found = reverse(self)
        source = _source_of(self)
        _join(found, source.reversed or _Source(source))
        return found

    patches.replace(HeteroGraphIndex, "get_relation_graph", get_relation_graph)
    patches.replace(HeteroGraphIndex, "reverse", reversed_index)
