"""The graphs that DGL holds, as the index tensors that operators take.

DGL passes an *index object* to its message passing, whose edges it has in up to three formats.
Where it has the CSC, edges grouped by destination, ours are made of that. It is looked at without a
copy, and kept as a view for as long as the index object lives: an edit of a DGL graph replaces that
object by another. A new graph has its edges in COO alone, as a rule. These are grouped here, and
DGL makes no CSC as long as it needs none itself: that would take it longer.

Taking one relation of a graph, or reversing it, makes a new index object at every call, over the
same edges. So index objects are told where they come from, when they are made; the only relation of
a graph is the graph itself.

Index objects that are not DGL's own (:data:`FOREIGN`) bring structures of a class of their own.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from dgl.backend import zerocopy_from_dgl_ndarray
from dgl.heterograph_index import HeteroGraphIndex
from torch import Tensor

from fastgraph.dgl.index_objects import has_size_of, is_single, set_single
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
        identity: tells it from all others, in keys of what is remembered.
    """

    def __init__(
        self, index: Tensor, ptr: Tensor, edge_ids: Tensor | None, num_src: int, num_dst: int
    ) -> None:
        self.index, self.ptr, self.edge_ids = index, ptr, edge_ids
        self.num_src, self.num_dst = num_src, num_dst
        self.identity = object()

    @property
    def num_edges(self) -> int:
        """The number of edges."""
        return len(self.index)

    @property
    def device(self) -> torch.device:
        """The device of the edges."""
        return self.index.device

    def refusal(self, name: str, value: object) -> Refusal | None:
        """Why a tensor cannot be handed to an operator together with these edges."""
        return plain_tensor(name, value)

    def degrees(self) -> Tensor:
        """The in-degree of each destination, ``[num_dst]``, which nobody may edit."""
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
        sizes = self.num_src, self.num_dst
        return self.remembered("CSC", Grouped.of, *sizes, numbered=numbered, held=_held)

    def backwards(self) -> Relation:
        """As :meth:`plain`, with the edges of each destination from the last to the first."""
        graph = self._grouped(numbered=False).graph
        found: Grouped = beside(graph, "backwards", lambda: _backwards(graph))
        return found

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
        self,
        name: str,
        compute: Callable[..., Value],
        *options: object,
        numbered: bool = False,
        held: Callable[[Value], Sequence[Tensor]] | None = None,
    ) -> Value:
        """``compute(index, ptr, edge_ids, *options)``, for as long as this lives unchanged.

        Args:
            name: as for :func:`fastgraph.graphs.memo.remembered`.
            compute: as there.
            options: anything that can be hashed.
            numbered: whether ``edge_ids`` are not ``None``.
            held: as for :func:`fastgraph.graphs.memo.recalled`.
        """
        edge_ids = self.edge_ids if numbered else None
        tensors = [self.index, self.ptr] if edge_ids is None else [self.index, self.ptr, edge_ids]
        given = (self.index, self.ptr, edge_ids, *options)
        if is_recording():
            return compute(*given)
        key = self.identity, name, len(tensors), *options
        return recalled(key, compute, given, tensors, held)


def _held(found: Grouped) -> list[Tensor]:
    rows = found.graph.by_destination
    return [tensor for tensor in (rows.col, rows.ptr, rows.edge_id) if tensor is not None]


def _counted(nodes: Tensor, size: int) -> Tensor:
    """The times that each of ``size`` nodes is among some, int64 ``[size]``."""
    if nodes.dtype != torch.int64:
        return torch.bincount(nodes, minlength=size)
    # `bincount` looks for the least and the greatest first, which takes a third of its time.
    return nodes.new_zeros(size).index_add_(0, nodes, nodes.new_ones(1).expand(len(nodes)))


def _receivers(index: Tensor, ptr: Tensor, edge_ids: None) -> Tensor:
    return ptr.diff().nonzero().squeeze(1)


class _once(functools.cached_property[Value]):  # noqa: N801  # a decorator
    """A property in the place of an attribute, computed once."""


class Ungrouped(Structure):
    """Edges in the order of their numbers, which are grouped in memory of our own.

    They are grouped once, in the order of DGL's CSC, and go with DGL's graph as that would. Numbers
    of edges are kept only if somebody asks for them.

    Args:
        src: int32 or int64 ``[E]``, the source of each edge.
        dst: likewise its destination.
        num_src: number of source nodes.
        num_dst: number of destination nodes.

    Attributes:
        views: the value of :data:`_VIEWS` when DGL was known to have no CSC.
    """

    def __init__(self, src: Tensor, dst: Tensor, num_src: int, num_dst: int) -> None:
        self._ends = src, dst
        self.num_src, self.num_dst = num_src, num_dst
        self.identity = object()
        self.views = _VIEWS.given_out
        self._plain: Grouped | None = None
        self._numbered: Grouped | None = None

    @property
    def num_edges(self) -> int:
        """The number of edges."""
        return len(self._ends[0])

    @property
    def device(self) -> torch.device:
        """The device of the edges."""
        return self._ends[0].device

    def degrees(self) -> Tensor:
        """See :meth:`Structure.degrees`.

        Counted from the edges as they are until these are grouped, as nobody has said yet whether
        DGL's numbers of edges will be needed.
        """
        if self._plain is None and self._numbered is None:
            return self._in_degrees
        return super().degrees()

    @_once
    def _in_degrees(self) -> Tensor:
        """These are counted once, too, as edges are never grouped where sums are left to DGL."""
        with normal_mode():  # what is kept must serve training as well
            return _counted(self._ends[1], self.num_dst)

    @_once
    def out_degrees(self) -> Tensor:
        """The out-degree of each source, int64 ``[num_src]``.

        Counted from the edges as they are: they may never be grouped by source.
        """
        with normal_mode():  # what is kept must serve training as well
            return _counted(self._ends[0], self.num_src)

    @_once
    def index(self) -> Tensor:
        """The source of each edge, int32 ``[E]``, grouped by destination."""
        return self._some().by_destination.col

    @_once
    def ptr(self) -> Tensor:
        """Offsets of the groups, int64 ``[num_dst + 1]``."""
        return self._some().by_destination.ptr

    @_once
    def edge_ids(self) -> Tensor | None:
        """DGL's number of each edge; ``None`` where that is the order of ``index``."""
        return self._grouped(numbered=True).graph.by_destination.edge_id

    def _some(self) -> Graph:
        return (self._numbered or self._grouped(numbered=False)).graph

    def _grouped(self, *, numbered: bool) -> Grouped:
        found = self._numbered if numbered else self._plain
        if found is not None:
            return found
        with normal_mode():  # what is made here must serve training as well
            if not numbered and self._numbered is not None:
                found = Grouped(self._numbered.graph.renumbered())
            else:
                found = Grouped(Graph(self._ends, self.num_src, self.num_dst, numbered=numbered))
        if not numbered:
            self._plain = found
            return found
        if found.graph.by_destination.edge_id is None:  # that is their order already
            self._plain = found = self._plain or found
        self._numbered = found
        return found

    def remembered(
        self,
        name: str,
        compute: Callable[..., Value],
        *options: object,
        numbered: bool = False,
        held: Callable[[Value], Sequence[Tensor]] | None = None,
    ) -> Value:
        """See :meth:`Structure.remembered`: beside the graph, which nobody else can edit."""
        graph = self._grouped(numbered=numbered).graph
        rows = graph.by_destination
        if is_recording():
            return compute(rows.col, rows.ptr, rows.edge_id, *options)

        def start() -> Value:
            with normal_mode():
                return compute(rows.col, rows.ptr, rows.edge_id, *options)

        return beside(graph, ("of DGL", name, *options), start)


def _backwards(graph: Graph) -> Grouped:
    with normal_mode():  # what is remembered must serve training as well
        return Grouped(graph.backwards())


def _incidence(graph: Graph, transpose: bool, backwards: bool) -> Grouped:
    with normal_mode():  # what is remembered must serve training as well
        rows = graph.grouped(transpose=transpose)
        numbers = rows.edge_id
        if numbers is None:
            numbers = torch.arange(graph.num_edges, dtype=torch.int32, device=rows.ptr.device)
        found = Graph(numbers, graph.num_edges, len(rows.ptr) - 1, rows.ptr)
        return Grouped(found.backwards() if backwards else found)


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

    def structure(self, gidx: Any = None) -> Structure | Refusal | None:
        """The edges, or why they cannot be taken; ``None`` where no index object is left.

        Args:
            gidx: one of the index objects; default: the latest.
        """
        found = self._structure
        if gidx is None and self.latest is not None:
            gidx = self.latest()
        if type(found) is Ungrouped and found.views != _VIEWS.given_out:
            if gidx is None or "csc" not in gidx.formats()["created"]:
                found.views = _VIEWS.given_out
            else:
                found = None  # somebody may have DGL's CSC, and edit it
        if found is None and gidx is not None:
            self._structure = found = _read(gidx)
        return found


def _read(gidx: Any) -> Structure | Refusal:
    if gidx.number_of_etypes() != 1:
        return SEVERAL_RELATIONS
    formats = gidx.formats()
    if "csc" not in formats["created"] + formats["not created"]:
        return Refusal("a graph that is restricted to formats without CSC")
    with normal_mode():  # what is read must serve training as well
        if "coo" in formats["created"] and "csc" not in formats["created"]:
            # As they are pickled, without a copy: `edges` makes a number for each of them.
            src, dst = map(zerocopy_from_dgl_ndarray, gidx.__getstate__().arrays)
            if src.is_cpu or _may_ascend(dst):
                return Ungrouped(src, dst, *sizes_of(gidx))
        num_dst, num_src, ptr, index, edge_ids = _READ_TENSORS(gidx, 0, True, "csr")
    has_ids = len(index) > 0 and len(edge_ids) == len(index)
    return Structure(index, ptr, edge_ids if has_ids else None, num_src, num_dst)


def sizes_of(gidx: Any) -> tuple[int, int]:
    """The numbers of sources and of destinations of one relation, of which no edge is read."""
    source, destination = (0, 0) if gidx.number_of_ntypes() == 1 else gidx.metagraph.find_edge(0)
    return gidx.num_nodes(source), gidx.num_nodes(destination)


_LEAST_ASCENDING = 20_000
"""For fewer edges DGL makes a CSC on a GPU in less time than it takes to look at its COO."""

_LOOKED_AT = 64
"""At how many destinations."""


def _may_ascend(dst: Tensor) -> bool:
    """True for edges on a GPU as samplers leave them, which are grouped in less time there."""
    if len(dst) < _LEAST_ASCENDING:
        return False
    some = dst[:: len(dst) // _LOOKED_AT + 1].tolist()
    return bool(some == sorted(some))


class _Views:
    """How often DGL may have given out views of its formats, by which they can be edited."""

    given_out = 0


_VIEWS = _Views()

_READ_TENSORS = HeteroGraphIndex.adjacency_matrix_tensors


_NAME = "_fastgraph_source"
"""The attribute of an index object that has its source. DGL copies and pickles none."""


def _source_of(gidx: Any) -> _Source:
    source: _Source | None = vars(gidx).get(_NAME)
    return _join(gidx, _Source()) if source is None else source


def _join(gidx: Any, source: _Source) -> _Source:
    source.latest = weakref.ref(gidx)
    vars(gidx)[_NAME] = source
    return source


FOREIGN: dict[type, Callable[[Any], Structure | Refusal]] = {}
"""Functions that give the edges of index objects that are not DGL's own, by their class."""


def structure_of(gidx: Any) -> Structure | Refusal:
    """The edges of an index object with one relation, or the reason why they cannot be taken."""
    if type(gidx) in FOREIGN:
        return FOREIGN[type(gidx)](gidx)
    found = _source_of(gidx).structure(gidx)
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
        found = source.structure(gidx)
    assert found is not None  # it is alive
    return found if isinstance(found, Refusal) else (found, False)


def install(patches: Patches) -> None:
    """Have index objects that DGL makes of others remember where they come from."""
    relation, reverse = HeteroGraphIndex.get_relation_graph, HeteroGraphIndex.reverse
    _VIEWS.given_out += 1  # while nobody counted

    @functools.wraps(relation)
    def get_relation_graph(self: Any, etype: int) -> Any:
        if type(etype) is int and etype == 0 and is_single(self):
            return self  # in less time than DGL makes another, over the same edges
        found, source = relation(self, etype), _source_of(self)
        set_single(found)
        if self.number_of_etypes() > 1:
            number, relations = int(etype), source.relations
            source = relations.get(number) or relations.setdefault(number, _Source())
        _join(found, source)
        return found

    @functools.wraps(reverse)
    def reversed_index(self: Any) -> Any:
        found = reverse(self)
        if has_size_of(found, self):
            return found  # nobody will ask where it comes from
        source = _source_of(self)
        _join(found, source.reversed or _Source(source))
        return found

    patches.replace(HeteroGraphIndex, "get_relation_graph", get_relation_graph)
    patches.replace(HeteroGraphIndex, "reverse", reversed_index)
    for name in ("adjacency_matrix", "adjacency_matrix_tensors"):
        found = getattr(HeteroGraphIndex, name)
        patches.replace(HeteroGraphIndex, name, _giving_out(found))


def _giving_out(method: Callable[..., Value]) -> Callable[..., Value]:
    @functools.wraps(method)
    def counted(*arguments: Any, **others: Any) -> Value:
        _VIEWS.given_out += 1
        return method(*arguments, **others)

    return counted
