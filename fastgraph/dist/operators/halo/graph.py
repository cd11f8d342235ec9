"""The local graph of the halo mode: the edges to the nodes that this rank owns.

Its destinations are the local rows, its sources the local rows followed by the halo. Once the
features of the halo are received, an operator on this graph computes the same as on one process.

The same graph in halves: what needs no row of the halo, and the rest. By rows: nodes all of whose
neighbours are here, the interior, and the others, the boundary. Each half has all edges of its
rows, so that what is computed for a row is what it would be in one graph. By edges: those from
nodes that are here, and those from the halo. That suits sums alone, which are added up, and leaves
more to do meanwhile where a partition cuts much.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastgraph.dist.operators.rank_graph import (
    Ends,
    RankGraph,
    local_edges,
    local_rows,
    placed_edges,
)
from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.own_device import HOST
from fastgraph.dist.tensor.collectives import with_halo
from fastgraph.dist.tensor.exchange import Plan
from fastgraph.dist.tensor.layout import Layout
from fastgraph.dist.tensor.memo import cached, on
from fastgraph.dist.tensor.sharded import ShardedTensor, aligned, enter, is_sharded
from fastgraph.graphs.edges import Edges, named_by_itself
from fastgraph.graphs.graph import Csr, Graph
from fastgraph.graphs.normalisation import WeightedGraph, normalised_graph

ROWS_SUFFICE = 0.5
"""Share of the edges that lead to interior rows, of all ranks."""

LEAST_SHARE = 0.25
"""Least share of the edges in the first half: with less there is too little to do meanwhile."""


class Neighbourhoods(RankGraph):
    """The local graph of a rank, and the plan of the exchange of its halo.

    Attributes:
        local: the edges, from local rows and halo to local rows.
        plan: the exchange of the halo.
        index: int32 ``[2, edges]``, the sources among local rows and halo, and the local rows.
        excess: edges of the rank with most of them, less the mean of all ranks, with self-loops;
            the same on all ranks.

    Args:
        ends: the edges.
        sources: the layout of the source nodes: which rank owns which.
        destinations: the layout of the destination nodes.
        self_loops: replace the self-loops by one for each node whose number is below this.
        device: that operators compute on.
    """

    def __init__(
        self,
        ends: Ends,
        sources: Layout,
        destinations: Layout,
        self_loops: int,
        device: torch.device,
    ) -> None:
        assert ends.rows is not None
        loops = destinations.counts if self_loops else [0] * len(destinations.counts)
        edges = [sum(counts) for counts in zip(ends.rows.counts, loops, strict=True)]
        self.excess = max(edges) - sum(edges) // len(edges)
        nodes = destinations.position
        ends = ends.with_loops(nodes[nodes < self_loops], self_loops)
        self.sources, self.destinations = sources, destinations
        self.plan = Plan(ends.pair[0], sources)
        index = torch.stack([self.plan.place, destinations.held(ends.pair[1]).row]).int()
        self.index = index.to(device)
        num_src = sources.mine + len(self.plan.halo)
        super().__init__(ends, Graph(self.index, num_src, destinations.mine))

    def of_sources(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The local rows and the halo of tensors with a row for each source."""
        sharded = [aligned(x, self.sources, 0) for x in tensors if is_sharded(x)]
        gathered = iter(with_halo(sharded, self.plan))
        return [next(gathered) if is_sharded(x) else self._taken(x) for x in tensors]

    def _taken(self, x: Tensor) -> Tensor:
        """The same rows of a tensor that all ranks have."""
        make = lambda: torch.cat([self.sources.position, self.plan.halo])  # noqa: E731
        everywhere: Tensor = enter(x)
        rows = on(self._derived.get("sources", make), x.device)
        return everywhere.index_select(0, rows)

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
                self.index,
                self.of_edges(weight),
                self.destinations.mine,
                loop_weight,
                False,
                dtype,
                num_others=len(self.plan.halo),
                with_others=lambda scale: with_halo([scale], self.plan)[0],
            )

        key = ("normalised", loop_weight, dtype)
        found: WeightedGraph
        if weight is None:
            found = self._derived.get(key, make)
        else:
            found = self.with_weight(weight, key, make)
        return found


def neighbourhoods(
    index: Tensor,
    sources: Layout,
    destinations: Layout,
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

    def make(local: Tensor, rows: Layout | None) -> Neighbourhoods:
        sizes = sources.n, destinations.n
        ends = placed_edges(
            local, rows, sizes, transpose, lambda pair: destinations.held(pair[1]).owner
        )
        return Neighbourhoods(ends, sources, destinations, self_loops, local.device)

    key = ("neighbourhoods", sources, destinations, transpose, self_loops)
    found: Neighbourhoods
    if isinstance(index, ShardedTensor):  # of which nothing has to be looked at again
        found = index.cached(key, lambda: make(*local_edges(index)))
    else:
        given = local_edges(index)
        found = cached(given[0], key, lambda: make(*given))
    return found


class EdgeFractions:
    """The fractions of the edges of all ranks that need no halo; the same on all of them.

    Attributes:
        interior: of edges to rows all of whose sources are here.
        local: of edges whose sources are here.

    Args:
        csr: the edges of this rank by destination.
        num_local: how many sources are here, before those of the halo.
    """

    def __init__(self, csr: Csr, num_local: int) -> None:
        far = csr.col >= num_local
        counts = torch.tensor(
            [far.numel(), int(far.sum()), int(_of_boundary(csr, far).sum())], device=HOST
        )
        edges, of_halo, of_boundary = transport.all_reduce(counts).tolist()
        self.interior = 1 - of_boundary / max(edges, 1)
        self.local = 1 - of_halo / max(edges, 1)

    def by(self, *, sums: bool) -> str | None:
        """``"rows"`` or ``"edges"``; ``None`` where it would not pay.

        Args:
            sums: whether parts of a row can be added up.
        """
        if self.interior >= ROWS_SUFFICE:
            return "rows"
        if sums and self.local >= LEAST_SHARE:
            return "edges"
        return "rows" if self.interior >= LEAST_SHARE else None


class Halves:
    """Both halves as graphs of their own.

    Attributes:
        by: ``"rows"`` or ``"edges"``.
        rows: int64, the boundary, in ascending order.
        own: int64, the sources here that the second half starts from; its other sources are the
            halo. If nodes are of one kind, the boundary comes first.
        first: edges of the first half, among all nodes that are here; the boundary has none of
            them by rows.
        second: those of the second half, to the boundary alone.
        positions: int64 each, which of the edges of this rank these are.
    """

    def __init__(self, csr: Csr, num_local: int, num_halo: int, by: str, one_kind: bool) -> None:
        self.by, device = by, csr.col.device
        far = csr.col >= num_local
        is_boundary, of_boundary = _boundary(csr, far), _of_boundary(csr, far)
        later = of_boundary if by == "rows" else far
        self.rows = is_boundary.nonzero().view(-1)
        entries = (~later).nonzero().view(-1), later.nonzero().view(-1)
        self.positions = entries
        if csr.edge_id is not None:
            self.positions = csr.edge_id[entries[0]].long(), csr.edge_id[entries[1]].long()
        degree = csr.ptr.diff()
        num_later = _sums_of_rows(csr, later)
        col = csr.col[entries[1]].long()
        self.own = torch.unique(col[col < num_local])
        if one_kind and by == "rows":
            others = torch.ones(num_local, dtype=torch.bool, device=device)
            others[self.rows] = False
            self.own = torch.cat([self.rows, self.own[others[self.own]]])
        place = torch.empty(num_local + num_halo, dtype=torch.int64, device=device)
        num_own = len(self.own)
        place[self.own] = torch.arange(num_own, device=device)
        place[num_local:] = torch.arange(num_own, num_own + num_halo, device=device)
        first = _graph(csr.col[entries[0]], degree - num_later, num_local)
        second = _graph(place[col], num_later[self.rows], len(self.own) + num_halo)
        self._graphs = first, second
        self.first, self.second = (
            Edges(graph.by_destination.col, graph.by_destination.ptr) for graph in self._graphs
        )

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        tensors = (self.rows, self.own, *self.positions)
        return sum(t.nbytes for t in tensors) + sum(graph.nbytes for graph in self._graphs)


def _graph(col: Tensor, degree: Tensor, num_src: int) -> Graph:
    ptr = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
    return named_by_itself(Graph(col, num_src, len(degree), ptr))


def _sums_of_rows(csr: Csr, of_entries: Tensor) -> Tensor:
    """The number of entries of each row that are marked."""
    total = torch.cat([csr.ptr.new_zeros(1), of_entries.cumsum(0)])
    return total[csr.ptr].diff()


def _boundary(csr: Csr, far: Tensor) -> Tensor:
    """The rows that have an entry of the halo, as a mask."""
    return _sums_of_rows(csr, far) > 0


def _of_boundary(csr: Csr, far: Tensor) -> Tensor:
    """The entries of such rows, as a mask."""
    return torch.repeat_interleave(_boundary(csr, far), csr.ptr.diff(), output_size=far.numel())
