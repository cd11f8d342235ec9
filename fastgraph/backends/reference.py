"""The specification: every operator in a few lines of torch, on any device.

Messages are stored (memory grows with edges x channels), and the functions are differentiable, so
they also serve as the second derivative of the fused kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from fastgraph.backends.attention_reference import attention as attention
from fastgraph.backends.attention_reference import attention_backward as attention_backward
from fastgraph.backends.attention_reference import biased_attention as biased_attention
from fastgraph.backends.attention_reference import (
    biased_attention_backward as biased_attention_backward,
)
from fastgraph.backends.attention_reference import block_attention as block_attention
from fastgraph.backends.attention_reference import (
    block_attention_backward as block_attention_backward,
)
from fastgraph.backends.building import BY_TORCH, TorchBuilder
from fastgraph.backends.dense_reference import dense_attention as dense_attention
from fastgraph.backends.dense_reference import dense_attention_backward as dense_attention_backward
from fastgraph.backends.edge_attention_reference import edge_attention as edge_attention
from fastgraph.backends.edge_attention_reference import (
    edge_attention_backward as edge_attention_backward,
)
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
from fastgraph.edge_programs.evaluation import Edges, evaluate
from fastgraph.edge_programs.program import Program
from fastgraph.graphs.graph import Graph
from fastgraph.plugins.backend import FALLBACK_PRIORITY, Kernel, accumulator
from fastgraph.registry.operators import SIGNATURES


class ReferenceBackend:
    """Pure torch, used where nothing else exists and on request."""

    name = "reference"
    priority = FALLBACK_PRIORITY

    def unavailable(self) -> str | None:
        return None

    def kernel(self, operator: str, device_type: str, dtype: torch.dtype) -> Kernel | None:
        kernel: Kernel | None = globals()[operator] if operator in SIGNATURES else None
        return kernel

    def builder(self, device_type: str) -> TorchBuilder:
        return BY_TORCH


def messages(x: Tensor, weight: Tensor | None, gathered: Tensor) -> Tensor:
    """``w_e x_j`` for each edge, ``[E, channels]``; weights are ``[E]`` or ``[E, heads]``."""
    rows = x.index_select(0, gathered)
    if weight is None:
        return rows
    return _by_head(rows, 1 if weight.dim() == 1 else weight.shape[1], weight)


def _by_head(rows: Tensor, heads: int, factor: Tensor) -> Tensor:
    """The products of the channels of each head with a factor ``[E]`` or ``[E, heads]``."""
    by_head = rows.reshape(rows.shape[0], heads, rows.shape[1] // heads)
    return (by_head * factor.reshape(-1, heads, 1)).reshape(rows.shape)


def spmm(graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, transpose: bool) -> Tensor:
    gathered, aggregating, num_out = endpoints(graph, transpose)
    dtype = accumulator(x.dtype)
    message = messages(x.to(dtype), None if weight is None else weight.to(dtype), gathered)
    if reduce == "mean_adjoint":
        scale = graph.inverse_degree(transpose=not transpose, dtype=dtype)
        message = message * scale[gathered].unsqueeze(-1)
    out = message.new_zeros(num_out, x.shape[1]).index_add(0, aggregating, message)
    if reduce == "mean":
        out = out * graph.inverse_degree(transpose=transpose, dtype=dtype).unsqueeze(-1)
    return out.to(x.dtype)


def sddmm(
    graph: Graph, grad: Tensor, x: Tensor, heads: int, reduce: str, transpose: bool
) -> Tensor:
    gathered, aggregating, _ = endpoints(graph, transpose)
    dtype = accumulator(x.dtype)
    product = grad.to(dtype)[aggregating] * x.to(dtype)[gathered]
    out = product.view(product.shape[0], heads, x.shape[1] // heads).sum(-1)
    if reduce == "mean":
        degree = graph.inverse_degree(transpose=transpose, dtype=dtype)
        out = out * degree[aggregating].unsqueeze(-1)
    if reduce == "mean_adjoint":
        degree = graph.inverse_degree(transpose=not transpose, dtype=dtype)
        out = out * degree[gathered].unsqueeze(-1)
    return out.to(x.dtype)


def edge_softmax(graph: Graph, score: Tensor, transpose: bool) -> Tensor:
    wide = score.to(accumulator(score.dtype))
    return attend(wide, endpoints(graph, transpose), 0, 0).weight.to(score.dtype)


def edge_softmax_backward(graph: Graph, out: Tensor, grad: Tensor, transpose: bool) -> Tensor:
    _, aggregating, num_out = endpoints(graph, transpose)
    weight, wide = widened(out, grad)
    product = weight * wide
    total = Attention.sum_at(aggregating, product, num_out)
    grad_score: Tensor = product - weight * total[aggregating]
    return grad_score.to(out.dtype)


def edge_program(
    graph: Graph, operands: Sequence[Tensor], program: Program, transpose: bool
) -> list[Tensor]:
    edges = Edges(*endpoints(graph, transpose))
    return evaluate(program, operands, edges, accumulator(operands[0].dtype))


def segment_reduce(
    graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, transpose: bool, ties: str
) -> tuple[Tensor, Tensor]:
    gathered, aggregating, num_out = endpoints(graph, transpose)
    message = messages(x, weight, gathered)
    index = aggregating.unsqueeze(-1).expand_as(message)
    out = message.new_zeros(num_out, x.shape[1]).scatter_reduce(
        0, index, message, reduce=f"a{reduce}", include_self=False
    )
    start = -torch.inf if reduce == "max" else torch.inf
    return out, extremum_record(message, out, index, ties, start)


def extremum_record(
    message: Tensor, out: Tensor, index: Tensor, ties: str, start: float | None = None
) -> Tensor:
    """The record that the backward needs besides ``out``; see :mod:`fastgraph.plugins.backend`.

    ``start`` is what the search for the extremum began with, which no edge wins by.
    """
    if ties == "none":
        return out.new_empty(0, dtype=torch.int32)
    attained = message == out.gather(0, index)
    if ties == "split":
        # The output starts as zeros, and a zero extremum of a non-empty row shares with them.
        zeros = ((out == 0) & torch.zeros_like(out, dtype=torch.bool).scatter(0, index, True)).int()
        return zeros.scatter_add(0, index, attained.int())
    # The first edge that attains it, but the last one with a NaN, as in torch.sparse.mm.
    if start is not None:
        attained &= message != start
    edge = edge_numbers(message)
    nobody = torch.full_like(out, -1, dtype=torch.int32)
    last = nobody.scatter_reduce(0, index, torch.where(message.isnan(), edge, -1), reduce="amax")
    beyond = torch.iinfo(torch.int32).max
    first = torch.full_like(nobody, beyond).scatter_reduce(
        0, index, torch.where(attained, edge, beyond), reduce="amin"
    )
    return torch.where(first < beyond, first, last)


def num_shares(record: Tensor) -> Tensor:
    """The numbers in what a backend records for ``"split"``: 1 where it says which edge it is."""
    return torch.where(record < 0, 1, record)


def segment_reduce_backward(
    graph: Graph,
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    out: Tensor,
    record: Tensor,
    transpose: bool,
    ties: str,
) -> Tensor:
    gathered, aggregating, _ = endpoints(graph, transpose)
    message = messages(x.detach(), weight, gathered)
    if ties == "split":
        # A NaN divides by 0, and so do rows without edges, which no edge reads, but a second
        # derivative would have a NaN there.
        shares = num_shares(record)
        is_read = torch.zeros_like(shares, dtype=torch.bool)
        is_read = is_read.index_fill(0, aggregating, True)
        grad = grad / torch.where(is_read, shares, shares.clamp(min=1))
        recorded, edge = record[aggregating], edge_numbers(message)
        attains = torch.where(recorded < 0, ~recorded == edge, message == out.detach()[aggregating])
        share = (attains & (recorded != 0)).to(grad.dtype)
        grad_message = share * grad[aggregating]
    else:
        grad_message = grad[aggregating]
    if weight is not None:
        grad_message = grad_message * weight.unsqueeze(-1)
    if ties == "winner":  # after the product: the weights of losers may be infinite
        won = record[aggregating] == edge_numbers(message)
        grad_message = torch.where(won, grad_message, 0)
    dtype = accumulator(x.dtype)
    grad_x = grad_message.new_zeros(x.shape, dtype=dtype)
    return grad_x.index_add(0, gathered, grad_message.to(dtype)).to(x.dtype)


def edge_numbers(message: Tensor) -> Tensor:
    """The number of the edge of each message, int32 ``[E, 1]``."""
    return torch.arange(len(message), device=message.device, dtype=torch.int32).unsqueeze(-1)


def head_scores(x: Tensor, att: Tensor) -> Tensor:
    dtype = accumulator(x.dtype)
    return (x.to(dtype) * att.to(dtype).unsqueeze(1)).sum(-1).to(x.dtype)


def head_scores_backward(
    x: Tensor,
    att: Tensor,
    grad: Tensor,
    *,
    addend: Tensor | None = None,
    wanted: Sequence[bool] | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    wants_x, wants_att = (True, True) if wanted is None else wanted
    wide_x, wide_att, wide_grad = widened(x, att, grad)
    wide_grad = wide_grad.unsqueeze(-1)
    grad_x = grad_att = None
    if wants_x:
        grad_x = (wide_grad * wide_att.unsqueeze(1)).sum(0)
        grad_x = (grad_x if addend is None else grad_x + addend).to(x.dtype)
    if wants_att:
        grad_att = (wide_grad * wide_x).sum(1).to(x.dtype)
    return grad_x, grad_att


def _additive(
    graph: Graph,
    tensors: Sequence[Any],
    transpose: bool,
    slope: float,
    dropout: float,
    seed: int,
) -> tuple[Attention, Tensor]:
    """The softmax, and the sums within the non-linearity, ``[E, heads, channels]``."""
    x_src, x_dst, att, edge, weight_edge = tensors
    nodes = endpoints(graph, transpose)
    z = x_src[nodes[0]] + x_dst[nodes[1]]
    if edge is not None:
        z = z + (edge @ weight_edge).transpose(0, 1)
    score = (leaky_relu(z, slope) * att).sum(-1)
    return attend(score, nodes, dropout, seed), z


def gatv2(
    graph: Graph,
    x_src: Tensor,
    x_dst: Tensor,
    att: Tensor,
    edge: Tensor | None,
    weight_edge: Tensor | None,
    transpose: bool,
    slope: float,
    dropout: float,
    seed: int,
    weights: bool,
    *,
    addend: Tensor | None = None,
) -> Results:
    wide = widened(x_src, x_dst, att, edge, weight_edge)
    softmax, _ = _additive(graph, wide, transpose, slope, dropout, seed)
    return results(softmax, wide[0][softmax.gathered], addend, x_src.dtype, weights)


def gatv2_backward(
    graph: Graph,
    grad: Tensor,
    grad_alpha: Tensor | None,
    grad_logsum: Tensor | None,
    x_src: Tensor,
    x_dst: Tensor,
    att: Tensor,
    edge: Tensor | None,
    weight_edge: Tensor | None,
    stats: Tensor,
    transpose: bool,
    slope: float,
    dropout: float,
    seed: int,
    *,
    wanted: Sequence[bool] | None = None,
) -> Gradients:
    like = x_src
    grad, grad_alpha = widened(grad, grad_alpha)
    wide = x_src, x_dst, att, edge, weight_edge = widened(x_src, x_dst, att, edge, weight_edge)
    softmax, z = _additive(graph, wide, transpose, slope, dropout, seed)
    softmax = softmax.with_shares(stats)
    grad_score, grad_value = softmax.gradients(
        grad, grad_alpha, grad_logsum, x_src[softmax.gathered]
    )
    grad_z = grad_score.unsqueeze(-1) * att * torch.where(z > 0, torch.ones_like(z), slope)
    by_head = grad_z.transpose(0, 1)
    return made(
        like,
        wanted,
        lambda: softmax.sum_at(softmax.gathered, grad_value + grad_z, x_src.shape[0]),
        lambda: softmax.sum_at(softmax.aggregating, grad_z, x_dst.shape[0]),
        lambda: (grad_score.unsqueeze(-1) * leaky_relu(z, slope)).sum(0, keepdim=True),
        # Products as torch also computes them for a batch of gradients, unlike those of einsum.
        lambda: None if edge is None else (by_head @ weight_edge.transpose(1, 2)).sum(0),
        lambda: None if edge is None else edge.t() @ by_head,
    )


def _from_scores(
    graph: Graph,
    scores: Sequence[Any],
    transpose: bool,
    slope: float,
    dropout: float,
    seed: int,
) -> tuple[Attention, Tensor]:
    """The softmax, and the sums within the non-linearity, ``[E, heads]``."""
    score_src, score_dst, score_edge = scores
    nodes = endpoints(graph, transpose)
    z = score_src[nodes[0]] + score_dst[nodes[1]]
    if score_edge is not None:
        z = z + score_edge
    return attend(leaky_relu(z, slope), nodes, dropout, seed), z


def gat(
    graph: Graph,
    x: Tensor,
    score_src: Tensor,
    score_dst: Tensor,
    score_edge: Tensor | None,
    transpose: bool,
    slope: float,
    dropout: float,
    seed: int,
    weights: bool,
    *,
    addend: Tensor | None = None,
) -> Results:
    value, *scores = widened(x, score_src, score_dst, score_edge)
    softmax, _ = _from_scores(graph, scores, transpose, slope, dropout, seed)
    return results(softmax, value[softmax.gathered], addend, x.dtype, weights)


def gat_backward(
    graph: Graph,
    grad: Tensor,
    grad_alpha: Tensor | None,
    grad_logsum: Tensor | None,
    x: Tensor,
    score_src: Tensor,
    score_dst: Tensor,
    score_edge: Tensor | None,
    stats: Tensor,
    transpose: bool,
    slope: float,
    dropout: float,
    seed: int,
    *,
    wanted: Sequence[bool] | None = None,
) -> Gradients:
    grad, grad_alpha, value, *scores = widened(
        grad, grad_alpha, x, score_src, score_dst, score_edge
    )
    softmax, z = _from_scores(graph, scores, transpose, slope, dropout, seed)
    softmax = softmax.with_shares(stats)
    grad_score, grad_value = softmax.gradients(
        grad, grad_alpha, grad_logsum, value[softmax.gathered]
    )
    grad_z = grad_score * torch.where(z > 0, torch.ones_like(z), slope)
    return made(
        x,
        wanted,
        lambda: softmax.sum_at(softmax.gathered, grad_value, x.shape[0]),
        lambda: softmax.sum_at(softmax.gathered, grad_z, score_src.shape[0]),
        lambda: softmax.sum_at(softmax.aggregating, grad_z, score_dst.shape[0]),
        lambda: None if score_edge is None else grad_z,
    )
