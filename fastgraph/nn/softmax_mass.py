"""Pairs of clusters whose edges matter least, by a bound on how far outputs move."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastgraph.graphs.offsets import offsets_of
from fastgraph.nn.dual_pattern import DualPattern
from fastgraph.nn.sub_blocks import Grid


class Chosen(NamedTuple):
    """Pairs of clusters, and what of softmaxes their dropped edges have.

    Attributes:
        is_moved: bool ``[pairs]``.
        mass: the largest of the nodes of each graph, float64 ``[graphs, heads]``.
    """

    is_moved: Tensor
    mass: Tensor


def chosen_by_mass(pattern: DualPattern, grid: Grid, weights: Tensor, most: float) -> Chosen:
    """The pairs of which edges outside the fullest sub-blocks may be dropped, as many as allowed.

    In the order of the largest part of a softmax that a pair drops, graph by graph, until a softmax
    would lose more than ``most``. Losing the part m moves an output by at most 2 m max|v|: the
    others grow by 1 / (1 - m), which moves their sum by as much as was lost.

    Args:
        pattern: of the graphs.
        grid: of the pattern.
        weights: of the softmaxes over its edges, 0 to 1, ``[edges, heads]``.
        most: 0 to below 1.
    """
    pairs, heads = len(grid.counts), weights.shape[1]
    has_edges = grid.counts > 0
    dropped = grid.is_dropped(grid.fullest(has_edges), has_edges)
    groups = grid.query[dropped] * pairs + grid.pair[dropped]
    groups, of_edge = groups.unique(return_inverse=True)
    query, pair = groups // max(pairs, 1), groups % max(pairs, 1)
    mass = weights.new_zeros(len(groups), heads, dtype=torch.float64)
    mass.index_add_(0, of_edge, weights[dropped].double())

    worst = mass.new_zeros(pairs).scatter_reduce(0, pair, mass.amax(1), "amax")
    order = worst.argsort(stable=True)
    order = order[grid.graph[order].argsort(stable=True)]
    of_graph = grid.clusters.counts.square()
    rank = torch.empty_like(order)
    rank[order] = torch.arange(pairs, device=order.device) - offsets_of(of_graph)[grid.graph[order]]

    def lost(number: Tensor) -> Tensor:
        """The largest mass by graph and head, if the first so many pairs of each graph move."""
        moves = rank[pair] < number[grid.graph[pair]]
        rows = mass.new_zeros(pattern.num_nodes, heads).index_add(0, query[moves], mass[moves])
        largest = mass.new_zeros(len(number), heads)
        graph = pattern.graph_of_nodes.unsqueeze(1).expand(-1, heads)
        return largest.scatter_reduce(0, graph, rows, "amax")

    low, high = torch.zeros_like(of_graph), of_graph
    while bool((low < high).any()):
        middle = (low + high + 1) // 2
        fits = lost(middle).amax(1) <= most
        low, high = torch.where(fits, middle, low), torch.where(fits, high, middle - 1)
    is_moved = (rank < low[grid.graph]) & (worst > 0)
    return Chosen(is_moved, lost(low))
