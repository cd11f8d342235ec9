"""Random adjacency matrices in cells, each of which any rank draws alone.

Nodes are in groups of consecutive numbers, and the edges from one group to another are a cell. How
many are in each is drawn first, alike on all ranks; the edges of a cell then follow from a seed of
its own. So a block of the matrix is made by its rank, which asks nobody (after Funke et al.,
"Communication-free massively distributed graph generation", IPDPS 2018).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from fastgraph.dist.ranks.own_device import HOST

_FEWEST, _MOST = 3, 6
"""Levels of groups, of which there are two to that power."""

_EDGES = 13
"""A level more where each cell still has two to this power of edges, lest it takes long."""


def levels_for(num_edges: int) -> int:
    """How many levels of groups there are where so many edges are drawn."""
    return max(_FEWEST, min(_MOST, (num_edges.bit_length() - _EDGES) // 2))


class Cells(Protocol):
    """A distribution of edges.

    Attributes:
        bounds: int64 ``[groups + 1]``, where the numbers of the nodes of each group begin.
        shares: float64 ``[groups, groups]``, the probabilities of the cells; rows are those of
            sources.
    """

    bounds: Tensor
    shares: Tensor

    def draw(self, source: int, destination: int, count: int, generator: torch.Generator) -> Tensor:
        """So many edges from one group to another, int64 ``[2, count]``."""
        ...


def counts_of(cells: Cells, num_edges: int, generator: torch.Generator) -> Tensor:
    """How many of the edges are in each cell: a multinomial, int64 ``[groups, groups]``."""
    of_rows = _shared_out(
        torch.tensor([num_edges], device=HOST), cells.shares.sum(1)[None], generator
    )[0]
    return _shared_out(of_rows, cells.shares, generator)


def _shared_out(totals: Tensor, shares: Tensor, generator: torch.Generator) -> Tensor:
    """For each row, its total shared out to columns, one after the other, by binomials."""
    remaining = shares.flip(1).cumsum(1).flip(1)
    # That of the last column with a share is 1, whatever was rounded.
    rates = torch.where(shares > 0, shares / remaining.clamp(min=1e-300), 0).clamp(max=1)
    last = (remaining - shares <= 0) & (shares > 0)
    rates = rates.masked_fill(last, 1)
    left, found = totals.double(), []
    for rate in rates.T:
        found.append(torch.binomial(left, rate.contiguous(), generator=generator))
        left = left - found[-1]
    return torch.stack(found, 1).long()


class Uniform:
    """Ends are drawn evenly; see :class:`Cells`.

    Args:
        num_nodes: how many there are.
        levels: there are ``2 ** levels`` groups, or as many as nodes.
    """

    def __init__(self, num_nodes: int, levels: int) -> None:
        groups = min(1 << levels, num_nodes)
        self.bounds = torch.arange(groups + 1, device=HOST) * num_nodes // groups
        sizes = self.bounds.diff().double() / num_nodes
        self.shares = sizes[:, None] * sizes

    def draw(self, source: int, destination: int, count: int, generator: torch.Generator) -> Tensor:
        """See :meth:`Cells.draw`."""
        ends = []
        for group in (source, destination):
            start, stop = self.bounds[group : group + 2].tolist()
            ends.append(torch.randint(start, stop, (count,), generator=generator, device=HOST))
        return torch.stack(ends)


class Kronecker:
    """Ends whose bits are drawn in pairs by an initiator; see :class:`Cells`.

    The group of a node is the parity of its bits in some sets of them, one for each level, so that
    all groups have about as many edges. What the bits of an edge may still be, given the groups of
    its ends, is a sum over as many states as there are cells, from the last bit to the first.

    Args:
        scale: there are ``2 ** scale`` nodes.
        initiator: four probabilities.
        levels: there are ``2 ** levels`` groups, or as many as nodes.
        generator: of the sets, and of the numbers of nodes.
    """

    def __init__(
        self, scale: int, initiator: Sequence[float], levels: int, generator: torch.Generator
    ) -> None:
        levels = min(levels, scale)
        groups, self._low = 1 << levels, scale - levels
        # The first bits are each in one set, so that the others say all that the group does not.
        sets = torch.randint(0, groups, (self._low,), generator=generator, device=HOST).tolist()
        sets = [1 << (levels - 1 - level) for level in range(levels)] + sets
        states = torch.arange(groups**2, device=HOST)
        pairs = torch.tensor(
            [[row * groups + column] for row in (0, 1) for column in (0, 1)], device=HOST
        )
        self._moves = [states ^ pairs * members for members in sets]
        left = (states == 0).double()
        self._ends: list[Tensor] = []
        for moves in reversed(self._moves):
            weights = (
                torch.tensor(initiator, dtype=torch.float64, device=HOST)[:, None] * left[moves]
            )
            left = weights.sum(0)
            cumulated = weights.cumsum(0)[:3] / left.clamp(min=1e-300)
            # Nothing is drawn that has no weight, whatever was rounded.
            is_last = weights.flip(0).cumsum(0).flip(0)[1:] <= 0
            self._ends.insert(0, cumulated.masked_fill(is_last, 2).T.contiguous())
        # Groups in any order: those of a rank are not alike then.
        self._group = torch.randperm(groups, generator=generator, device=HOST)
        self.bounds = torch.arange(groups + 1, device=HOST) << self._low
        self.shares = left.view(groups, groups)[self._group][:, self._group].clone()
        self._names = Names(self._low, generator)

    def draw(self, source: int, destination: int, count: int, generator: torch.Generator) -> Tensor:
        """See :meth:`Cells.draw`."""
        groups = len(self._group)
        state = int(self._group[source]) * groups + int(self._group[destination])
        states = torch.full((count,), state, device=HOST)
        rows, columns = torch.zeros(2, count, dtype=torch.int64, device=HOST)
        for level, (moves, ends) in enumerate(zip(self._moves, self._ends, strict=True)):
            drawn = torch.rand(count, 1, generator=generator, dtype=torch.float64, device=HOST)
            quadrant = (drawn >= ends[states]).sum(1)
            row, column = quadrant >> 1, quadrant & 1
            states = moves[quadrant, states]
            if level >= len(self._moves) - self._low:
                rows, columns = rows * 2 + row, columns * 2 + column
        return torch.stack(
            [
                self._names(rows) + self.bounds[source],
                self._names(columns) + self.bounds[destination],
            ]
        )


class Names:
    """Other numbers for nodes: a bijection of ``2 ** scale`` of them, which takes no memory."""

    def __init__(self, scale: int, generator: torch.Generator) -> None:
        self._scale, self._mask = scale, (1 << scale) - 1
        drawn = torch.randint(0, 1 << 31, (6,), generator=generator, device=HOST).tolist()
        self._rounds = [(drawn[i] | 1, drawn[i + 1]) for i in (0, 2, 4)]

    def __call__(self, nodes: Tensor) -> Tensor:
        """The numbers of these nodes."""
        for factor, term in self._rounds:  # products of 31 bits each fit into 63
            nodes = (nodes * (factor & self._mask | 1) + (term & self._mask)) & self._mask
            nodes = nodes ^ nodes >> (self._scale + 1) // 2
        return nodes
