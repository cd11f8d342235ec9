"""How the lanes of warps are used where rows have unequal lengths, from a graph's degrees.

A warp has several groups of lanes, each with a row or a piece of a long one, and works for as long
as the longest of them; a group takes its entries in batches of as many as it has lanes, and those a
few at a time. See ``csrc/include/fastgraph/pieces.cuh`` and ``edge_groups.cuh``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from fastgraph.backends.tasks import chunk_of
from fastgraph.tune.gpus import WARP
from measure.tasks import FORMER_CHUNK, formerly, listed

_MERGED_ROWS = 128
"""Rows whose pieces one block merged, one row after another, when there was no list of tasks."""

ORDERS = ("tasks", "rows", "uncut")
"""How groups get what they do: from a list of tasks, by length; pieces of long rows, then rows as
they are numbered; or rows as they are numbered and none cut, a warp to each."""

Lengths = NDArray[np.int64]


@dataclass(frozen=True)
class Walk:
    """The work of all warps of a launch together, for one head or one part of the columns.

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
    _walks: dict[tuple[int, int, bool, bool], Walk] = field(default_factory=dict)

    @property
    def entries(self) -> int:
        return int(self.lengths.sum())

    @property
    def num_pieces(self) -> int:
        """Of long rows, those that hold nothing left out."""
        return int((self._spans[0] > 0).sum())

    def walk(
        self, lanes: int, at_once: int, *, pieces_only: bool = False, alone: bool = False
    ) -> Walk:
        """How groups of ``lanes`` lanes that take ``at_once`` entries at a time walk over them.

        Args:
            pieces_only: those of long rows.
            alone: whether all groups of a warp have the same row.
        """
        asked = (lanes, at_once, pieces_only, alone)
        if asked not in self._walks:
            self._walks[asked] = self._walk(*asked)
        return self._walks[asked]

    def _walk(self, lanes: int, at_once: int, pieces_only: bool, alone: bool) -> Walk:
        pieces, others = self._spans
        spans = pieces if pieces_only else np.concatenate([pieces, others])
        groups = 1 if alone or self.order == "uncut" else WARP // lanes
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
        if self.order != "rows":  # a block for each
            return [-(-int(self.lengths.max(initial=0)) // self._chunk())]
        count = -(-self.lengths // FORMER_CHUNK) + 1
        count[self.lengths <= FORMER_CHUNK] = 0
        blocks = np.pad(count, (0, -len(count) % _MERGED_ROWS)).reshape(-1, _MERGED_ROWS)
        most = blocks[int(blocks.sum(1).argmax())]
        return [int(n) for n in most if n]

    def _chunk(self) -> int:
        return chunk_of(len(self.lengths), self.entries)

    @functools.cached_property
    def _spans(self) -> tuple[Lengths, Lengths]:
        """How many entries pieces have, and rows that are not cut, in the order of tasks."""
        if self.order == "uncut" or not len(self.lengths):
            return np.zeros(0, np.int64), self.lengths
        ptr = torch.from_numpy(np.concatenate([[0], self.lengths.cumsum()]))
        tasks = formerly(ptr) if self.order == "rows" else listed(ptr, self._chunk())[0][:, 1:3]
        is_cut = self.lengths > self._chunk()
        num_others = len(self.lengths) - (0 if self.order == "rows" else int(is_cut.sum()))
        lengths = tasks.diff(dim=1).squeeze(1).numpy()
        return lengths[: len(lengths) - num_others], lengths[len(lengths) - num_others :]
