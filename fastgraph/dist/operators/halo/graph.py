"""The local graph of the halo mode: the edges to the nodes that this rank owns.

Its destinations are the local rows, its sources the local rows followed by the halo. Once the
features of the halo are received, an operator on this graph computes the same as on one process.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastgraph.dist.operators.rank_graph import (
    Ends,
    RankGraph,
    local_edges,
    local_rows,
    placed_edges,
)
from fastgraph.dist.tensor.collectives import with_halo
from fastgraph.dist.tensor.exchange import Plan
from fastgraph.dist.tensor.layout import Layout
from fastgraph.dist.tensor.memo import remembered
from fastgraph.dist.tensor.sharded import aligned, enter, is_sharded
from fastgraph.graphs.graph import Graph
from fastgraph.graphs.normalisation import WeightedGraph, normalised_graph


class Neighbourhoods(RankGraph):
    """The local graph of a rank, and the plan of the exchange of its halo.

    Attributes:
        local: the edges, from local rows and halo to local rows.
        plan: the exchange of the halo.
        excess: edges of the rank with most of them, less the mean of all ranks, with self-loops;
            the same on all ranks.

    Args:
        ends: the edges.
        sources: the layout of the source nodes: which rank owns which.
        destinations: the layout of the destination nodes.
        self_loops: replace the self-loops by one for each node whose number is below this.
    """

    def __init__(self, ends: Ends, sources: Layout, destinations: Layout, self_loops: int) -> None:
        assert ends.rows is not None
        loops = destinations.counts if self_loops else [0] * len(destinations.counts)
        edges = [sum(counts) for counts in zip(ends.rows.counts, loops, strict=True)]
        self.excess = max(edges) - sum(edges) // len(edges)
        nodes = destinations.position
        ends = ends.with_loops(nodes[nodes < self_loops], self_loops)
        self.sources, self.destinations = sources, destinations
        self.plan = Plan(ends.pair[0], sources)
        self._index = torch.stack([self.plan.place, destinations.held(ends.pair[1]).row]).int()
        num_src = sources.mine + len(self.plan.halo)
        super().__init__(ends, Graph(self._index, num_src, destinations.mine))

    def of_sources(self, x: Tensor) -> Tensor:
        """The local rows and the halo of a tensor with a row for each source."""
        if is_sharded(x):
            return with_halo(aligned(x, self.sources, 0), self.plan)
        make = lambda: torch.cat([self.sources.position, self.plan.halo])  # noqa: E731
        everywhere: Tensor = enter(x)
        return everywhere.index_select(0, self._derived.get("sources", make))

    def of_destinations(self, x: Tensor | None) -> Tensor | None:
        """The local rows of a tensor with a row for each destination, or with one row for all."""
        return None if x is None else local_rows(x, self.destinations)

    def normalised(
        self, weight: Tensor | None, loop_weight: float, dtype: torch.dtype
    ) -> WeightedGraph:
        """The normalised graph of GCN, see :func:`fastgraph.ops.gcn`, cached with the edge weights.

        The degrees of the halo's nodes are exchanged for it.
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

        found: WeightedGraph = self.with_weight(weight, ("normalised", loop_weight, dtype), make)
        return found


def neighbourhoods(
    index: Tensor,
    sources: Layout,
    destinations: Layout,
    *,
    transpose: bool = False,
    self_loops: int = 0,
) -> Neighbourhoods:
    """The local graph of this rank, cached with ``edge_index``.

    Edges that another rank holds than the owner of their destination move to that owner, once.

    Args:
        index: ``edge_index``, whose edges are sharded or replicated.
        sources: the layout of the nodes whose rows are gathered.
        destinations: the layout of the aggregating nodes.
        transpose: whether every edge is reversed.
        self_loops: replace the self-loops by one for each node whose number is below this.

    Raises:
        IndexError: on all ranks, if ``index`` points outside the nodes.
        NoRuleError: ``index`` is sharded in another way.
    """
    local, rows = local_edges(index)

    def make() -> Neighbourhoods:
        sizes = sources.n, destinations.n
        ends = placed_edges(
            local, rows, sizes, transpose, lambda pair: destinations.held(pair[1]).owner
        )
        return Neighbourhoods(ends, sources, destinations, self_loops)

    key = ("neighbourhoods", rows, sources, destinations, transpose, self_loops)
    found: Neighbourhoods = remembered(local, key, make, is_part=rows is not None)
    return found
