"""Attention of few rows to many: each rank computes the softmax over its own keys.

A global token attends to all nodes. By halo the rank that has it would get all of them. So queries
go to all ranks, and what comes back are outputs and statistics of parts of a softmax, which are
joined in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from fastgraph import ops
from fastgraph.dist.operators.dense_rows import is_by_rows
from fastgraph.dist.operators.dropout import Dropped, computed_again
from fastgraph.dist.ranks.counts import COUNTS
from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.tensor.collectives import gather, split
from fastgraph.dist.tensor.digests import DIGESTS
from fastgraph.dist.tensor.layout import Consecutive, Layout
from fastgraph.dist.tensor.memo import cached_with_all, on_host
from fastgraph.dist.tensor.sharded import ShardedTensor, aligned, enter
from fastgraph.graphs.offsets import offsets_of
from fastgraph.layers.few_rows import ELSEWHERE, Entries
from fastgraph.ops.merge import joined_statistics, with_shares, without_shares
from fastgraph.ops.spmm import SPMM


class Part(NamedTuple):
    """The entries whose keys this rank has, row by row.

    Attributes:
        sources: local rows of keys, int64.
        ptr: offsets of rows among them.
        positions: which of all entries these are, int64.
    """

    sources: Tensor
    ptr: Tensor
    positions: Tensor


def part_of_entries(entries: Entries, rows: Layout) -> Part:
    """The part of this rank, cached with the entries.

    Args:
        entries: of all ranks.
        rows: the layout of keys.
    """
    given = entries.sources, entries.ptr
    for tensor in given:
        DIGESTS.compare(tensor)
    make = lambda: _part(*given, rows)  # noqa: E731
    return cached_with_all([(x, False) for x in given], ("part of entries", rows), make)


def _part(sources: Tensor, ptr: Tensor, rows: Layout) -> Part:
    held = rows.held(on_host(sources))
    is_own = held.owner == WORLD.rank
    positions = is_own.nonzero().view(-1)
    before = offsets_of(is_own.long())[on_host(ptr - ptr[0])]
    found = held.row[positions], before, positions
    return Part(*(x.to(sources.device) for x in found))


def _of_few_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    entries: Entries,
    table: Tensor | None,
    dropout: float,
    seed: Tensor | None,
) -> Tensor | None:
    if not (is_by_rows(query) and is_by_rows(key) and is_by_rows(value)):
        return None
    # All parts of results are on each rank: they may be as many as a rank has rows, on average.
    if WORLD.size == 1 or query.rows.n * WORLD.size > key.rows.n // WORLD.size:
        return None
    part = part_of_entries(entries, key.rows)
    COUNTS.attention["parts (few rows)"] += 1
    queries = enter(gather(query.local, query.rows, 0))
    keys, values = key.local, aligned(value, key.rows, 0)
    bias = types = None
    if table is not None and entries.types is not None:
        bias, types = enter(table), entries.types.index_select(0, part.positions)

    def compute(given: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
        queries, keys, values, bias = given
        assert queries is not None and keys is not None and values is not None
        out, weights, stats = ops.attention(
            queries,
            keys,
            values,
            part.sources,
            ptr=part.ptr,
            bias=bias,
            bias_index=types,
            need_weights=dropout > 0,
        )
        if weights is not None:
            dropped = Dropped(part.positions + entries.first, dropout, seed)
            weights = weights * dropped.factors(weights)
            out = SPMM(values, part.sources, part.ptr, weights, len(queries), "sum", False)
        return out, stats

    inputs = queries, keys, values, bias
    out, stats = compute(inputs) if dropout == 0 else computed_again(compute, inputs)
    joined = _joined(out, stats)
    return ShardedTensor(split(joined, query.rows, 0), query.rows, 0)


def _joined(out: Tensor, stats: Tensor) -> Tensor:
    """The output for the softmax over the keys of all ranks, replicated.

    Args:
        out: for those of this rank, ``[rows, heads, channels]``.
        stats: likewise, ``[rows, heads, 2]``.
    """
    of_ranks = Consecutive([1] * WORLD.size)
    outs, every = (gather(x[None], of_ranks, 0) for x in (out, stats))
    shares, found = joined_statistics(every)
    parts = shares.unsqueeze(-1) * with_shares(shares, every, outs)
    return without_shares(parts.sum(0).to(out.dtype), found)


ELSEWHERE[ShardedTensor] = _of_few_rows
