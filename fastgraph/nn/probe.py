"""Probes: what attention along edges misses of that of all pairs, at some random queries."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastgraph import ops
from fastgraph.graphs.offsets import offsets_of
from fastgraph.nn.dual_pattern import DualPattern, entries_of
from fastgraph.nn.sub_blocks import Reformed

LONGEST_PERIOD = 64


@dataclass(frozen=True)
class Probe:
    """Attention along edges beside that of all pairs, at random queries.

    Attributes:
        queries: how many were looked at.
        mass: the part of the softmax over all pairs that is outside the pattern, the mean of
            queries and heads, 0 to 1.
        largest_mass: of one query and head.
        error: how far outputs along edges are from those of all pairs, by the norm of these, the
            mean of queries.
    """

    queries: int
    mass: float
    largest_mass: float
    error: float

    @property
    def period(self) -> int:
        """A period for :class:`Schedule`: dense turns come as often as sparse ones miss.

        Their share is at least ``mass``, the probability that attention leads out of the pattern.
        """
        return max(1, int(1 / max(self.mass, 1 / LONGEST_PERIOD)))

    def __str__(self) -> str:
        return (
            f"{self.queries} queries: {self.mass:.1%} of attention outside the pattern, at most "
            f"{self.largest_mass:.1%}; outputs differ by {self.error:.1%}; "
            f"recommended period: {self.period}"
        )


@torch.no_grad()
def probe(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: DualPattern,
    along: DualPattern | Reformed,
    table: Tensor | None,
    hops: int,
    queries: int,
    seed: int,
) -> Probe:
    """Compare both for random rows, in time and memory of ``queries`` times rows.

    Args:
        query: ``[rows, heads, channels]``.
        key: the same.
        value: the same.
        pattern: of the rows.
        along: the entries of sparse turns.
        table: biases by types of pairs, ``[types, heads]``.
        hops: up to which distance pairs have types of their own.
        queries: how many, at least 1.
        seed: of their choice, the same on all ranks.
    """
    if queries < 1:
        raise ValueError(f"queries: expected at least 1, got {queries}")
    if not pattern.num_rows:
        raise ValueError("x: expected at least one node, got none")
    draw = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(pattern.num_rows, generator=draw)[:queries].sort().values
    chosen = chosen.to(query.device)  # places, graph by graph
    rows = chosen if pattern.order is None else pattern.order[chosen]
    pair_type = None if table is None else pattern.pair_types(rows, hops)
    dense, of_dense = ops.dense_attention(
        query[rows],
        pattern.in_order(key),
        pattern.in_order(value),
        torch.searchsorted(chosen, pattern.offsets),
        key_ptr=pattern.offsets,
        bias=table,
        pair_type=pair_type,
    )
    entries, counts = entries_of(along.ptr, rows)
    sparse, _, of_sparse = ops.attention(
        query[rows],
        key,
        value,
        along.sources[entries],
        ptr=offsets_of(counts),
        bias=table,
        bias_index=None if table is None else along.types[entries],
    )
    missed = -torch.expm1(_logsums(of_sparse) - _logsums(of_dense))
    missed = missed.clamp(0, 1)  # rounding
    error = (sparse - dense).flatten(1).norm(dim=1) / dense.flatten(1).norm(dim=1).clamp(min=1e-30)
    return Probe(len(rows), float(missed.mean()), float(missed.max()), float(error.mean()))


def _logsums(stats: Tensor) -> Tensor:
    """Logarithms of the sums of exponentials of scores, ``[rows, heads]``."""
    largest, inverse = stats.double().unbind(-1)
    return largest - inverse.log()
