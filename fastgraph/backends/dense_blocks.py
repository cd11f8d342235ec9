"""``dense_attention`` on any device in torch's operations, in blocks of bounded memory.

Graphs of one size are computed side by side, and large ones by some of their queries at a time,
with their scores once more in the backward pass (Dao et al., "FlashAttention", NeurIPS 2022). What
is stored grows with nodes, besides one block. torch's own ``scaled_dot_product_attention`` tells
nothing of its softmax, which results have, and draws other numbers for dropout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastgraph.backends.dense_reference import DenseGraph, check_pairs, dense_graphs
from fastgraph.backends.dropout import dropout_factors
from fastgraph.backends.reference import ReferenceBackend
from fastgraph.backends.score_bias import as_index, check_types
from fastgraph.plugins.backend import Kernel, accumulator

SCORES = 1 << 23
"""Scores of a block at most, unless a single query has more; a few tensors have its size."""
DRAWN = 1 << 21
"""The same with dropout, whose numbers take some ten integers for each score while drawn."""
SUMMED = 256
"""Terms of a sum over pairs of a type that are added one after another."""


class DenseBlocksBackend(ReferenceBackend):
    """``dense_attention`` in blocks, and all else by the reference.

    Operators fall to it on devices without kernels of their own; layers are not routed to it.
    """

    name = "blocks"

    def kernel(self, operator: str, device_type: str, dtype: torch.dtype) -> Kernel | None:
        return _KERNELS.get(operator) or super().kernel(operator, device_type, dtype)


class _Rows:
    """So many rows of each of some graphs, as a slice where these follow each other."""

    def __init__(self, begins: Sequence[int], count: int, device: torch.device) -> None:
        self.graphs, self.count = len(begins), count
        first, size = begins[0], len(begins) * count
        self.first, self.size = first, size
        self.index: Tensor | None = None
        if any(begin != first + i * count for i, begin in enumerate(begins)):
            firsts = torch.tensor(begins, device=device).unsqueeze(-1)
            self.index = (firsts + torch.arange(count, device=device)).flatten()

    def numbers(self, device: torch.device) -> Tensor:
        """The rows, int64 ``[graphs * count]``."""
        if self.index is not None:
            return self.index
        return torch.arange(self.first, self.first + self.size, device=device)

    def of(self, x: Tensor) -> Tensor:
        """Those of a tensor."""
        if self.index is not None:
            return x.index_select(0, self.index)
        return x.narrow(0, self.first, self.size)

    def by_head(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Those of ``[rows, heads, channels]``: ``[graphs, heads, count, channels]``."""
        rows = self.of(x).view(self.graphs, self.count, *x.shape[1:])
        return rows.transpose(1, 2).to(dtype)

    def put(self, x: Tensor, rows: Tensor) -> None:
        """Write what :meth:`by_head` has read."""
        self.put_flat(x, rows.transpose(1, 2).reshape(self.size, *x.shape[1:]))

    def put_flat(self, x: Tensor, rows: Tensor) -> None:
        """Write rows, each to its place."""
        if self.index is not None:
            x.index_copy_(0, self.index, rows.to(x.dtype))
        else:
            x.narrow(0, self.first, self.size).copy_(rows)


class _Alike(NamedTuple):
    """Graphs of one size, so many that a block holds them, or one of which it holds a part."""

    graphs: list[DenseGraph]
    at_once: int  # queries of a block

    def keys(self, device: torch.device) -> _Rows:
        begins = [graph.key_begin for graph in self.graphs]
        return _Rows(begins, self.graphs[0].num_keys, device)

    def blocks(self, device: torch.device) -> Iterator[tuple[_Rows, _Rows]]:
        """The rows of queries and of pairs of each block."""
        queries, keys = self.graphs[0].num_queries, self.graphs[0].num_keys
        for first in range(0, queries, self.at_once):
            count = min(self.at_once, queries - first)
            begins = [graph.begin + first for graph in self.graphs]
            pairs = [graph.first_pair + first * keys for graph in self.graphs]
            yield _Rows(begins, count, device), _Rows(pairs, count * keys, device)


def _alike(graphs: list[DenseGraph], heads: int, dropout: float) -> Iterator[_Alike]:
    """Graphs that have pairs, side by side with others of their size."""
    most = max(1, (DRAWN if dropout > 0 else SCORES) // max(heads, 4))
    by_size: dict[tuple[int, int], list[DenseGraph]] = {}
    for graph in graphs:
        if graph.num_queries and graph.num_keys:
            by_size.setdefault((graph.num_queries, graph.num_keys), []).append(graph)
    for (queries, keys), found in by_size.items():
        together = max(1, most // (queries * keys))
        at_once = min(queries, max(1, most // keys))
        for begin in range(0, len(found), together):
            yield _Alike(found[begin : begin + together], at_once)


class _Scores:
    """Scores of blocks, by what all of them have in common (:mod:`fastgraph.plugins.backend`)."""

    def __init__(
        self,
        query: Tensor,
        bias: Tensor | None,
        pair_type: Tensor | None,
        graphs: list[DenseGraph],
        scale: float,
        dropout: float,
        seed: int,
        first_head: int,
        first_pair: int,
    ) -> None:
        check_pairs(bias, pair_type, sum(graph.num_queries * graph.num_keys for graph in graphs))
        if bias is not None and pair_type is not None:
            check_types(bias, pair_type, "pair_type")
        self.dtype, self.device = accumulator(query.dtype), query.device
        self.bias, self.pair_type, self.heads = bias, pair_type, query.shape[1]
        self._scale, self._dropout, self._seed = scale, dropout, seed
        self._first_head, self._first_pair = first_head, first_pair

    def of(self, query: Tensor, key: Tensor, pairs: _Rows) -> Tensor:
        """Scores ``[graphs, heads, queries, keys]`` of a block."""
        score = (query @ key.transpose(2, 3)).mul_(self._scale)
        if self.bias is not None:
            own = self.bias if self.pair_type is not None else pairs.of(self.bias)
            if self.pair_type is not None:
                own = own.index_select(0, self.types(pairs))
            score += self._by_score(own, score)
        return score

    def types(self, pairs: _Rows) -> Tensor:
        assert self.pair_type is not None
        return as_index(pairs.of(self.pair_type))

    def keep(self, score: Tensor, pairs: _Rows) -> Tensor | None:
        """The factors of dropout, like scores, or ``None`` without."""
        if self._dropout == 0:
            return None
        number = self._first_pair + pairs.numbers(self.device)
        like = score.new_empty(()).expand(pairs.size, self.heads)
        return self._by_score(
            dropout_factors(like, self._dropout, self._seed, number, self._first_head), score
        )

    def by_pair(self, score: Tensor) -> Tensor:
        """``[pairs, heads]`` of what scores have."""
        return score.permute(0, 2, 3, 1).reshape(-1, self.heads)

    def _by_score(self, of_pairs: Tensor, score: Tensor) -> Tensor:
        graphs, heads, queries, keys = score.shape
        return of_pairs.view(graphs, queries, keys, heads).permute(0, 3, 1, 2)


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    ptr: Tensor,
    key_ptr: Tensor,
    pair_type: Tensor | None,
    scale: float,
    dropout: float,
    seed: int,
    first_head: int,
    first_pair: int,
) -> tuple[Tensor, Tensor]:
    graphs = dense_graphs(ptr, key_ptr, len(query), len(key))
    options = (scale, dropout, seed, first_head, first_pair)
    scores = _Scores(query, bias, pair_type, graphs, *options)
    dtype = scores.dtype
    out = torch.zeros_like(query)  # as without keys
    stats = query.new_zeros((*query.shape[:2], 2), dtype=dtype)
    for alike in _alike(graphs, scores.heads, dropout):
        keys = alike.keys(query.device)
        own_key, own_value = keys.by_head(key, dtype), keys.by_head(value, dtype)
        for rows, pairs in alike.blocks(query.device):
            score = scores.of(rows.by_head(query, dtype), own_key, pairs)
            largest = score.amax(-1, keepdim=True)
            if bias is not None:  # which may leave a query no key
                largest.masked_fill_(largest == -torch.inf, 0)
            weight = score.sub_(largest).exp_()
            total = weight.sum(-1, keepdim=True)
            inverse = total.reciprocal()
            if bias is not None:
                is_empty = total == 0
                inverse.masked_fill_(is_empty, 0)
                total.masked_fill_(is_empty, 1)
            weight /= total
            keep = scores.keep(weight, pairs)
            if keep is not None:
                weight *= keep
            rows.put(out, weight @ own_value)
            rows.put(stats, torch.cat([largest, inverse], dim=-1))
    return out, stats


def dense_attention_backward(
    grad: Tensor,
    grad_logsum: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    ptr: Tensor,
    key_ptr: Tensor,
    pair_type: Tensor | None,
    out: Tensor,
    stats: Tensor,
    scale: float,
    dropout: float,
    seed: int,
    first_head: int,
    first_pair: int,
    wants_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    graphs = dense_graphs(ptr, key_ptr, len(query), len(key))
    options = (scale, dropout, seed, first_head, first_pair)
    scores = _Scores(query, bias, pair_type, graphs, *options)
    dtype = scores.dtype
    of_query, of_key, of_value = (torch.zeros_like(x) for x in (query, key, value))
    of_bias = None
    if wants_bias and bias is not None:
        of_bias = bias.new_zeros(bias.shape, dtype=bias.dtype if pair_type is None else dtype)
    for alike in _alike(graphs, scores.heads, dropout):
        keys = alike.keys(query.device)
        own_key, own_value = keys.by_head(key, dtype), keys.by_head(value, dtype)
        sum_key, sum_value = torch.zeros_like(own_key), torch.zeros_like(own_value)
        for rows, pairs in alike.blocks(query.device):
            own_query, own_grad = rows.by_head(query, dtype), rows.by_head(grad, dtype)
            largest, inverse = rows.by_head(stats, dtype).split(1, dim=-1)
            weight = scores.of(own_query, own_key, pairs).sub_(largest).exp_().mul_(inverse)
            product = own_grad @ own_value.transpose(2, 3)
            kept, keep = weight, scores.keep(weight, pairs)
            if keep is not None:
                product *= keep
                kept = keep.mul_(weight)
            sum_value += kept.transpose(2, 3) @ own_grad
            delta = (weight * product).sum(-1, keepdim=True)
            if grad_logsum is not None:
                delta -= rows.by_head(grad_logsum.unsqueeze(-1), dtype)
            of_score = product.sub_(delta).mul_(weight)
            if of_bias is not None and pair_type is None:
                pairs.put_flat(of_bias, scores.by_pair(of_score))
            elif of_bias is not None:
                _add_by_type(of_bias, scores.types(pairs), scores.by_pair(of_score))
            of_score *= scale
            rows.put(of_query, of_score @ own_key)
            sum_key += of_score.transpose(2, 3) @ own_query
        keys.put(of_key, sum_key)
        keys.put(of_value, sum_value)
    return of_query, of_key, of_value, None if of_bias is None else of_bias.to(query.dtype)


def _add_by_type(table: Tensor, types: Tensor, values: Tensor) -> None:
    """Add to each row of a table the values of its type, always in the same order.

    In the order of types values are cut at types, and into pieces, which are summed first: atomic
    sums would have other bits each time, and a sum of one after another more error.
    """
    in_order, order = types.sort(stable=True)
    kinds = torch.arange(len(table), device=types.device, dtype=types.dtype)
    ends = torch.searchsorted(in_order, kinds, right=True)
    cuts = torch.arange(0, len(types), SUMMED, device=types.device)
    begins = torch.cat([cuts, ends]).sort().values
    lengths = torch.diff(begins, append=begins.new_full((1,), len(types)))
    pieces = _sums(values.index_select(0, order), lengths)
    # Those that begin where all types have ended are empty.
    of_piece = torch.searchsorted(ends, begins, right=True).clamp_(max=len(table) - 1)
    of_kind = torch.searchsorted(of_piece, kinds.to(of_piece.dtype), right=True)
    table += _sums(pieces, torch.diff(of_kind, prepend=of_kind.new_zeros(1)))


def _sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Sums over so many rows each, one after the other; of none 0."""
    return torch.segment_reduce(values, "sum", lengths=lengths, axis=0, unsafe=True)


_KERNELS: dict[str, Kernel] = {
    "dense_attention": dense_attention,
    "dense_attention_backward": dense_attention_backward,
}
