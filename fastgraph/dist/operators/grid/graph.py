"""A block of the adjacency matrix, as a graph for operators, and the rows that it needs of others.

Its sources are the nodes of the ranks of this rank's column of the grid, its destinations those of
its row, one rank after the other, see :mod:`fastgraph.dist.operators.grid.exchange`. An operator
gives a partial result for the destinations, whose parts are reduced where the nodes are.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fastgraph.dist.operators.grid.exchange import (
    Groups,
    counts,
    from_owners,
    places,
    replicated,
    to_owners,
)
from fastgraph.dist.operators.rank_graph import (
    Ends,
    RankGraph,
    local_edges,
    local_rows,
    placed_edges,
)
from fastgraph.dist.ranks.counts import COUNTS
from fastgraph.dist.ranks.mesh import holder
from fastgraph.dist.ranks.own_device import HOST
from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.tensor.layout import Layout
from fastgraph.dist.tensor.memo import cached, made
from fastgraph.graphs.graph import Graph
from fastgraph.plugins.backend import accumulator


class _Loops(NamedTuple):
    """The edges of a block after its self-loops were replaced.

    Attributes:
        kept: bool, the edges that were given and are none.
        count: how many there are now.
        replaced: int64, which of these stand for those that were given.
    """

    kept: Tensor
    count: int  # type: ignore[assignment]  # shadows tuple.count
    replaced: Tensor

    @classmethod
    def of(cls, pair: Tensor, nodes: Tensor) -> _Loops:
        """The self-loops of nodes in ascending order, instead of those among edges."""
        is_loop = pair[0] == pair[1]
        return cls(~is_loop, len(nodes), torch.searchsorted(nodes, pair[0, is_loop]))


class Block(RankGraph):
    """The edges from the nodes of a column to those of a row.

    Args:
        ends: the edges.
        groups: the row and the column of ranks that these nodes are of.
        sources: who holds the nodes that edges start from.
        destinations: who holds those that edges lead to.
        self_loops: replace the self-loops by one for each of the first so many nodes.
        device: that operators compute on.

    Attributes:
        groups, sources, destinations: as given.
        num_destinations: how many nodes the row has.
    """

    def __init__(
        self,
        ends: Ends,
        groups: Groups,
        sources: Layout,
        destinations: Layout,
        self_loops: int,
        device: torch.device,
    ) -> None:
        self.groups, self.sources, self.destinations = groups, sources, destinations
        self._loops = None
        self._given = ends.rows or Layout(ends.key, ends.bound)
        if self_loops:
            nodes = torch.arange(self_loops, device=HOST)
            ends_of = sources.held(nodes).owner, destinations.held(nodes).owner
            own = holder(*ends_of, groups.mesh) == WORLD.rank
            self._loops = _Loops.of(ends.pair, nodes[own])
            ends = ends.with_loops(nodes[own], self_loops)
        num_src = sum(counts(sources, groups.column))
        self.num_destinations = sum(counts(destinations, groups.row))
        src = places(ends.pair[0], sources, groups.column)
        dst = places(ends.pair[1], destinations, groups.row)
        index = torch.stack([src, dst]).int()
        super().__init__(ends, Graph(index.to(device), num_src, self.num_destinations))
        COUNTS.plans += 1

    def of_sources(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Rows of all sources of tensors with a row for each source, in one collective."""
        return self.from_sources([local_rows(x, self.sources) for x in tensors])

    def of_destinations(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The same for destinations."""
        return self.from_destinations([local_rows(x, self.destinations) for x in tensors])

    def from_sources(self, local: Sequence[Tensor]) -> list[Tensor]:
        """Rows of all sources, of the local rows that each rank of the column has."""
        return replicated(local, self.sources, self.groups.column)

    def from_destinations(self, local: Sequence[Tensor]) -> list[Tensor]:
        """The same for destinations, of the ranks of the row."""
        return replicated(local, self.destinations, self.groups.row)

    def parts(self, partial: Sequence[Tensor]) -> list[Tensor]:
        """The partial results of the blocks of this row for the nodes of this rank.

        Args:
            partial: ``[num_destinations, ...]`` each.

        Returns:
            ``[blocks of the row, mine, ...]`` each, in one collective.
        """
        return to_owners(partial, self.destinations, self.groups.row)

    def of_parts(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The transpose of :meth:`parts`."""
        return from_owners(parts, self.destinations, self.groups.row)

    def summed(self, partial: Tensor) -> Tensor:
        """The sums of the blocks of this row for the nodes of this rank, ``[mine, ...]``."""
        (parts,) = self.parts([partial])
        return parts[0] if len(parts) == 1 else parts.sum(0)

    @cached_property
    def degrees(self) -> Tensor:
        """int64 ``[blocks of the row, mine]``: how many edges each has for the own nodes."""

        def make() -> Tensor:
            (found,) = self.parts([self.local.by_destination.ptr.diff()])
            return found

        return made(make)

    def normalised(self, weight: Tensor | None, loop_weight: float, dtype: torch.dtype) -> Tensor:
        """The weights of GCN, see :func:`fastgraph.ops.gcn`, in the order of destinations.

        Remembered with this block, which has the self-loops of all nodes unless ``loop_weight`` is
        0, and with the weight.

        Args:
            weight: of the edges that were given, sharded.
            loop_weight: of the self-loops of nodes that have none.
            dtype: of the result.
        """
        make = functools.partial(self._made_normalised, weight, loop_weight, dtype)
        found: Tensor = self.with_weight(weight, ("normalised", loop_weight, dtype), make)
        return found

    def _made_normalised(
        self, weight: Tensor | None, loop_weight: float, dtype: torch.dtype
    ) -> Tensor:
        wide = accumulator(dtype)
        if weight is None:
            device = self.local.by_destination.ptr.device
            values = torch.ones(self._given.mine, dtype=wide, device=device)
        else:
            values = local_rows(weight.detach(), self._given).to(wide)
        if self._loops is not None:
            # A node's loop takes the weight of its last one among the edges, if there is one.
            kept = self._loops.kept.to(values.device)
            loops = values.new_full((self._loops.count,), loop_weight)
            loops[self._loops.replaced.to(values.device)] = values[~kept]
            values = torch.cat([values[kept], loops])
        src, dst = self.local.edge_list()
        partial = values.new_zeros(self.num_destinations).index_add_(0, dst, values)
        scale = self.summed(partial).pow_(-0.5)
        scale.masked_fill_(scale == torch.inf, 0)
        (of_sources,) = replicated([scale], self.sources, self.groups.column)
        (of_destinations,) = replicated([scale], self.destinations, self.groups.row)
        # In this order: the product of two scales may be infinite where weights are tiny.
        found = (of_sources[src] * values * of_destinations[dst]).to(dtype)
        order = self.local.by_destination.edge_id
        return found if order is None else found[order.long()]


def block(
    groups: Groups,
    index: Tensor,
    sources: Layout,
    destinations: Layout,
    transpose: bool = False,
    self_loops: int = 0,
) -> Block:
    """The block of this rank, cached with ``edge_index``.

    Edges that are held by another rank move there, once.

    Args:
        groups: the row and the column of this rank in the grid.
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

    def of_pair(pair: Tensor) -> Tensor:
        return holder(sources.held(pair[0]).owner, destinations.held(pair[1]).owner, groups.mesh)

    def make() -> Block:
        ends = placed_edges(local, rows, (sources.n, destinations.n), transpose, of_pair)
        return Block(ends, groups, sources, destinations, self_loops, local.device)

    key = ("block", groups, rows, sources, destinations, transpose, self_loops)
    found: Block = cached(local, key, make, is_part=rows is not None)
    return found
