"""Edges with types as programs take them that compute for pairs of a node and a type."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastgraph.edge_programs.owners import ByType
from fastgraph.edge_programs.relations import Pairs, check_numbers, pairs_of
from fastgraph.graphs.edges import OutOfRange, unless_out_of_range
from fastgraph.graphs.memo import remembered
from fastgraph.plugins.refusal import Refusal

BY_TYPES = Refusal("it computes by types of edges, which has no rule on several ranks")


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


def typed_edges(
    edge_index: Tensor,
    types: Tensor,
    num_in: int,
    num_out: int,
    transpose: bool,
    num_types: int,
    places: frozenset[ByType],
) -> TypedEdges | OutOfRange:
    """Edges with types, remembered as long as both tensors live unchanged.

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


def shares(
    row: Tensor, types: Tensor, num_rows: int, num_types: int, dtype: torch.dtype
) -> Tensor | OutOfRange:
    """For each edge 1 over the number of edges of its node that have its type.

    Remembered as long as both tensors live unchanged.

    Args:
        row: int64 or int32 ``[E]``, the aggregating node of each edge.
        types: int64 ``[E]``.
        num_rows: as many as there are.
        num_types: as many as there are.
        dtype: of the result.
    """
    given = row, types, num_rows, num_types, dtype
    found = unless_out_of_range(lambda: remembered("shares of types", _shares, *given))
    return found if isinstance(found, OutOfRange) else found.of_edge


def _shares(
    row: Tensor, types: Tensor, num_rows: int, num_types: int, dtype: torch.dtype
) -> _Shares:
    of_edge = pairs_of(row, types, num_rows, num_types).of_edge
    return _Shares(torch.bincount(of_edge).to(dtype).reciprocal()[of_edge])
