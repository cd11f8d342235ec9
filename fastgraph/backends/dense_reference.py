"""The specification of ``dense_attention``, graph by graph in torch; see ``reference.py``."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from fastgraph.backends.dropout import dropout_factors
from fastgraph.backends.score_bias import of_types
from fastgraph.plugins.backend import accumulator


class DenseGraph(NamedTuple):
    """A graph all of whose queries attend to all of its keys.

    Attributes:
        begin, num_queries: its queries.
        key_begin, num_keys: its keys and values.
        first_pair: the number of its first pair, for dropout.
    """

    begin: int
    num_queries: int
    key_begin: int
    num_keys: int
    first_pair: int

    def queries(self, x: Tensor) -> Tensor:
        """The rows of its queries, ``[heads, num_queries, channels]``."""
        return x.narrow(0, self.begin, self.num_queries).transpose(0, 1)

    def keys(self, x: Tensor) -> Tensor:
        """The rows of its keys, ``[heads, num_keys, channels]``."""
        return x.narrow(0, self.key_begin, self.num_keys).transpose(0, 1)

    def by_head(self, x: Tensor) -> Tensor:
        """Of what all pairs have, ``[pairs, heads]``: ``[heads, num_queries, num_keys]``."""
        own = x.narrow(0, self.first_pair, self.num_queries * self.num_keys)
        return own.view(self.num_queries, self.num_keys, x.shape[1]).permute(2, 0, 1)


def dense_graphs(ptr: Tensor, key_ptr: Tensor, queries: int, keys: int) -> list[DenseGraph]:
    """The graphs with these offsets.

    Raises:
        ValueError: offsets that fall, or do not begin with 0 or end with the number of rows.
    """
    begins, key_begins = ptr.tolist(), key_ptr.tolist()
    for name, offsets, of, size in (
        ("ptr", begins, "query", queries),
        ("key_ptr", key_begins, "key", keys),
    ):
        if offsets[0] != 0:
            raise ValueError(f"{name} must start with 0, got {offsets[0]}")
        for position, (begin, end) in enumerate(itertools.pairwise(offsets), 1):
            if end < begin:
                raise ValueError(f"{name} must not decrease, got {end} at position {position}")
        if offsets[-1] != size:
            raise ValueError(f"{name} must end with {size} (the size of {of}), got {offsets[-1]}")
    graphs, pairs = [], 0
    spans = zip(itertools.pairwise(begins), itertools.pairwise(key_begins), strict=True)
    for (begin, end), (key_begin, key_end) in spans:
        graphs.append(DenseGraph(begin, end - begin, key_begin, key_end - key_begin, pairs))
        pairs += (end - begin) * (key_end - key_begin)
    return graphs


def of_pairs(bias: Tensor | None, pair_type: Tensor | None, pairs: int) -> Tensor | None:
    """The bias of each of all pairs, ``[pairs, heads]``.

    Raises:
        ValueError: it is of another number of pairs.
        IndexError: the table has no such type.
    """
    check_pairs(bias, pair_type, pairs)
    if bias is None or pair_type is None:
        return bias
    return of_types(bias, pair_type, "pair_type")


def check_pairs(bias: Tensor | None, pair_type: Tensor | None, pairs: int) -> None:
    """Raise ValueError for a bias of another number of pairs."""
    if pair_type is not None:
        if len(pair_type) != pairs:
            raise ValueError(f"pair_type must have shape [{pairs}], got {list(pair_type.shape)}")
    elif bias is not None and len(bias) != pairs:
        raise ValueError(f"bias must have shape [{pairs}, {bias.shape[1]}], got {list(bias.shape)}")


def _dense_softmax(
    graph: DenseGraph,
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    scale: float,
    dropout: float,
    seed: int,
    first_head: int,
    first_pair: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights and factors of dropout, ``[heads, num_queries, num_keys]``, and statistics.

    The graph has keys, and ``bias`` is of all pairs.
    """
    score = scale * (graph.queries(query) @ graph.keys(key).transpose(1, 2))
    if bias is not None:
        score = score + graph.by_head(bias)
    largest = score.detach().amax(-1, keepdim=True)
    if bias is not None:
        largest = largest.masked_fill(largest == -torch.inf, 0)
    exponential = (score - largest).exp()
    total = exponential.sum(-1, keepdim=True)
    inverse = total.reciprocal()
    if bias is not None:  # which may leave a query no key
        is_empty = total == 0
        total = total.masked_fill(is_empty, 1)
        inverse = total.reciprocal().masked_fill(is_empty, 0)
    stats = torch.cat([largest, inverse], dim=-1).transpose(0, 1)
    heads, pairs = score.shape[0], graph.num_queries * graph.num_keys
    by_pair = score.detach().reshape(pairs, heads)
    first = first_pair + graph.first_pair
    keep = dropout_factors(by_pair, dropout, seed, first, first_head)
    keep = keep.reshape(graph.num_queries, graph.num_keys, heads).permute(2, 0, 1)
    return exponential / total, keep, stats


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
    dtype = accumulator(query.dtype)
    wide_query, wide_key, wide_value = (x.to(dtype) for x in (query, key, value))
    heads = query.shape[1]
    outs, stats = [wide_query.narrow(0, 0, 0)], [wide_query.new_empty(0, heads, 2)]
    graphs = dense_graphs(ptr, key_ptr, len(query), len(key))
    added = _of_graphs(bias, pair_type, graphs, dtype)
    for graph in graphs:
        if graph.num_keys == 0:
            outs.append(wide_query.new_zeros(graph.num_queries, *query.shape[1:]))
            stats.append(wide_query.new_zeros(graph.num_queries, heads, 2))
            continue
        options = (scale, dropout, seed, first_head, first_pair)
        weight, keep, found = _dense_softmax(graph, wide_query, wide_key, added, *options)
        outs.append(((keep * weight) @ graph.keys(wide_value)).transpose(0, 1))
        stats.append(found)
    return torch.cat(outs).to(query.dtype), torch.cat(stats)


def _of_graphs(
    bias: Tensor | None, pair_type: Tensor | None, graphs: list[DenseGraph], dtype: torch.dtype
) -> Tensor | None:
    """The bias of all pairs of these graphs."""
    pairs = sum(graph.num_queries * graph.num_keys for graph in graphs)
    return of_pairs(None if bias is None else bias.to(dtype), pair_type, pairs)


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
    dtype = query.dtype
    wide = accumulator(dtype)
    grad, query, key, value = (x.to(wide) for x in (grad, query, key, value))
    # Without pairs, too, each gradient is one of all tensors: a rank that has none is in step with
    # others when gradients are differentiated.
    given = grad, query, key, value
    nothing = torch.stack([x.narrow(0, 0, 0).sum() for x in given]).sum()
    of_query, of_key, of_value = ([x.narrow(0, 0, 0) + nothing] for x in given[1:])
    of_scores = [query.new_empty(0, query.shape[1]) + nothing]
    graphs = dense_graphs(ptr, key_ptr, len(query), len(key))
    added = _of_graphs(bias, pair_type, graphs, wide)
    for graph in graphs:
        if graph.num_keys == 0:
            of_query.append(query.new_zeros(graph.num_queries, *query.shape[1:]))
            continue
        options = (scale, dropout, seed, first_head, first_pair)
        weight, keep, _ = _dense_softmax(graph, query, key, added, *options)
        of_out = graph.queries(grad)
        product = keep * (of_out @ graph.keys(value).transpose(1, 2))
        delta = (weight * product).sum(-1, keepdim=True)
        if grad_logsum is not None:
            delta = delta - graph.queries(grad_logsum.unsqueeze(-1))
        of_score = weight * (product - delta)
        if wants_bias:
            # Reshaped, as flatten has no batching rule.
            heads, queries, keys = of_score.shape
            of_scores.append(of_score.permute(1, 2, 0).reshape(queries * keys, heads))
        scaled = scale * of_score
        of_query.append((scaled @ graph.keys(key)).transpose(0, 1))
        of_key.append((scaled.transpose(1, 2) @ graph.queries(query)).transpose(0, 1))
        of_value.append(((keep * weight).transpose(1, 2) @ of_out).transpose(0, 1))
    found = [torch.cat(parts).to(dtype) for parts in (of_query, of_key, of_value)]
    of_bias = None
    if wants_bias and bias is not None:
        of_bias = torch.cat(of_scores)
        if pair_type is not None:
            table = of_bias.new_zeros(bias.shape)
            of_bias = table.index_add(0, pair_type.int(), of_bias)
        of_bias = of_bias.to(dtype)
    return found[0], found[1], found[2], of_bias
