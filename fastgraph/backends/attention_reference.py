"""The specification of ``attention``, ``biased_attention`` and ``block_attention``.

See ``reference.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastgraph.backends.score_bias import as_index, of_types
from fastgraph.backends.softmax_reference import (
    Attention,
    Gradients,
    Results,
    attend,
    endpoints,
    made,
    results,
    widened,
)
from fastgraph.graphs.graph import Graph

_NO_BIAS = (None, None, None)


def _with_edges(x: Tensor, edge: Tensor | None) -> Tensor:
    """``x`` ``[E, heads, channels]`` with the edges' channels behind its own."""
    if edge is None:
        return x
    return torch.cat([x, edge.unsqueeze(1).expand(-1, x.shape[1], -1)], dim=-1)


def _from_products(
    graph: Graph, tensors: Sequence[Any], transpose: bool, scale: float, dropout: float, seed: int
) -> tuple[Attention, Tensor]:
    """The softmax, and the keys of the edges."""
    query, key, _, edge, bias, table, bias_index = tensors
    nodes = endpoints(graph, transpose)
    keys = _with_edges(key[nodes[0]], edge)
    score = scale * (query[nodes[1]] * keys).sum(-1)
    if bias is not None:
        score = score + bias
    if table is not None:
        score = score + of_types(table, bias_index, "bias_index")
    is_biased = bias is not None or table is not None
    return attend(score, nodes, dropout, seed, may_hide_all=is_biased), keys


def biased_attention(graph: Graph, *arguments: Any, addend: Tensor | None = None) -> Results:
    *tensors, bias_index, transpose, scale, dropout, seed, weights = arguments
    wide = [*widened(*tensors), bias_index]
    softmax, _ = _from_products(graph, wide, transpose, scale, dropout, seed)
    values = _with_edges(wide[2][softmax.gathered], wide[3])
    return results(softmax, values, addend, tensors[0].dtype, weights)


def biased_attention_backward(
    graph: Graph,
    grad: Tensor,
    grad_alpha: Tensor | None,
    grad_logsum: Tensor | None,
    *arguments: Any,
    wanted: Sequence[bool] | None = None,
) -> Gradients:
    *tensors, bias_index, stats, transpose, scale, dropout, seed = arguments
    grad, grad_alpha = widened(grad, grad_alpha)
    wide = query, key, value, edge, bias, table = widened(*tensors)
    inputs = [*wide, bias_index]
    softmax, keys = _from_products(graph, inputs, transpose, scale, dropout, seed)
    softmax = softmax.with_shares(stats)
    values = _with_edges(value[softmax.gathered], edge)
    grad_score, grad_values = softmax.gradients(grad, grad_alpha, grad_logsum, values)
    scaled = scale * grad_score.unsqueeze(-1)
    grad_keys = scaled * query[softmax.aggregating]
    channels = key.shape[-1]

    def of_sources(grads: Tensor) -> Tensor:
        # Batched gradients do not know the view that `grads[..., :channels]` would make.
        return softmax.sum_at(softmax.gathered, grads.narrow(-1, 0, channels), key.shape[0])

    def of_edges() -> Tensor | None:
        if edge is None:
            return None
        both: Tensor = grad_keys + grad_values
        return both.narrow(-1, channels, edge.shape[1]).sum(1)

    def of_table() -> Tensor | None:
        if table is None:
            return None
        return softmax.sum_at(as_index(bias_index), grad_score, len(table))

    return made(
        tensors[0],
        wanted,
        lambda: softmax.sum_at(softmax.aggregating, scaled * keys, query.shape[0]),
        lambda: of_sources(grad_keys),
        lambda: of_sources(grad_values),
        of_edges,
        lambda: None if bias is None else grad_score,
        of_table,
        lambda: None,
    )


def attention(
    graph: Graph,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edge: Tensor | None,
    transpose: bool,
    scale: float,
    dropout: float,
    seed: int,
    weights: bool,
    *,
    addend: Tensor | None = None,
) -> Results:
    tensors = (query, key, value, edge, *_NO_BIAS)
    options = (transpose, scale, dropout, seed, weights)
    return biased_attention(graph, *tensors, *options, addend=addend)


def attention_backward(
    graph: Graph,
    grad: Tensor,
    grad_alpha: Tensor | None,
    grad_logsum: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edge: Tensor | None,
    stats: Tensor,
    transpose: bool,
    scale: float,
    dropout: float,
    seed: int,
    *,
    wanted: Sequence[bool] | None = None,
) -> Gradients:
    tensors = (query, key, value, edge, *_NO_BIAS)
    options = (stats, transpose, scale, dropout, seed)
    grads = (grad, grad_alpha, grad_logsum)
    return biased_attention_backward(
        graph,
        *grads,
        *tensors,
        *options,
        wanted=None if wanted is None else (*wanted, False, False, False),
    )[:4]


def block_attention(graph: Graph, *arguments: Any, addend: Tensor | None = None) -> Results:
    query, key, value, table, bias_index, *options = arguments
    tensors = (query, key, value, None, None, table, bias_index)
    return biased_attention(graph, *tensors, *options, addend=addend)


def block_attention_backward(
    graph: Graph, *arguments: Any, wanted: Sequence[bool] | None = None
) -> Gradients:
    *grads, query, key, value, table, bias_index, stats = arguments[:9]
    tensors = (query, key, value, None, None, table, bias_index)
    if wanted is not None:
        wanted = (*wanted[:3], False, False, *wanted[3:])
    found = biased_attention_backward(graph, *grads, *tensors, stats, *arguments[9:], wanted=wanted)
    return (*found[:3], *found[5:])
