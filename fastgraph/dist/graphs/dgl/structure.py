"""The edges of one relation as sharded tensors, as the routes of DGL take them.

Operators get an ``edge_index`` of sharded edges, and do the rest by their rules
(:mod:`fastgraph.dist.operators.rules`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from fastgraph.dgl.devices import copied
from fastgraph.dgl.edge_gat_conv import from_edges
from fastgraph.dgl.normalisation import edge_weights, with_itself
from fastgraph.dgl.relations import Pairs, find_pairs, projected
from fastgraph.dgl.structure import Structure
from fastgraph.dist.ranks.own_device import HOST
from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.tensor.layout import Layout, usual
from fastgraph.dist.tensor.memo import made
from fastgraph.dist.tensor.sharded import ShardedTensor, aligned, as_sharded, enter, placed
from fastgraph.graphs.edges import Edges
from fastgraph.graphs.memo import remembered
from fastgraph.plugins.backend import accumulator
from fastgraph.plugins.refusal import Refusal
from fastgraph.routing.conditions import operand

Value = TypeVar("Value")


class _Named(NamedTuple):
    """Edges as operators take them."""

    edges: Edges


class _Relation(NamedTuple):
    """All edges of a structure as operators take them."""

    edges: Edges
    structure: ShardedStructure

    @property
    def lonely(self) -> Tensor | None:
        """The zero in-degree destinations, bool ``[num_dst]``; ``None`` where there are none."""
        return self.structure.lonely


class _once(cached_property[Value]):  # noqa: N801  # a decorator
    """A property that is computed once, and serves training wherever that is."""

    def __init__(self, compute: Callable[[ShardedStructure], Value]) -> None:
        super().__init__(lambda structure: made(lambda: compute(structure)))


class ShardedStructure(Structure):
    """The edges of one relation, in the order of their numbers, wherever they are.

    Attributes:
        edge_index: int32 or int64 ``[2, E]``, sharded along its edges.
        num_src: number of source nodes.
        num_dst: number of destination nodes.
    """

    ptr: Tensor  # is never set: what is made of groups is made of edges here

    def __init__(self, edge_index: ShardedTensor, num_src: int, num_dst: int) -> None:
        self.edge_index = edge_index
        self.edge_ids = None
        self.num_src, self.num_dst = num_src, num_dst

    @_once
    def index(self) -> Tensor:
        """The source of each edge, ``[E]``."""
        return self.edge_index[0]

    @_once
    def destination(self) -> Tensor:
        """The destination of each edge, ``[E]``."""
        return self.edge_index[1]

    @_once
    def source_rows(self) -> Tensor:
        """The source of each edge, int64 ``[E]``, with which plans are cached."""
        return self.index.long()

    @_once
    def destination_rows(self) -> Tensor:
        """The destination of each edge, int64 ``[E]``, with which plans are cached."""
        return self.destination.long()

    @_once
    def number(self) -> ShardedTensor:
        """The number of each edge, ``[E]``."""
        rows = self.edge_index.rows
        position = rows.position_on(self.edge_index.local.device)
        return ShardedTensor(position.to(self.edge_index.dtype), rows, 0)

    @_once
    def reversed(self) -> ShardedStructure:
        """The same edges the other way round."""
        found = ShardedStructure(_stacked(self.destination, self.index), self.num_dst, self.num_src)
        found.reversed = self
        return found

    def on(self, device: torch.device) -> ShardedStructure:
        """The same edges on a device, where they are copied to once."""
        edges, sizes = self.edge_index, (self.num_src, self.num_dst)
        if edges.device == device:
            return self
        move = lambda: ShardedStructure(as_sharded(edges.to(device)), *sizes)  # noqa: E731
        return edges.cached(("structure on", device, *sizes), move)

    def refusal(self, name: str, value: object) -> Refusal | None:
        """Why a tensor cannot be handed to an operator together with these edges."""
        return operand(name, value)

    def degrees(self) -> Tensor:
        """The in-degree of each destination, ``[num_dst]``, of the dtype of edges."""
        return self.in_degrees

    def receivers(self) -> Tensor:
        """The destinations that have edges, int64, with which plans are cached."""
        return self._receivers

    def plain(self) -> _Relation:
        """The edges: numbers cost nothing."""
        return self.numbered()

    def numbered(self) -> _Relation:
        """The edges."""
        return _Relation(Edges(self.edge_index), self)

    def backwards(self) -> _Relation:
        """The edges from the last to the first."""
        return _Relation(self._backwards, self)

    @_once
    def _backwards(self) -> Edges:
        return Edges(_from_the_last(self.edge_index))

    def incidence(self, *, transpose: bool = False, backwards: bool = False) -> _Relation:
        """With edges in the place of their sources, see :class:`Structure`."""
        if transpose:
            return self.reversed.incidence(backwards=backwards)
        return _Relation(self._incidence_backwards if backwards else self._incidence, self)

    @_once
    def _incidence(self) -> Edges:
        return Edges(_stacked(self.number, self.destination))

    @_once
    def _incidence_backwards(self) -> Edges:
        return Edges(_from_the_last(as_sharded(self._incidence.index)))

    @_once
    def lonely(self) -> Tensor | None:
        """The zero in-degree destinations, bool ``[num_dst]``; ``None`` where there are none."""
        is_lonely = self.in_degrees == 0
        return is_lonely if bool(is_lonely.any()) else None

    @_once
    def _receivers(self) -> Tensor:
        (rows,) = (self.in_degrees != 0).nonzero(as_tuple=True)
        return rows

    @_once
    def in_degrees(self) -> Tensor:
        """The in-degree of each destination, ``[num_dst]``, of the dtype of edges."""
        ones = torch.ones_like(self.destination)
        zeros = torch.zeros(self.num_dst, dtype=ones.dtype, device=ones.device)
        return placed(zeros, usual(self.num_dst), 0).index_add(0, self.destination_rows, ones)


def _stacked(sources: Tensor, destinations: Tensor) -> ShardedTensor:
    return as_sharded(torch.stack([sources, destinations]))


def _from_the_last(index: ShardedTensor) -> ShardedTensor:
    """Columns in the opposite order, on the ranks on which they are."""
    rows = index.rows
    opposite = Layout((rows.bound - 1 - rows.key).flip(0), rows.bound, rows.counts)
    return ShardedTensor(index.local.flip(1), opposite, 1)


@copied.register
def _(structure: ShardedStructure, device: torch.device) -> ShardedStructure:
    return structure.on(device)


@edge_weights.register
def _(relation: _Relation, norm: str, dtype: torch.dtype) -> Tensor:
    structure = relation.structure
    make = lambda: _by_degree(structure, norm, dtype)  # noqa: E731
    return structure.edge_index.cached(("by degree", norm, dtype), make)


def _by_degree(structure: ShardedStructure, norm: str, dtype: torch.dtype) -> Tensor:
    wide = accumulator(dtype)
    of_source = structure.reversed.in_degrees.to(wide)[structure.index]
    if norm == "left":
        return of_source.reciprocal().to(dtype)
    of_destination = structure.in_degrees.to(wide)[structure.destination]
    return (of_source.rsqrt() * of_destination.rsqrt()).to(dtype)


@with_itself.register
def _(structure: ShardedStructure) -> _Named:
    edges, num_dst = structure.edge_index, structure.num_dst
    make = lambda: _followed_by_loops(edges, num_dst)  # noqa: E731
    return _Named(Edges(edges.cached(("with itself", num_dst), make)))


def _followed_by_loops(edge_index: Tensor, num_dst: int) -> Tensor:
    numbers = torch.arange(num_dst, dtype=edge_index.dtype, device=edge_index.device)
    loops = numbers.expand(2, -1)
    return torch.cat([edge_index, loops], 1)


@from_edges.register
def _(structure: ShardedStructure) -> _Relation:
    return structure.incidence()


class ShardedPairs(Pairs):
    """Pairs of a source and a relation that occur among the edges of this rank.

    Others may have some of them, too. Each rank numbers its own, after those of the ranks before.
    """

    def __init__(self, edge_index: ShardedTensor, etype: Tensor, num_rels: int) -> None:
        src, dst = edge_index.local.long()
        rows = edge_index.rows
        num_src = 1 + (int(edge_index[0].amax()) if rows.n else 0)
        relation = aligned(etype, rows, 0).long()
        keys, pair = torch.unique(relation * num_src + src, return_inverse=True)
        # A rank has no more pairs than there are edges.
        laid = Layout(
            torch.arange(len(keys), device=HOST) + WORLD.rank * rows.n, WORLD.size * rows.n
        )
        number = laid.position_on(pair.device)[pair]
        self._source = ShardedTensor(keys % num_src, laid, 0)
        self._sizes = torch.bincount(keys // num_src, minlength=num_rels).tolist()
        self.grouped = _Named(Edges(ShardedTensor(torch.stack([number, dst]), rows, 1)))
        self.nbytes = 0

    def project(self, x: Tensor, weight: Tensor) -> Tensor:
        """See :class:`Pairs`."""
        rows = as_sharded(x.index_select(0, self._source))
        local = projected(rows.local, enter(weight), self._sizes)
        return ShardedTensor(local, rows.rows, 0)


@find_pairs.register
def _(structure: ShardedStructure, etype: Tensor, num_rels: int) -> Pairs:
    return remembered("pairs", ShardedPairs, structure.edge_index, etype, num_rels)
