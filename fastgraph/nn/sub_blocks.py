"""Pairs of clusters as grids of sub-blocks, and patterns of which some pairs are reformed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fastgraph.graphs.offsets import offsets_of
from fastgraph.nn.clusters import Clusters
from fastgraph.nn.dual_pattern import EDGE, OTHER, DualPattern

TYPED_PAIRS = 1 << 22
"""The types of what is invented are looked for among so many pairs at once."""


@dataclass(frozen=True, eq=False)
class Reformed:
    """The entries of a pattern after some pairs of clusters have become sub-blocks.

    Attributes:
        sources, ptr, types: as those of :class:`DualPattern`.
        clusters: of all graphs.
        pairs: of clusters, those with edges.
        transferred: pairs that became sub-blocks.
        sub_blocks: of transferred pairs; with ``select="exact"`` all that have an edge.
        edges: of the pattern, without loops, tokens and path.
        kept: edges that are in the result.
        dropped: edges that are not.
        invented: entries that are no edges of the pattern.
        mass: with ``select="mass"``, the largest part of a softmax that was dropped.
        bound: with ``select="mass"``, how far that moves a channel of an output at most, before the
            last projection.
    """

    sources: Tensor
    ptr: Tensor
    types: Tensor
    clusters: int
    pairs: int
    transferred: int
    sub_blocks: int
    edges: int
    kept: int
    dropped: int
    invented: int
    mass: float | None = None
    bound: float | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.sources.nbytes + self.ptr.nbytes + self.types.nbytes

    def __str__(self) -> str:
        share = 100 * self.kept / max(self.edges, 1)
        line = (
            f"{self.transferred} of {self.pairs} pairs of {self.clusters} clusters transferred, "
            f"{self.sub_blocks} sub-blocks: {self.kept} of {self.edges} edges kept "
            f"({share:.3g} %), {self.dropped} dropped, {self.invented} invented"
        )
        if self.mass is None:
            return line
        return (
            f"{line}, up to {self.mass:.3g} of a softmax, which moves outputs by at most "
            f"{self.bound:.3g}"
        )


class Grid:
    """The edges of a pattern by pairs of clusters and by sub-blocks of these.

    The rows and columns of a pair are the nodes of its clusters in ascending order. Sub-blocks
    begin with the pair; the last ones of a cluster may have fewer rows or columns.

    Args:
        pattern: of the graphs.
        clusters: of its nodes.
        block: rows and columns of a sub-block, d_b, at least 1.

    Attributes:
        graph: of each pair of clusters, int64 ``[pairs]``; graph by graph, those who attend by
            those who are attended to.
        counts: edges of each pair, int64 ``[pairs]``.
        density: of each pair, 0 to 1, float64 ``[pairs]``.
        query: who attends, of each edge, int64 ``[edges]``.
        pair: of clusters, of each edge, int64 ``[edges]``.
        is_edge: the entries of the pattern that are edges, bool ``[entries]``.
    """

    def __init__(self, pattern: DualPattern, clusters: Clusters, block: int) -> None:
        self.clusters, self.block = clusters, block
        counts, device = clusters.counts, pattern.ptr.device
        first_pair, first = offsets_of(counts * counts), offsets_of(counts)[:-1]
        self.graph = torch.arange(len(counts), device=device).repeat_interleave(counts * counts)
        local = torch.arange(len(self.graph), device=device) - first_pair[self.graph]
        of_graph = counts[self.graph]
        self._queries = first[self.graph] + local // of_graph
        self._keys = first[self.graph] + local % of_graph
        sizes = clusters.offsets.diff()
        self._across = (sizes + block - 1) // block  # sub-blocks of each cluster
        self._sizes = torch.tensor(pattern.sizes, dtype=torch.int64, device=device)
        self._cells = offsets_of(self._across[self._queries] * self._across[self._keys])

        self.is_edge = pattern.types == EDGE
        query, key = pattern.queries[self.is_edge], pattern.sources[self.is_edge]
        graph = pattern.graph_of_nodes[query]
        one, other = clusters.cluster[query], clusters.cluster[key]
        self.query = query
        self.pair = first_pair[graph] + (one - first[graph]) * counts[graph] + other - first[graph]
        row, column = clusters.place[query] // block, clusters.place[key] // block
        self._cell = self._cells[self.pair] + row * self._across[other] + column
        self.counts = torch.bincount(self.pair, minlength=len(self.graph))
        self.density = (
            self.counts / (sizes[self._queries] * sizes[self._keys]).clamp(min=1).double()
        )

    @property
    def nbytes(self) -> int:
        """Bytes, without the pattern."""
        tensors = [value for value in vars(self).values() if isinstance(value, Tensor)]
        return self.clusters.nbytes + sum(tensor.nbytes for tensor in tensors)

    @property
    def density_of_graphs(self) -> Tensor:
        """Edges by pairs of nodes of each graph, float64 ``[graphs]``."""
        edges = torch.zeros_like(self.clusters.counts).index_add(0, self.graph, self.counts)
        return edges / self._sizes.clamp(min=1).square().double()

    def whole(self, pattern: DualPattern) -> Reformed:
        """The pattern itself, with the sub-blocks that have an edge."""
        moved = torch.zeros_like(self.counts, dtype=torch.bool)
        return self._reformed(pattern, moved, self._cell.unique(), None, 1)

    def reformed(
        self, pattern: DualPattern, is_moved: Tensor, placement: str, seed: int, hops: int
    ) -> Reformed:
        """The pattern after pairs became full sub-blocks.

        Args:
            pattern: of which this is the grid.
            is_moved: bool ``[pairs]``.
            placement: ``"edges"``: the sub-blocks with most edges, of equal ones the first;
                ``"random"``.
            seed: of random ones, the same for each graph.
            hops: up to which distance along edges what is invented has a type of its own.
        """
        is_moved = is_moved & (self.counts > 0)
        chosen = self.fullest(is_moved) if placement == "edges" else self._drawn(is_moved, seed)
        return self._reformed(pattern, is_moved, chosen, self._entries_of(chosen), hops)

    def masked(self, pattern: DualPattern, is_moved: Tensor) -> Reformed:
        """The pattern after pairs lost the edges outside their fullest sub-blocks."""
        return self._reformed(pattern, is_moved, self.fullest(is_moved), None, 1)

    def fullest(self, is_moved: Tensor) -> Tensor:
        """The numbers of the sub-blocks with most edges of each pair, in ascending order.

        As many as hold the edges of the pair if they are full.
        """
        cells, edges = self._cell[is_moved[self.pair]].unique(return_counts=True)
        order = edges.argsort(descending=True, stable=True)
        pair = self._pair_of(cells)
        order = order[pair[order].argsort(stable=True)]
        of_pair = torch.bincount(pair, minlength=len(self.counts))
        rank = torch.arange(len(cells), device=cells.device) - offsets_of(of_pair)[pair[order]]
        chosen: Tensor = cells[order[rank < self._wanted(pair[order])]]
        return chosen.sort().values

    def _wanted(self, pair: Tensor) -> Tensor:
        """Of how many sub-blocks the edges of a pair are, ``ceil(edges / block ** 2)``."""
        area = self.block * self.block
        return (self.counts[pair] + area - 1) // area

    def _pair_of(self, cells: Tensor) -> Tensor:
        return torch.searchsorted(self._cells, cells, right=True) - 1

    def _drawn(self, is_moved: Tensor, seed: int) -> Tensor:
        """Random sub-blocks, as many as :meth:`fullest` has."""
        pairs = is_moved.nonzero().squeeze(1)
        wanted = self._wanted(pairs).tolist()
        cells, graphs = self._cells.diff()[pairs].tolist(), self.graph[pairs].tolist()
        found, before, draw = [], -1, np.random.default_rng(seed)
        for number, available, graph in zip(wanted, cells, graphs, strict=True):
            if graph != before:  # as it would be alone
                before, draw = graph, np.random.default_rng(seed)
            chosen = draw.choice(available, number, replace=False, shuffle=False)
            found.append(torch.from_numpy(np.sort(chosen)))
        local = torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)
        first = self._cells[pairs].repeat_interleave(self._wanted(pairs))
        return first + local.to(first.device)

    def is_dropped(self, cells: Tensor, is_moved: Tensor) -> Tensor:
        """True for the edges of pairs that are in none of their sub-blocks, bool ``[edges]``.

        Args:
            cells: the sub-blocks that stay, in ascending order.
            is_moved: bool ``[pairs]``.
        """
        return is_moved[self.pair] & ~torch.isin(self._cell, cells)

    def _entries_of(self, cells: Tensor) -> tuple[Tensor, Tensor]:
        """Query and key of all pairs of nodes in sub-blocks."""
        pair = self._pair_of(cells)
        local, width = cells - self._cells[pair], self._across[self._keys[pair]]
        within = torch.arange(self.block, device=cells.device)
        sides = []
        for cluster, number in (
            (self._queries[pair], local // width),
            (self._keys[pair], local % width),
        ):
            places = self.clusters.offsets[cluster].unsqueeze(1) + number.unsqueeze(1) * self.block
            sides.append((places + within, self.clusters.offsets[cluster + 1].unsqueeze(1)))
        (rows, row_end), (columns, column_end) = sides
        is_there = (rows < row_end).unsqueeze(2) & (columns < column_end).unsqueeze(1)
        rows, columns = (
            x.expand_as(is_there)[is_there] for x in (rows.unsqueeze(2), columns.unsqueeze(1))
        )
        return self.clusters.order[rows], self.clusters.order[columns]

    def _reformed(
        self,
        pattern: DualPattern,
        is_moved: Tensor,
        cells: Tensor,
        full: tuple[Tensor, Tensor] | None,
        hops: int,
    ) -> Reformed:
        """The pattern without what moved pairs drop, and with all of full sub-blocks."""
        rows = max(pattern.num_rows, 1)
        dropped = self.is_dropped(cells, is_moved)
        stays = torch.ones_like(self.is_edge)
        stays[self.is_edge] = ~dropped
        before = pattern.queries * rows + pattern.sources
        keys, types, invented = before[stays], pattern.types[stays], before[:0]
        if full is not None:
            invented = (full[0] * rows + full[1]).sort().values
            invented = invented[~torch.isin(invented, before)]  # loops and path stay as they are
            others = _types(pattern, invented // rows, invented % rows, hops)
            keys, order = torch.cat([keys, invented]).sort()
            types = torch.cat([types, others])[order]
        lost = int(dropped.sum())
        return Reformed(
            keys % rows,
            offsets_of(torch.bincount(keys // rows, minlength=pattern.num_rows)),
            types,
            int(self.clusters.counts.sum()),
            int((self.counts > 0).sum()),
            int(is_moved.sum()),
            len(cells),
            len(dropped),
            len(dropped) - lost,
            lost,
            len(invented),
        )


def _types(pattern: DualPattern, rows: Tensor, sources: Tensor, hops: int) -> Tensor:
    """The types that pairs of nodes, in ascending order, have in dense turns, uint8 ``[pairs]``."""
    types = torch.full_like(rows, OTHER, dtype=torch.uint8)
    if hops == 1:
        return types
    queries, number = rows.unique_consecutive(return_inverse=True)
    places, lengths, first = pattern.places, pattern.offsets.diff(), 0
    graph = pattern.graph_of_nodes[queries]
    begins, starts = offsets_of(lengths[graph]), pattern.offsets[graph]
    while first < len(queries):
        last = int(torch.searchsorted(begins, begins[first] + TYPED_PAIRS, right=True)) - 1
        last = min(max(last, first + 1), len(queries))
        found = pattern.pair_types(queries[first:last], hops)
        own = slice(*torch.searchsorted(number, torch.tensor([first, last])).tolist())
        of = number[own]
        types[own] = found[begins[of] - begins[first] + places[sources[own]] - starts[of]]
        first = last
    return types
