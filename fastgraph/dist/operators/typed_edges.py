"""Edges with types on ranks: the pairs of a node and a type that the edges of each rank have.

Edges are where their aggregating nodes are, as in :mod:`fastgraph.dist.operators.halo`. So are the
pairs of the nodes that they gather, whose rows are exchanged once before any product: a program
that gathers pairs gathers local rows alone.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from fastgraph.dist.operators.halo.graph import Neighbourhoods, neighbourhoods
from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.own_device import HOST
from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.tensor.layout import Layout, usual
from fastgraph.dist.tensor.memo import on
from fastgraph.dist.tensor.sharded import ShardedTensor, as_sharded, enter
from fastgraph.dist.tensor.table import NoRuleError
from fastgraph.edge_programs.owners import ByType
from fastgraph.edge_programs.relations import (
    PRODUCTS,
    Pairs,
    check_numbers,
    pairs_of,
    product_by_type,
)
from fastgraph.graphs.edges import OutOfRange, unless_out_of_range
from fastgraph.layers.typed_edges import ELSEWHERE, TypedEdges, TypesOfEdges, shares_of


class _OnRanks(TypesOfEdges):
    """The same among the edges of all ranks, which call each method together."""

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
        """Edges with types, and the pairs of all ranks."""

        def find() -> TypedEdges:
            graph = neighbourhoods(edge_index, usual(num_in), usual(num_out), transpose)
            key: tuple[Hashable, ...] = ("typed edges", num_types, places)
            make = lambda: _typed_edges(graph, types, num_types, places)  # noqa: E731
            return graph.with_weight(types, key, make)

        return unless_out_of_range(find)

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
        """For each edge 1 over the number of edges of its node that have its type."""

        def find() -> Tensor:
            graph = neighbourhoods(edge_index, usual(num_in), usual(num_out), transpose)
            make = lambda: _shares(graph, types, num_types, dtype)  # noqa: E731
            return graph.with_weight(types, ("shares of types", num_types, dtype), make)

        return unless_out_of_range(find)


def _types_of(graph: Neighbourhoods, types: Tensor, num_types: int) -> Tensor:
    """The types of the edges of this rank.

    Raises:
        IndexError: on all ranks, if one of them has another type than there are.
    """
    local = graph.of_edges(types)
    assert local is not None
    try:
        check_numbers("type", local, num_types)
        error = None
    except IndexError as found:
        error = found
    if not transport.agree(error is None):
        raise IndexError(f"edges have another type than 0 to {num_types - 1}, on some rank")
    return local


def _typed_edges(
    graph: Neighbourhoods, types: Tensor, num_types: int, places: frozenset[ByType]
) -> TypedEdges:
    local = _types_of(graph, types, num_types)
    device = graph.index.device
    sources = torch.cat([graph.sources.position, graph.plan.halo]).to(device)
    destinations = graph.destinations.position_on(device)
    ends = {
        "gathered by type": (graph.index[0].long(), sources),
        "row by type": (graph.index[1].long(), destinations),
    }
    pairs = {by: _pairs(graph, *ends[by], local, num_types) for by in sorted(places)}
    if "gathered by type" not in pairs:
        return TypedEdges(None, pairs)
    number = as_sharded(pairs["gathered by type"].of_edge).local
    row = destinations[graph.index[1].long()]
    return TypedEdges(ShardedTensor(torch.stack([number, row]), graph.edges, 1), pairs)


def _pairs(
    graph: Neighbourhoods, nodes: Tensor, position: Tensor, types: Tensor, num_types: int
) -> Pairs:
    """The pairs of this rank, numbered after those of the ranks before.

    Args:
        graph: the edges.
        nodes: int64 ``[edges]``, by the numbers of this rank.
        position: int64, the global number of each node that this rank knows.
        types: int64 ``[edges]``.
        num_types: as many as there are.
    """
    found = pairs_of(nodes, types, len(position), num_types)
    own = torch.zeros(WORLD.size, dtype=torch.int64, device=HOST)
    own[WORLD.rank] = found.nodes.shape[0]
    counts = transport.all_reduce(own).tolist()
    start = sum(counts[: WORLD.rank])
    key = torch.arange(start, start + found.nodes.shape[0], device=HOST)
    rows = Layout(key, sum(counts), counts)
    return Pairs(
        ShardedTensor(position[found.nodes], rows, 0),
        found.counts,
        ShardedTensor(on(key, types.device)[found.of_edge], graph.edges, 0),
    )


def _shares(graph: Neighbourhoods, types: Tensor, num_types: int, dtype: torch.dtype) -> Tensor:
    local = _types_of(graph, types, num_types)
    sizes = graph.destinations.mine, num_types
    return ShardedTensor(shares_of(graph.index[1].long(), local, *sizes, dtype), graph.edges, 0)


def _products(x: Tensor, matrices: Tensor, pairs: Pairs) -> Tensor:
    """See :func:`product_by_type`: each rank multiplies the rows of its pairs."""
    if isinstance(matrices, ShardedTensor):
        raise NoRuleError
    rows = as_sharded(x.index_select(0, pairs.nodes))
    number = torch.arange(rows.local.shape[0], device=rows.local.device)
    local = product_by_type(rows.local, enter(matrices), pairs._replace(nodes=number))
    return ShardedTensor(local, rows.rows, 0)


ELSEWHERE[ShardedTensor] = _OnRanks()
PRODUCTS[ShardedTensor] = _products
