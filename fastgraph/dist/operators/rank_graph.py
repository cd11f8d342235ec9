"""The base of the local graphs of all modes: the edges that a rank computes with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.own_device import HOST
from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.tensor.digests import DIGESTS
from fastgraph.dist.tensor.layout import Layout, layout_of
from fastgraph.dist.tensor.memo import Recent, Value, cached, on_host
from fastgraph.dist.tensor.sharded import ShardedTensor, aligned, is_sharded
from fastgraph.dist.tensor.table import NoRuleError
from fastgraph.graphs.edges import Edges, named
from fastgraph.graphs.graph import Graph

_OUTSIDE = "edge_index points outside the nodes, on this rank or on another one"


class Ends(NamedTuple):
    """Edges by the global numbers of their nodes, on the host.

    Attributes:
        pair: int64 ``[2, edges]``, sources and destinations.
        key, bound: which edges these are, as those of a :class:`Layout`.
        rows: that layout, if there is one yet: making it needs all ranks.
    """

    pair: Tensor
    key: Tensor
    bound: int
    rows: Layout | None

    @classmethod
    def of(cls, pair: Tensor, rows: Layout) -> Ends:
        """The edges of a layout."""
        return cls(pair, rows.key, rows.bound, rows)

    def with_loops(self, nodes: Tensor, self_loops: int) -> Ends:
        """The same, with self-loops replaced by one for each of the first so many nodes.

        Args:
            nodes: int64, those of them whose self-loops this rank gets.
            self_loops: how many there are on all ranks; 0 leaves edges as they are.
        """
        if not self_loops:
            return self
        kept = (self.pair[0] != self.pair[1]).nonzero().view(-1)
        pair = torch.cat([self.pair[:, kept], nodes.expand(2, -1)], 1)
        key = torch.cat([self.key[kept], nodes + self.bound])
        return Ends(pair, key, self.bound + self_loops, None)


class RankGraph:
    """Edges of this rank.

    Args:
        ends: the edges.
        local: the same by the local numbers of their nodes.

    Attributes:
        local: as given.
    """

    def __init__(self, ends: Ends, local: Graph) -> None:
        self._rows, self._key, self._bound = ends.rows, ends.key, ends.bound
        self.local = local
        self._derived = Recent()

    @cached_property
    def edges(self) -> Layout:
        """The layout of these edges among those of all ranks; added self-loops come last."""
        return self._rows or Layout(self._key, self._bound)

    def edges_of(self, *, numbered: bool) -> Edges:
        """The local graph, as operators take it.

        Args:
            numbered: whether something is given or returned for each edge.
        """
        make = functools.partial(named, self.local, numbered=numbered)
        return self._derived.get(("edges", numbered), make)[0]

    def of_edges(self, x: Tensor | None) -> Tensor | None:
        """The values of the local edges."""
        return None if x is None else local_rows(x, self.edges)

    def with_weight(
        self, weight: Tensor | None, key: tuple[Hashable, ...], make: Callable[[], Value]
    ) -> Value:
        """The value of ``make()``, cached for this graph and these weights of edges."""
        if weight is None:
            return self._derived.get(key, make)
        if isinstance(weight, ShardedTensor):
            return cached(weight.local, (*key, self), make, is_part=True)
        return cached(weight, (*key, self), make)


def part_of(x: Tensor) -> Tensor:
    """The local rows of a sharded tensor, to inspect without rules; else the value itself."""
    return x.local if isinstance(x, ShardedTensor) else x


def local_rows(x: Tensor, rows: Layout) -> Tensor:
    """The local rows of a tensor that has as many as a layout, or a single one for all of them."""
    if not is_sharded(x) and x.shape[0] not in (1, rows.n):
        raise NoRuleError
    local = aligned(x, rows, 0)
    # A single row of all there are is held by one rank.
    if not is_sharded(x) and rows.n == 1 and not rows.mine:
        local = local[:0]
    return local


def local_edges(index: Tensor) -> tuple[Tensor, Layout | None]:
    """The edges of an ``edge_index`` on this rank, and who holds which; ``None`` if all have all.

    Raises:
        NoRuleError: it is sharded in another way, or of another shape.
    """
    local = part_of(index)
    if local.dim() != 2 or local.shape[0] != 2:
        raise NoRuleError
    if not isinstance(index, ShardedTensor):
        DIGESTS.compare(index)
        return index, None
    if index.axis != 1:
        raise NoRuleError
    return local, index.rows


def placed_edges(
    local: Tensor,
    rows: Layout | None,
    sizes: tuple[int, int],
    transpose: bool,
    holder: Callable[[Tensor], Tensor],
) -> Ends:
    """Edges where they are computed with; those that are elsewhere move there.

    Args:
        local: the edges on this rank, ``[2, edges]``.
        rows: which these are; ``None`` if all ranks have all.
        sizes: how many sources and destinations there are.
        transpose: whether edges are taken the other way round.
        holder: the rank for each edge, given a ``pair``; all ranks call it together.

    Raises:
        IndexError: on all ranks, if an edge is outside the nodes.
    """
    pair = on_host(local.flip(0) if transpose else local).long()
    outside = bool(((pair < 0) | (pair >= torch.tensor(sizes, device=HOST)[:, None])).any())
    if rows is None:
        if outside:
            raise IndexError(_OUTSIDE)
        found = layout_of(holder(pair))
        return Ends.of(pair[:, found.key], found)
    owner = holder(pair[:, :0] if outside else pair)
    far = int((owner != WORLD.rank).sum())
    # An index out of range must be an error everywhere: the others would wait for this rank.
    any_outside, any_far = transport.all_reduce(
        torch.tensor([int(outside), far], device=HOST)
    ).tolist()
    if any_outside:
        raise IndexError(_OUTSIDE)
    if not any_far:
        return Ends.of(pair, rows)
    order = owner.argsort(stable=True)
    sends = torch.bincount(owner, minlength=WORLD.size)
    table = transport.all_gather(sends[None], [1] * WORLD.size)
    receives = table[:, WORLD.rank].tolist()
    sent = torch.cat([rows.position[None], pair])[:, order].t()
    position, src, dst = transport.all_to_all(sent, sends.tolist(), receives).unbind(1)
    position, order = position.sort()
    moved = Layout(position, rows.n, table.sum(0).tolist())
    return Ends.of(torch.stack([src, dst])[:, order], moved)
