"""The edges that lead to the nodes of this rank, as a graph of its own for the operators.

Its destinations are the local rows, its sources the local rows followed by the halo. So an operator
does for its rows what it would do for all nodes, once features are there of the sources.
"""

from __future__ import annotations

import functools
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fastgraph.dist import transport
from fastgraph.dist.collectives import with_halo
from fastgraph.dist.exchange import Plan
from fastgraph.dist.layout import Layout, Recent
from fastgraph.dist.memo import remembered
from fastgraph.dist.owners import layout_of
from fastgraph.dist.sharded import ShardedTensor, aligned, enter, is_sharded
from fastgraph.dist.table import NoRuleError
from fastgraph.dist.world import WORLD
from fastgraph.graphs.edges import Edges, named
from fastgraph.graphs.graph import Graph
from fastgraph.graphs.normalisation import WeightedGraph, normalised_graph

_OUTSIDE = "edge_index points outside the nodes, on this rank or on another one"


class _Ends(NamedTuple):
    """Edges by the global numbers of their nodes.

    Attributes:
        pair: int64 ``[2, edges]``, sources and destinations, of which the latter are local.
        rows: which edges these are.
    """

    pair: Tensor
    rows: Layout


class Neighbourhoods:
    """The edges to the nodes of this rank, and the rows of other ranks that they start from.

    Args:
        ends: the edges.
        sources: who holds the rows of the nodes that edges start from.
        destinations: who holds those that edges lead to.
        self_loops: replace the self-loops by one for each of the first so many nodes.
    """

    def __init__(self, ends: _Ends, sources: Layout, destinations: Layout, self_loops: int) -> None:
        pair, self._rows = ends
        self._key, self._bound = self._rows.key, self._rows.bound
        if self_loops:
            kept = (pair[0] != pair[1]).nonzero().view(-1)
            loops = destinations.position[destinations.position < self_loops]
            pair = torch.cat([pair[:, kept], loops.expand(2, -1)], 1)
            self._key = torch.cat([self._key[kept], loops + self._bound])
            self._bound += self_loops
        self.sources, self.destinations = sources, destinations
        self.plan = Plan(pair[0], sources)
        self._index = torch.stack([self.plan.place, destinations.held(pair[1]).row]).int()
        num_src = sources.mine + len(self.plan.halo)
        self._graph = Graph(self._index, num_src, destinations.mine)
        self._derived = Recent()

    @cached_property
    def edges(self) -> Layout:
        """Which edges of all ranks these are; self-loops that were added follow all others."""
        if self._key is self._rows.key:
            return self._rows
        return Layout(self._key, self._bound)

    def edges_of(self, *, numbered: bool) -> Edges:
        """The local graph, as operators take it.

        Args:
            numbered: whether something is given or returned for each edge.
        """
        make = functools.partial(named, self._graph, numbered=numbered)
        edges: Edges = self._derived.get(("edges", numbered), make)[0]
        return edges

    def of_sources(self, x: Tensor) -> Tensor:
        """The local rows and the halo of a tensor with a row for each source."""
        if is_sharded(x):
            return with_halo(aligned(x, self.sources, 0), self.plan)
        make = lambda: torch.cat([self.sources.position, self.plan.halo])  # noqa: E731
        everywhere: Tensor = enter(x)
        return everywhere.index_select(0, self._derived.get("sources", make))

    def of_destinations(self, x: Tensor | None) -> Tensor | None:
        """The local rows of a tensor with a row for each destination, or one for all of them."""
        return None if x is None else local_rows(x, self.destinations)

    def of_edges(self, x: Tensor | None) -> Tensor | None:
        """The values of the local edges."""
        return None if x is None else local_rows(x, self.edges)

    def normalised(
        self, weight: Tensor | None, loop_weight: float, dtype: torch.dtype
    ) -> WeightedGraph:
        """The graph of GCN, see :func:`fastgraph.ops.gcn`, remembered with this one and the weight.

        The degrees of the halo are exchanged for it.
        """

        def make() -> WeightedGraph:
            return normalised_graph(
                self._index,
                self.of_edges(weight),
                self.destinations.mine,
                loop_weight,
                False,
                dtype,
                num_others=len(self.plan.halo),
                with_others=lambda scale: with_halo(scale, self.plan),
            )

        if weight is None:
            found: WeightedGraph = self._derived.get(("normalised", loop_weight, dtype), make)
            return found
        local = weight.local if isinstance(weight, ShardedTensor) else weight
        found = remembered(local, ("normalised", self, loop_weight, dtype), make)
        return found


def local_rows(x: Tensor, rows: Layout) -> Tensor:
    """The local rows of a tensor that has as many as a layout, or a single one for all of them."""
    if not is_sharded(x) and x.shape[0] not in (1, rows.n):
        raise NoRuleError
    local: Tensor = aligned(x, rows, 0)
    # A single row of all there are is held by one rank.
    if not is_sharded(x) and rows.n == 1 and not rows.mine:
        local = local[:0]
    return local


def local_edges(index: Tensor) -> tuple[Tensor, Layout | None]:
    """The edges of an ``edge_index`` on this rank, and who holds which; ``None`` if all have all.

    Raises:
        NoRuleError: it is sharded in another way, or of another shape.
    """
    if index.dim() != 2 or index.shape[0] != 2:
        raise NoRuleError
    if not isinstance(index, ShardedTensor):
        return index, None
    if index.axis != 1:
        raise NoRuleError
    return index.local, index.rows


def neighbourhoods(
    index: Tensor,
    sources: Layout,
    destinations: Layout,
    *,
    transpose: bool = False,
    self_loops: int = 0,
) -> Neighbourhoods:
    """The edges to the nodes of this rank, remembered with ``edge_index``.

    Edges that are held by another rank than their destination move there, once.

    Args:
        index: ``edge_index``, whose edges are sharded or replicated.
        sources: the layout of the nodes whose rows are gathered.
        destinations: that of the nodes which aggregate them.
        transpose: whether edges are taken the other way round.
        self_loops: replace the self-loops by one for each of the first so many nodes.

    Raises:
        IndexError: on all ranks, if ``index`` points outside the nodes.
        NoRuleError: ``index`` is sharded in another way.
    """
    local, rows = local_edges(index)

    def make() -> Neighbourhoods:
        pair = (local.flip(0) if transpose else local).long()
        sizes = torch.tensor([[sources.n], [destinations.n]])
        outside = bool(((pair < 0) | (pair >= sizes)).any())
        ends = _moved(pair, rows, destinations, outside)
        return Neighbourhoods(ends, sources, destinations, self_loops)

    key = ("neighbourhoods", rows, sources, destinations, transpose, self_loops)
    found: Neighbourhoods = remembered(local, key, make)
    return found


def _moved(pair: Tensor, rows: Layout | None, destinations: Layout, outside: bool) -> _Ends:
    """Edges where their destinations are."""
    if rows is None:
        if outside:
            raise IndexError(_OUTSIDE)
        found = layout_of(destinations.held(pair[1]).owner)
        return _Ends(pair[:, found.key], found)
    # Which ranks ask for together.
    owner = destinations.held(pair[1] if not outside else pair[1, :0]).owner
    far = int((owner != WORLD.rank).sum())
    # An index out of range must be an error everywhere: the others would wait for this rank.
    any_outside, any_far = transport.all_reduce(torch.tensor([int(outside), far])).tolist()
    if any_outside:
        raise IndexError(_OUTSIDE)
    if not any_far:
        return _Ends(pair, rows)
    order = owner.argsort(stable=True)
    sends = torch.bincount(owner, minlength=WORLD.size)
    table = transport.all_gather(sends[None], [1] * WORLD.size)
    receives = table[:, WORLD.rank].tolist()
    sent = torch.cat([rows.position[None], pair])[:, order].t()
    position, src, dst = transport.all_to_all(sent, sends.tolist(), receives).unbind(1)
    position, order = position.sort()
    moved = Layout(position, rows.n, table.sum(0).tolist())
    return _Ends(torch.stack([src, dst])[:, order], moved)
