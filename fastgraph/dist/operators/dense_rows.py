"""Attention of all pairs by rows: each rank has some of the queries, and all of their keys.

So one head can be shared out, and of what pairs have, each rank has a part. Queries of a rank
follow each other, and have about as many pairs as those of others, whatever the sizes of graphs.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from fastgraph.dist.ranks.counts import COUNTS
from fastgraph.dist.ranks.own_device import HOST
from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.tensor.collectives import with_halo
from fastgraph.dist.tensor.digests import DIGESTS
from fastgraph.dist.tensor.exchange import Plan
from fastgraph.dist.tensor.layout import Consecutive, Layout
from fastgraph.dist.tensor.memo import cached_with_all, on, on_host
from fastgraph.dist.tensor.sharded import ShardedTensor, aligned, enter, is_sharded
from fastgraph.dist.tensor.table import NoRuleError
from fastgraph.graphs.offsets import offsets_of
from fastgraph.layers.typed_pairs import ELSEWHERE, TypesOf
from fastgraph.ops.dense_attention import DENSE_ATTENTION


class Share(NamedTuple):
    """The pairs of this rank.

    Attributes:
        queries: the layout of queries, of which each rank has consecutive ones.
        begin, end: those of this rank.
        ptr: their offsets, graph by graph, of the graphs that have any of them.
        key_ptr: offsets of the keys of these graphs.
        plan: the exchange of these keys.
        first_pair: the number of the first pair.
    """

    queries: Layout
    begin: int
    end: int
    ptr: Tensor
    key_ptr: Tensor
    plan: Plan
    first_pair: int


def share_of(ptr: Tensor, key_ptr: Tensor, targets: Layout, rows: Layout) -> Share:
    """The pairs that this rank computes, cached with the offsets.

    Args:
        ptr: offsets of queries, a replicated tensor.
        key_ptr: offsets of keys, likewise.
        targets: the layout of queries.
        rows: the layout of keys.

    Raises:
        NoRuleError: offsets are none, of which one process says what is wrong.
    """
    DIGESTS.compare(ptr)
    DIGESTS.compare(key_ptr)
    make = lambda: _share(ptr, key_ptr, targets, rows)  # noqa: E731
    given = [(ptr, False), (key_ptr, False)]
    return cached_with_all(given, ("share of pairs", targets, rows), make)


def _share(ptr: Tensor, key_ptr: Tensor, targets: Layout, rows: Layout) -> Share:
    offsets, key_offsets = (on_host(x).long() for x in (ptr, key_ptr))
    _check(offsets, key_offsets, targets.n, rows.n)
    keys = key_offsets.diff()
    pairs = offsets_of(offsets.diff() * keys)
    targeted = pairs[-1] * torch.arange(1, WORLD.size, device=HOST) // WORLD.size
    graph = torch.bucketize(targeted, pairs[1:-1], right=True)
    inner = offsets[graph] + (targeted - pairs[graph]) // keys[graph].clamp(min=1)
    cuts = [0, *inner.tolist(), targets.n]
    begin, end = cuts[WORLD.rank : WORLD.rank + 2]
    first = int(torch.bucketize(begin, offsets[1:-1], right=True))
    last = max(int(torch.bucketize(end, offsets)), first) if begin < end else first
    own, own_keys = offsets[first : last + 1], key_offsets[first : last + 1]
    before = int(pairs[first]) + (begin - int(own[0])) * int(keys[first])
    return Share(
        Consecutive([stop - start for start, stop in pairwise(cuts)]),
        begin,
        end,
        (own.clamp(begin, end) - begin).to(ptr.device),
        (own_keys - own_keys[0]).to(ptr.device),
        Plan(torch.arange(int(own_keys[0]), int(own_keys[-1]), device=HOST), rows),
        before,
    )


def _check(ptr: Tensor, key_ptr: Tensor, queries: int, keys: int) -> None:
    for offsets, size in ((ptr, queries), (key_ptr, keys)):
        is_usable = offsets.dim() == 1 and len(offsets) > 1 and len(ptr) == len(key_ptr)
        if not is_usable or int(offsets[0]) or int(offsets[-1]) != size:
            raise NoRuleError
        if bool((offsets.diff() < 0).any()):
            raise NoRuleError


def by_rows(
    query: ShardedTensor,
    key: ShardedTensor,
    value: ShardedTensor,
    ptr: Tensor,
    key_ptr: Tensor | None,
    table: Tensor | None,
    types_of: TypesOf | None,
    seed: Tensor | None,
    scale: float,
    dropout: float,
    first_head: int = 0,
    first_pair: int = 0,
) -> tuple[ShardedTensor, ShardedTensor]:
    """:func:`fastgraph.ops.dense_attention` of this rank's queries, with the same numbers.

    A rank has the keys and values of the graphs of its queries, and the types of their pairs.

    Args:
        query: ``[queries, heads, channels]``, sharded by rows, as all three are.
        key: ``[keys, heads, channels]``.
        value: the same.
        ptr: offsets of queries, a plain tensor.
        key_ptr: those of keys, if they are others.
        table: biases by types, a plain tensor, or none.
        types_of: gives the types of pairs, with a table.
        seed: of dropout.
        scale: of scores.
        dropout: of weights.
        first_head: the number of the first head.
        first_pair: that of the first pair of all ranks.

    Returns:
        The output, laid out like the query, and statistics.

    Raises:
        NoRuleError: offsets are none.
    """
    share = share_of(ptr, ptr if key_ptr is None else key_ptr, query.rows, key.rows)
    COUNTS.attention["rows (dense)"] += 1
    place = on(share.plan.place, query.device)
    local = key.local, aligned(value, key.rows, 0)
    keys, values = (x.index_select(0, place) for x in with_halo(local, share.plan))
    out, stats = DENSE_ATTENTION(
        query.aligned(share.queries),
        keys,
        values,
        None if table is None else enter(table),
        share.ptr,
        share.key_ptr,
        None if types_of is None else types_of(share.begin, share.end),
        seed,
        scale,
        dropout,
        first_head,
        first_pair + share.first_pair,
    )
    moved = ShardedTensor(out, share.queries, 0).aligned(query.rows)
    return ShardedTensor(moved, query.rows, 0), ShardedTensor(stats, share.queries, 0)


def is_by_rows(x: Tensor) -> TypeGuard[ShardedTensor]:
    """True if queries, keys or values are sharded by their first dimension, of three."""
    return is_sharded(x) and x.axis == 0 and x.dim() == 3


def _by_types(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ptr: Tensor,
    table: Tensor,
    types_of: TypesOf,
    dropout: float,
    seed: Tensor | None,
) -> Tensor | None:
    if not (is_by_rows(query) and is_by_rows(key) and is_by_rows(value)):
        return None
    if is_sharded(ptr) or is_sharded(table):
        return None
    scale = max(query.shape[-1], 1) ** -0.5
    return by_rows(query, key, value, ptr, None, table, types_of, seed, scale, dropout)[0]


ELSEWHERE[ShardedTensor] = _by_types
