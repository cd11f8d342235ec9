"""Edges with types as programs take them that compute for pairs of a node and a type."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastgraph.edge_programs.owners import ByType
from fastgraph.edge_programs.relations import Pairs, check_numbers, pairs_of
from fastgraph.graphs.edges import OutOfRange, unless_out_of_range
from fastgraph.graphs.memo import remembered


class TypedEdges(NamedTuple):
    """Edges, and the pairs of nodes and types that they have.

    Attributes:
        edges: int64 ``[2, E]``, the gathered pair and the aggregating node of each edge; ``None``
            where nodes themselves are gathered.
        pairs: by places.
    """

    edges: Tensor | None
    pairs: dict[ByType, Pairs]

    @property
    def nbytes(self) -> int:
        """The memory that they take."""
        own = 0 if self.edges is None else self.edges.nbytes
        return own + sum(pairs.nbytes for pairs in self.pairs.values())

    @property
    def num_gathered(self) -> int | None:
        """The number of gathered pairs; ``None`` where nodes are gathered."""
        return None if self.edges is None else self.pairs["gathered by type"].nodes.shape[0]


class TypesOfEdges:
    """All that follows from types of edges, remembered as long as both tensors live unchanged."""

    def typed_edges(
        self,
        edge_index: Tensor,
        types: Tensor,
        num_in: int,
        num_out: int,
        transpose: bool,
        num_types: int,
        places: frozenset[ByType],
    ) -> TypedEdges | OutOfRange:
        """Edges with types.

        Args:
            edge_index: int64 or int32 ``[2, E]``.
            types: int64 ``[E]``.
            num_in: the number of gathered nodes.
            num_out: the number of aggregating nodes.
            transpose: reverse every edge.
            num_types: as many types as there are.
            places: of the nodes whose pairs are wanted.

        Returns:
            The edges, or the reason to refuse if a type is out of range, or a node that has pairs:
            upstream takes negative types for those from the end.
        """
        ends = num_in, num_out, transpose, num_types, tuple(sorted(places))
        return unless_out_of_range(
            lambda: remembered("typed edges", _typed_edges, edge_index, types, *ends)
        )

    def shares(
        self,
        edge_index: Tensor,
        types: Tensor,
        num_in: int,
        num_out: int,
        transpose: bool,
        num_types: int,
        dtype: torch.dtype,
    ) -> Tensor | OutOfRange:
        """For each edge 1 over the number of edges of its node that have its type, ``[E]``.

        Args:
            edge_index: as above, and so the others.
            types: int64 ``[E]``.
            num_in: the number of gathered nodes.
            num_out: the number of aggregating nodes.
            transpose: reverse every edge.
            num_types: as many types as there are.
            dtype: of the result.
        """
        given = edge_index, types, num_out, transpose, num_types, dtype
        found = unless_out_of_range(lambda: remembered("shares of types", _shares, *given))
        return found if isinstance(found, OutOfRange) else found.of_edge


ELSEWHERE: dict[type, TypesOfEdges] = {}
"""By subclasses of tensors, what takes the place of :class:`TypesOfEdges` for these."""

_HERE = TypesOfEdges()


def types_among(*tensors: Tensor) -> TypesOfEdges:
    """The functions for a call with these tensors."""
    return next((ELSEWHERE[type(t)] for t in tensors if type(t) in ELSEWHERE), _HERE)


def _typed_edges(
    edge_index: Tensor,
    types: Tensor,
    num_in: int,
    num_out: int,
    transpose: bool,
    num_types: int,
    places: tuple[ByType, ...],
) -> TypedEdges:
    check_numbers("type", types, num_types)
    gathered, row = edge_index.flip(0) if transpose else edge_index
    ends = {"gathered by type": (gathered, num_in), "row by type": (row, num_out)}
    pairs = {by: pairs_of(ends[by][0], types, ends[by][1], num_types) for by in places}
    edges = None
    if "gathered by type" in pairs:
        edges = torch.stack([pairs["gathered by type"].of_edge, row.long()])
    return TypedEdges(edges, pairs)


class _Shares(NamedTuple):
    of_edge: Tensor

    @property
    def nbytes(self) -> int:
        return self.of_edge.nbytes


def _shares(
    edge_index: Tensor,
    types: Tensor,
    num_rows: int,
    transpose: bool,
    num_types: int,
    dtype: torch.dtype,
) -> _Shares:
    row = edge_index[int(not transpose)]
    return _Shares(shares_of(row, types, num_rows, num_types, dtype))


def shares_of(
    row: Tensor, types: Tensor, num_rows: int, num_types: int, dtype: torch.dtype
) -> Tensor:
    """For each edge 1 over the number of edges of its row that have its type.

    Raises:
        IndexError: a row or a type is out of range.
    """
    of_edge = pairs_of(row, types, num_rows, num_types).of_edge
    return torch.bincount(of_edge).to(dtype).reciprocal()[of_edge]
