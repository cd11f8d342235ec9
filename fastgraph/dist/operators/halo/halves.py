"""A local graph in two: what needs no row of others, and the rest.

By rows: nodes all of whose neighbours are here, the interior, and the others, the boundary. Each
half has all edges of its rows, so that what is computed for a row is what it would be in one graph.
By edges: those from nodes that are here, and those from the halo. That suits sums alone, which are
added up, and leaves more to do meanwhile where a partition cuts much.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastgraph.dist.ranks import transport
from fastgraph.graphs.edges import Edges, named_by_itself
from fastgraph.graphs.graph import Csr, Graph

ROWS_SUFFICE = 0.5
"""Share of the edges that lead to interior rows, of all ranks."""

LEAST_SHARE = 0.25
"""Least share of the edges in the first half: with less there is too little to do meanwhile."""


class Shares:
    """How many edges of all ranks could be computed first; the same on all of them.

    Args:
        csr: the edges of this rank by destination.
        num_local: how many sources are here, before those of the halo.
    """

    def __init__(self, csr: Csr, num_local: int) -> None:
        far = csr.col >= num_local
        counts = torch.tensor([far.numel(), int(far.sum()), int(_of_boundary(csr, far).sum())])
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
        self.by = by
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
            others = torch.ones(num_local, dtype=torch.bool)
            others[self.rows] = False
            self.own = torch.cat([self.rows, self.own[others[self.own]]])
        place = torch.empty(num_local + num_halo, dtype=torch.int64)
        place[self.own] = torch.arange(len(self.own))
        place[num_local:] = torch.arange(len(self.own), len(self.own) + num_halo)
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
