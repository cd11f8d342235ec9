"""Facts of DGL's index objects, whose library is asked for them once instead of at each call.

An index object never changes: an edit of a DGL graph replaces it by another.
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from typing import Any

import torch
from dgl.heterograph import DGLBlock, DGLGraph
from dgl.heterograph_index import HeteroGraphIndex

from fastgraph.plugins.patching import Patches
from fastgraph.settings import current

_RELATION = HeteroGraphIndex.get_relation_graph

GRAPHS = (DGLGraph, DGLBlock)
"""The classes of DGL's own graphs, of which nothing is overridden."""

FEWEST = 5_000
"""The fewest edges from which on anything of message passing gains, by whatever operator."""

_EDGES, _SINGLE, _SIZE = "_fastgraph_edges", "_fastgraph_single", "_fastgraph_size"
"""The attributes that have these facts. DGL copies and pickles none.

The last is the number of edges of one relation on the CPU, of others more than any number.
"""

_CPU = 1
"""DGL's number of the kind of devices."""

_MAY_BE_ON_GPU = torch.backends.cuda.is_built()
"""False where features could not be beside such a graph."""

_ALL_NODES: dict[int, tuple[tuple[int, int], ...]] = defaultdict(
    tuple, {1: ((0, 0),), 2: ((0, 1),)}
)
"""The kinds of nodes at the ends of a relation that has all that there are, by their number."""


def install(patches: Patches) -> None:
    """Have a graph give its only relation at once.

    ``update_all`` and ``apply_edges`` take the relation that they are called for.
    """
    upstream = DGLGraph.__getitem__

    @functools.wraps(upstream)
    def relation(self: Any, key: Any) -> Any:
        if type(key) is not tuple or type(self) not in GRAPHS or [key] != self._canonical_etypes:
            return upstream(self, key)
        if _SIZE not in self._graph.__dict__:
            _note_facts(self)
        if not is_single(self._graph):
            return upstream(self, key)
        source, name, destination = key
        nodes, edges = [*self._node_frames], [*self._edge_frames]
        # Both kinds of a block have the same name.
        kinds = [source] if len(nodes) == 1 else ([source], [destination])
        return type(self)(self._graph, kinds, [name], nodes, edges)

    patches.replace(DGLGraph, "__getitem__", relation)


def num_edges_of(gidx: Any) -> int:
    """The number of edges of an index object of DGL's own with one relation."""
    found: int | None = gidx.__dict__.get(_EDGES)
    if found is None:
        found = gidx.__dict__[_EDGES] = int(gidx.number_of_edges(0))
    return found


def num_edges_on_cpu(gidx: Any) -> int | None:
    """The same of a graph on the CPU; ``None`` for others.

    Args:
        gidx: of DGL's own, with one relation.
    """
    size = gidx.__dict__.get(_SIZE)
    if size is None:
        size = gidx.__dict__[_SIZE] = _size_of(gidx)
    return None if size == sys.maxsize else int(size)


def is_single(gidx: Any) -> bool:
    """True if an index object has one relation, and no kind of nodes beside its own.

    It is that relation's own index object then.
    """
    found: bool | None = gidx.__dict__.get(_SINGLE)
    if found is None:
        meta = gidx.metagraph
        kinds = meta.num_nodes()
        found = meta.num_edges() == 1 and tuple(meta.find_edge(0)) in _ALL_NODES[kinds]
        # Nodes or edges that were added to a block of DGL's own leave its relation one kind.
        if found and kinds == 2 and type(gidx) is HeteroGraphIndex:
            found = _RELATION(gidx, 0).number_of_ntypes() == kinds
        gidx.__dict__[_SINGLE] = found
    return found


def set_single(gidx: Any) -> None:
    """Have :func:`is_single` be true of an index object that DGL has made of one relation."""
    gidx.__dict__[_SINGLE] = True


def has_size_of(gidx: Any, other: Any) -> bool:
    """Note that one index object has as many edges as another; true if these are too few for all.

    Args:
        gidx: a new one, such as the reverse of the other.
        other: of which the size may be known.
    """
    size = other.__dict__.get(_SIZE)
    if size is None:
        return False
    gidx.__dict__[_SIZE] = size
    return size < FEWEST and current().min_edges is None


def is_below(gidx: Any, bound: int) -> bool:
    """True for a graph of DGL on the CPU with fewer edges, of one relation.

    It answers most of what :func:`fastgraph.dgl.sizes.is_too_small` is asked. Where DGL's code
    takes 100 us it must be one look at what is kept: memory that is touched between two calls costs
    more than the work. Never where the setting ``min_edges`` says what is too small.

    Args:
        gidx: DGL's index object, or anything else.
        bound: the number of edges from which on an operator may gain.
    """
    if type(gidx) is not HeteroGraphIndex:
        return False
    size = gidx.__dict__.get(_SIZE)
    if size is None:
        size = gidx.__dict__[_SIZE] = _size_of(gidx)
    return size < bound and current().min_edges is None


def _size_of(gidx: Any) -> int:
    if gidx.ctx.device_type != _CPU or not (is_single(gidx) or gidx.number_of_etypes() == 1):
        return sys.maxsize
    return num_edges_of(gidx)


def is_graph_below(graph: Any, bound: int) -> bool:
    """:func:`is_below` of the index object of a graph.

    Args:
        graph: one of DGL's own (:data:`GRAPHS`), whose frames tell the facts of an index object in
            a tenth of the time that DGL's library takes.
        bound: as there.
    """
    gidx = graph._graph
    if _SIZE not in gidx.__dict__:
        _note_facts(graph)
    return is_below(gidx, bound)


def is_tiny_graph(graph: Any) -> bool:
    """True if no message passing on a graph gains, whatever it computes.

    A layer on ten nodes asks some times, so that what is known is looked at without a detour.
    """
    if type(graph) not in GRAPHS:
        return False
    size = graph._graph.__dict__.get(_SIZE)
    if size is None:
        return is_graph_below(graph, FEWEST)
    return size < FEWEST and current().min_edges is None


def _note_facts(graph: Any) -> None:
    """Keep the facts of an index object, where its graph has one kind of nodes and of edges."""
    gidx, frames = graph._graph, graph._edge_frames
    if type(gidx) is not HeteroGraphIndex or len(frames) != 1 or len(graph._node_frames) != 1:
        return
    facts = gidx.__dict__
    facts[_SINGLE], facts[_EDGES] = True, frames[0].num_rows
    if not _MAY_BE_ON_GPU:
        facts[_SIZE] = frames[0].num_rows
