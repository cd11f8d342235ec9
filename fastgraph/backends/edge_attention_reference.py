"""The specification of ``edge_attention``, edge by edge in torch; see ``reference.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

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


def _to_edges(
    graph: Graph, tensors: Sequence[Any], transpose: bool, scale: float, dropout: float, seed: int
) -> tuple[Attention, Tensor, Tensor]:
    """The softmax, and the keys and values of the edges."""
    query, key, value, edge, weight_edge = tensors
    nodes = gathered, aggregating, _ = endpoints(graph, transpose)
    keys, values = key[gathered], value[gathered]
    if edge is not None:
        of_edges = (edge @ weight_edge).transpose(0, 1)
        keys, values = keys + of_edges, values + of_edges
    score = scale * (query[aggregating] * keys).sum(-1)
    return attend(score, nodes, dropout, seed), keys, values


def edge_attention(graph: Graph, *arguments: Any, addend: Tensor | None = None) -> Results:
    *tensors, transpose, scale, dropout, seed, weights = arguments
    wide = widened(*tensors)
    softmax, _, values = _to_edges(graph, wide, transpose, scale, dropout, seed)
    return results(softmax, values, addend, tensors[0].dtype, weights)


def edge_attention_backward(
    graph: Graph,
    grad: Tensor,
    grad_alpha: Tensor | None,
    grad_logsum: Tensor | None,
    *arguments: Any,
    wanted: Sequence[bool] | None = None,
) -> Gradients:
    *tensors, stats, transpose, scale, dropout, seed = arguments
    grad, grad_alpha = widened(grad, grad_alpha)
    wide = query, key, value, edge, weight_edge = widened(*tensors)
    softmax, keys, values = _to_edges(graph, wide, transpose, scale, dropout, seed)
    softmax = softmax.with_shares(stats)
    grad_score, grad_values = softmax.gradients(grad, grad_alpha, grad_logsum, values)
    scaled = scale * grad_score.unsqueeze(-1)
    grad_keys = scaled * query[softmax.aggregating]
    by_head = (grad_keys + grad_values).transpose(0, 1)
    return made(
        tensors[0],
        wanted,
        lambda: softmax.sum_at(softmax.aggregating, scaled * keys, query.shape[0]),
        lambda: softmax.sum_at(softmax.gathered, grad_keys, key.shape[0]),
        lambda: softmax.sum_at(softmax.gathered, grad_values, value.shape[0]),
        lambda: None if edge is None else (by_head @ weight_edge.transpose(1, 2)).sum(0),
        lambda: None if edge is None else edge.t() @ by_head,
    )
