"""The cost of a layer by halo."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastgraph.dist.operators.cost import TOPOLOGY, Cluster, Cost, Distribution, Layer
from fastgraph.dist.ranks.transport import sends_in_turns


def by_halo(layer: Layer, rows: Distribution, cluster: Cluster) -> Cost:
    """Each rank computes all heads of its nodes, from their rows and those of the halo."""
    others = len(rows.edges) - 1
    sources = [operand for operand in layer.operands if operand.place == "sources"]
    received = sum(rows.receives)
    in_turns = sends_in_turns([received * operand.row for operand in sources], len(rows.edges))
    exchanges = 2 * (len(sources) if in_turns else 1) if received else 0
    row = sum(operand.row for operand in sources)
    work = cluster.slowest(rows.edges) * layer.heads * layer.channels
    memory = max(rows.receives) * row + max(rows.edges) * TOPOLOGY
    return Cost(exchanges, exchanges * others, row * rows.busiest, work, memory)


class Rows(NamedTuple):
    """The rows of the halo that each rank gives to others and gets of them."""

    sends: list[int]
    receives: list[int]


def rows_of_halo(edge_index: Tensor, sources: Tensor, destinations: Tensor, num_ranks: int) -> Rows:
    """The rows that ranks exchange by halo, counted without any ranks; exact, as a test says.

    Args:
        edge_index: int64 ``[2, E]``, of the whole graph.
        sources: the rank of each node that edges start from, int64 ``[n]``.
        destinations: the same for those that edges lead to.
        num_ranks: how many ranks there are.
    """
    source, rank = edge_index[0], destinations[edge_index[1]]
    is_far = sources[source] != rank
    # Each node once for each rank that its edges go to.
    places = torch.unique(rank[is_far] * len(sources) + source[is_far])
    receives = torch.bincount(places // max(len(sources), 1), minlength=num_ranks)
    sends = torch.bincount(sources[places % max(len(sources), 1)], minlength=num_ranks)
    return Rows(sends.tolist(), receives.tolist())
