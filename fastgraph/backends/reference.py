"""The specification: every operator in a few lines of torch, on any device.

Messages are stored (memory grows with edges x channels), and the functions are differentiable, so
they also serve as the second derivative of the fused kernels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from fastgraph.backends.base import OPERATORS, Kernel
from fastgraph.graph import Graph


class ReferenceBackend:
    """Pure torch, used where nothing else exists and on request."""

    name = "reference"
    priority = -1

    def unavailable(self) -> str | None:
        return None

    def kernel(self, operator: str, device_type: str, dtype: torch.dtype) -> Kernel | None:
        kernel: Kernel | None = globals()[operator] if operator in OPERATORS else None
        return kernel


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums are accumulated."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def endpoints(graph: Graph, transpose: bool) -> tuple[Tensor, Tensor, int]:
    """For each edge the gathered and the aggregating node, and the number of the latter."""
    src, dst = graph.edge_list()
    return (dst, src, graph.num_src) if transpose else (src, dst, graph.num_dst)


def messages(x: Tensor, weight: Tensor | None, gathered: Tensor) -> Tensor:
    """``w_e x_j`` for each edge, ``[E, *channels]``."""
    rows = x.index_select(0, gathered)
    if weight is None:
        return rows
    return rows * weight.view(-1, *[1] * (x.dim() - 1))


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


def sddmm(graph: Graph, grad: Tensor, x: Tensor, reduce: str, transpose: bool) -> Tensor:
    gathered, aggregating, _ = endpoints(graph, transpose)
    dtype = accumulator(x.dtype)
    out = (grad.to(dtype)[aggregating] * x.to(dtype)[gathered]).sum(-1)
    if reduce == "mean":
        out = out * graph.inverse_degree(transpose=transpose, dtype=dtype)[aggregating]
    if reduce == "mean_adjoint":
        out = out * graph.inverse_degree(transpose=not transpose, dtype=dtype)[gathered]
    return out.to(x.dtype)


def segment_reduce(
    graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, transpose: bool, ties: str
) -> tuple[Tensor, Tensor]:
    gathered, aggregating, num_out = endpoints(graph, transpose)
    message = messages(x, weight, gathered)
    index = aggregating.unsqueeze(-1).expand_as(message)
    out = message.new_zeros(num_out, x.shape[1]).scatter_reduce(
        0, index, message, reduce=f"a{reduce}", include_self=False
    )
    return out, extremum_record(message, out, index, ties)


def extremum_record(message: Tensor, out: Tensor, index: Tensor, ties: str) -> Tensor:
    """What the backward needs besides ``out``; see :mod:`fastgraph.backends.base`."""
    if ties == "none":
        return out.new_empty(0, dtype=torch.int32)
    attained = message == out.gather(0, index)
    if ties == "split":
        # The output starts as zeros, and a zero extremum of a non-empty row shares with them.
        zeros = ((out == 0) & torch.zeros_like(out, dtype=torch.bool).scatter(0, index, True)).int()
        return zeros.scatter_add(0, index, attained.int())
    edge = torch.arange(message.shape[0], device=out.device, dtype=torch.int32).unsqueeze(-1)
    attained |= message.isnan()
    candidates = torch.where(attained, edge, torch.iinfo(torch.int32).max)
    first = torch.full_like(out, -1, dtype=torch.int32)
    return first.scatter_reduce(0, index, candidates, reduce="amin", include_self=False)


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
        grad = grad / record
        share = (message == out.detach()[aggregating]).to(grad.dtype)
        grad_message = share * grad[aggregating]
    else:
        edge = torch.arange(message.shape[0], device=x.device).unsqueeze(-1)
        grad_message = torch.where(record[aggregating] == edge, grad[aggregating], 0)
    if weight is not None:
        grad_message = grad_message * weight.unsqueeze(-1)
    dtype = accumulator(x.dtype)
    grad_x = grad_message.new_zeros(x.shape, dtype=dtype)
    return grad_x.index_add(0, gathered, grad_message.to(dtype)).to(x.dtype)


class Attention(NamedTuple):
    """A softmax over the edges of each aggregating node, one for each head.

    Attributes:
        weight: the softmax of the scores, ``[E, heads]``, differentiable.
        keep: the factors of attention dropout, ``[E, heads]``.
        gathered, aggregating: the nodes that each edge joins.
        stats: see :mod:`fastgraph.backends.base`.
    """

    weight: Tensor
    keep: Tensor
    gathered: Tensor
    aggregating: Tensor
    stats: Tensor

    def combine(self, value: Tensor) -> Tensor:
        """The weighted sum of the gathered nodes' values, ``[nodes, heads, channels]``."""
        message = (self.keep * self.weight).unsqueeze(-1) * value[self.gathered]
        out = message.new_zeros(self.stats.shape[0], *value.shape[1:])
        return out.index_add(0, self.aggregating, message)

    def gradients(self, grad: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the scores, ``[E, heads]``, and of ``value``, given that of the output."""
        message = grad[self.aggregating]
        product = self.keep * (message * value[self.gathered]).sum(-1)
        delta = self.sum_at(self.aggregating, self.weight * product, self.stats.shape[0])
        grad_score = self.weight * (product - delta[self.aggregating])
        grad_message = (self.keep * self.weight).unsqueeze(-1) * message
        return grad_score, self.sum_at(self.gathered, grad_message, value.shape[0])

    @staticmethod
    def sum_at(node: Tensor, edges: Tensor, num_nodes: int) -> Tensor:
        """Add up what edges carry at one of their ends."""
        return edges.new_zeros(num_nodes, *edges.shape[1:]).index_add(0, node, edges)


def attend(
    score: Tensor,
    nodes: tuple[Tensor, Tensor, int],
    dropout: float,
    seed: int,
) -> Attention:
    """The softmax of ``score`` ``[E, heads]``; ``nodes`` are :func:`endpoints`."""
    gathered, aggregating, num_out = nodes
    heads = score.shape[1]
    index = aggregating.unsqueeze(-1).expand_as(score)
    # The result does not depend on what is subtracted, so its gradient need not be followed.
    largest = score.new_zeros(num_out, heads).scatter_reduce(
        0, index, score.detach(), "amax", include_self=False
    )
    exponential = (score - largest[aggregating]).exp()
    total = exponential.new_zeros(num_out, heads).index_add(0, aggregating, exponential)
    inverse = torch.where(total == 0, 0, total.reciprocal())
    keep = dropout_factors(score, dropout, seed)
    stats = torch.stack([largest, inverse], dim=-1)
    return Attention(exponential / total[aggregating], keep, gathered, aggregating, stats)


def dropout_factors(score: Tensor, dropout: float, seed: int) -> Tensor:
    """0 for dropped edges, ``1 / (1 - dropout)`` for the others, like ``score`` ``[E, heads]``."""
    if dropout == 0:
        return torch.ones_like(score)
    threshold = min(int(dropout * 2**32), 2**32 - 1)
    kept = philox(seed, score.shape[0], score.shape[1], score.device) >= threshold
    return kept.to(score.dtype) * (1 / (1 - dropout) if dropout < 1 else 0.0)


def philox(seed: int, num_edges: int, heads: int, device: torch.device) -> Tensor:
    """The first words of Philox4x32-10 for the counters ``(edge, head, 0, 0)``, int64.

    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    low = 2**32 - 1
    keys = [seed & low, (seed >> 32) & low]
    zeros = torch.zeros(num_edges, heads, dtype=torch.int64, device=device)
    counters = [
        zeros + torch.arange(num_edges, device=device).unsqueeze(-1),
        zeros + torch.arange(heads, device=device),
        zeros,
        zeros,
    ]
    for _ in range(10):
        # Products may wrap around to negative numbers, whose bits are still those wanted.
        product0, product1 = counters[0] * 0xD2511F53, counters[2] * 0xCD9E8D57
        counters = [
            ((product1 >> 32) & low) ^ counters[1] ^ keys[0],
            product1 & low,
            ((product0 >> 32) & low) ^ counters[3] ^ keys[1],
            product0 & low,
        ]
        keys = [(keys[0] + 0x9E3779B9) & low, (keys[1] + 0xBB67AE85) & low]
    return counters[0]


def _widened(*tensors: Tensor) -> list[Tensor]:
    return [t.to(accumulator(t.dtype)) for t in tensors]


def _additive(
    graph: Graph,
    x_src: Tensor,
    x_dst: Tensor,
    att: Tensor,
    transpose: bool,
    slope: float,
    dropout: float,
    seed: int,
) -> tuple[Attention, Tensor]:
    """The softmax, and the sums within the non-linearity, ``[E, heads, channels]``."""
    nodes = endpoints(graph, transpose)
    z = x_src[nodes[0]] + x_dst[nodes[1]]
    score = (leaky_relu(z, slope) * att).sum(-1)
    return attend(score, nodes, dropout, seed), z


def gatv2(
    graph: Graph,
    x_src: Tensor,
    x_dst: Tensor,
    att: Tensor,
    transpose: bool,
    slope: float,
    dropout: float,
    seed: int,
) -> tuple[Tensor, Tensor]:
    wide_src, wide_dst, wide_att = _widened(x_src, x_dst, att)
    softmax, _ = _additive(graph, wide_src, wide_dst, wide_att, transpose, slope, dropout, seed)
    return softmax.combine(wide_src).to(x_src.dtype), softmax.stats


def gatv2_backward(
    graph: Graph,
    grad: Tensor,
    x_src: Tensor,
    x_dst: Tensor,
    att: Tensor,
    stats: Tensor,
    transpose: bool,
    slope: float,
    dropout: float,
    seed: int,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = x_src.dtype
    grad, x_src, x_dst, att = _widened(grad, x_src, x_dst, att)
    softmax, z = _additive(graph, x_src, x_dst, att, transpose, slope, dropout, seed)
    grad_score, grad_value = softmax.gradients(grad, x_src)
    grad_z = grad_score.unsqueeze(-1) * att * torch.where(z > 0, torch.ones_like(z), slope)
    grad_src = grad_value + softmax.sum_at(softmax.gathered, grad_z, x_src.shape[0])
    grad_dst = softmax.sum_at(softmax.aggregating, grad_z, x_dst.shape[0])
    grad_att = (grad_score.unsqueeze(-1) * leaky_relu(z, slope)).sum(0, keepdim=True)
    return grad_src.to(dtype), grad_dst.to(dtype), grad_att.to(dtype)


def _from_scores(
    graph: Graph,
    score_src: Tensor,
    score_dst: Tensor,
    transpose: bool,
    slope: float,
    dropout: float,
    seed: int,
) -> tuple[Attention, Tensor]:
    """The softmax, and the sums within the non-linearity, ``[E, heads]``."""
    nodes = endpoints(graph, transpose)
    z = score_src[nodes[0]] + score_dst[nodes[1]]
    return attend(leaky_relu(z, slope), nodes, dropout, seed), z


def gat(
    graph: Graph,
    x: Tensor,
    score_src: Tensor,
    score_dst: Tensor,
    transpose: bool,
    slope: float,
    dropout: float,
    seed: int,
) -> tuple[Tensor, Tensor]:
    value, wide_src, wide_dst = _widened(x, score_src, score_dst)
    softmax, _ = _from_scores(graph, wide_src, wide_dst, transpose, slope, dropout, seed)
    return softmax.combine(value).to(x.dtype), softmax.stats


def gat_backward(
    graph: Graph,
    grad: Tensor,
    x: Tensor,
    score_src: Tensor,
    score_dst: Tensor,
    stats: Tensor,
    transpose: bool,
    slope: float,
    dropout: float,
    seed: int,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = x.dtype
    grad, x, score_src, score_dst = _widened(grad, x, score_src, score_dst)
    softmax, z = _from_scores(graph, score_src, score_dst, transpose, slope, dropout, seed)
    grad_score, grad_x = softmax.gradients(grad, x)
    grad_z = grad_score * torch.where(z > 0, torch.ones_like(z), slope)
    grad_src = softmax.sum_at(softmax.gathered, grad_z, score_src.shape[0])
    grad_dst = softmax.sum_at(softmax.aggregating, grad_z, score_dst.shape[0])
    return grad_x.to(dtype), grad_src.to(dtype), grad_dst.to(dtype)


def _from_products(
    graph: Graph,
    query: Tensor,
    key: Tensor,
    transpose: bool,
    scale: float,
    dropout: float,
    seed: int,
) -> Attention:
    nodes = endpoints(graph, transpose)
    score = scale * (query[nodes[1]] * key[nodes[0]]).sum(-1)
    return attend(score, nodes, dropout, seed)


def attention(
    graph: Graph,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    transpose: bool,
    scale: float,
    dropout: float,
    seed: int,
) -> tuple[Tensor, Tensor]:
    wide_query, wide_key, wide_value = _widened(query, key, value)
    softmax = _from_products(graph, wide_query, wide_key, transpose, scale, dropout, seed)
    return softmax.combine(wide_value).to(query.dtype), softmax.stats


def attention_backward(
    graph: Graph,
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    stats: Tensor,
    transpose: bool,
    scale: float,
    dropout: float,
    seed: int,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = query.dtype
    grad, query, key, value = _widened(grad, query, key, value)
    softmax = _from_products(graph, query, key, transpose, scale, dropout, seed)
    grad_score, grad_value = softmax.gradients(grad, value)
    scaled = scale * grad_score.unsqueeze(-1)
    grad_query = softmax.sum_at(softmax.aggregating, scaled * key[softmax.gathered], query.shape[0])
    grad_key = softmax.sum_at(softmax.gathered, scaled * query[softmax.aggregating], key.shape[0])
    return grad_query.to(dtype), grad_key.to(dtype), grad_value.to(dtype)
