"""How the lanes of warps are used where rows have unequal lengths, from a graph's degrees.

A warp has several groups of lanes, each with a row or a piece of a long one, and works for as long
as the longest of them; a group takes its entries in batches of as many as it has lanes, and those a
few at a time. See ``csrc/include/fastgraph/pieces.cuh`` and ``edge_groups.cuh``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from measure.model_sheets import WARP

CHUNK = 256
"""Entries at whose multiples long rows are cut, ``kChunk`` of the kernels."""
_MERGED_ROWS = 128
"""Rows whose pieces one block merges, one row after another: ``kBlockThreads``."""

ORDERS = ("rows", "length", "uncut")
"""How spans are dealt out to warps: pieces of long rows, then rows as they are numbered; the
longest first; or rows as they are numbered and none cut, a warp to each."""

Lengths = NDArray[np.int64]


@dataclass(frozen=True)
class Walk:
    """What all warps of a launch do together, for one head or one part of the columns.

    Attributes:
        warps: with work.
        iterations: of the loop over entries, summed up over warps.
        batches: the same of those around it.
        longest: iterations of the warp with most.
        longest_batches: the same of batches.
        slots: that groups had for entries, for each entry: 1 if none was idle.
    """

    warps: int
    iterations: int
    batches: int
    longest: int
    longest_batches: int
    slots: float


@dataclass(frozen=True)
class Rows:
    """The rows of a sorted graph, of these lengths.

    Attributes:
        lengths: entries of each row.
        order: one of :data:`ORDERS`.
    """

    lengths: Lengths
    order: str = "rows"

    @property
    def entries(self) -> int:
        return int(self.lengths.sum())

    @property
    def num_pieces(self) -> int:
        """Of long rows, those that hold nothing left out."""
        return int((self._pieces() > 0).sum())

    def walk(self, lanes: int, at_once: int, *, pieces_only: bool = False) -> Walk:
        """How groups of ``lanes`` lanes that take ``at_once`` entries at a time walk over them."""
        pieces = self._pieces()
        is_long = self.lengths > CHUNK if self.order != "uncut" else np.zeros_like(self.lengths)
        rows = np.where(is_long, 0, self.lengths)
        spans = pieces if pieces_only else np.concatenate([pieces, rows])
        if self.order == "length":
            spans = np.sort(spans[spans > 0])[::-1]
        groups = 1 if self.order == "uncut" else WARP // lanes
        entries = int(spans.sum())
        spans = np.pad(spans, (0, -len(spans) % groups)).reshape(-1, groups)
        batches = -(-spans // lanes)
        iterations = spans // lanes * -(-lanes // at_once) + -(-(spans % lanes) // at_once)
        of_warps, batches = iterations.max(1, initial=0), batches.max(1, initial=0)
        longest = int(of_warps.argmax()) if len(of_warps) else 0
        return Walk(
            warps=int((of_warps > 0).sum()),
            iterations=int(of_warps.sum()),
            batches=int(batches.sum()),
            longest=int(of_warps[longest]) if len(of_warps) else 0,
            longest_batches=int(batches[longest]) if len(batches) else 0,
            slots=float(of_warps.sum()) * at_once * groups / max(1, entries),
        )

    def merged_in_series(self) -> list[int]:
        """Pieces of each long row that one block merges, in the block that has most of them."""
        count = -(-self.lengths // CHUNK) + 1
        count[self.lengths <= CHUNK] = 0
        if self.order == "length":  # a block for each long row
            return [int(count.max(initial=0))]
        blocks = np.pad(count, (0, -len(count) % _MERGED_ROWS)).reshape(-1, _MERGED_ROWS)
        most = blocks[int(blocks.sum(1).argmax())]
        return [int(n) for n in most if n]

    def _pieces(self) -> Lengths:
        """Entries of each piece: that which starts a chunk, and that which ends it."""
        if self.order == "uncut" or self.lengths.max(initial=0) <= CHUNK:
            return np.zeros(0, np.int64)
        ends = self.lengths.cumsum()
        first = np.arange(0, ends[-1], CHUNK)
        last = np.minimum(first + CHUNK, ends[-1])
        at_begin, at_end = (np.searchsorted(ends, n, "right") for n in (first, last - 1))
        found = np.zeros((len(first), 2), np.int64)
        for column, row in ((0, at_begin), (1, at_end)):
            begin, end = ends[row] - self.lengths[row], ends[row]
            mine = self.lengths[row] > CHUNK
            if column == 1:
                mine &= begin > first
            held = np.minimum(end, last) - np.maximum(begin, first)
            found[:, column] = np.where(mine, held, 0)
        return found.reshape(-1)
