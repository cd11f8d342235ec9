"""Attention of all pairs, with biases by types of pairs that are made for some queries alone."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fastgraph import ops
from fastgraph.ops.heads import drawn_seed

TypesOf = Callable[[int, int], Tensor]
"""The types of the pairs of the queries from one on and before another, in their order."""

ELSEWHERE: dict[type, Callable[..., Tensor | None]] = {}
"""By subclasses of tensors, what takes the place of :func:`attention_by_types` for these; ``None``
is its result where it does not cover a call. It takes a seed besides."""


def attention_by_types(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ptr: Tensor,
    table: Tensor,
    types_of: TypesOf,
    dropout: float,
) -> Tensor:
    """The output of :func:`fastgraph.ops.dense_attention`, whose ``pair_type`` is made by need.

    On several ranks each asks for the types of some queries, with all of their keys, and has a part
    of all pairs.

    Args:
        query: ``[nodes, heads, channels]``.
        key: the same.
        value: the same.
        ptr: offsets of graphs, int64 ``[graphs + 1]``.
        table: biases, ``[types, heads]``.
        types_of: gives their rows in it; there are no others.
        dropout: of weights.
    """
    seed, attend = drawn_seed(dropout), ELSEWHERE.get(type(query))
    found = attend and attend(query, key, value, ptr, table, types_of, dropout, seed)
    if found is not None:
        return found
    types = types_of(0, len(query))
    out, _ = ops.dense_attention(
        query, key, value, ptr, bias=table, pair_type=types, dropout=dropout, seed=seed
    )
    return out
