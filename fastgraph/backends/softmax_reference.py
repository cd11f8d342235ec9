"""The softmax over neighbourhoods of the specification, and its gradients; see ``reference.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgraph.backends.dropout import dropout_factors
from fastgraph.graphs.graph import Graph
from fastgraph.plugins.backend import accumulator

Results = tuple[Tensor, Tensor, Tensor]
Gradients = tuple[Tensor | None, ...]


def endpoints(graph: Graph, transpose: bool) -> tuple[Tensor, Tensor, int]:
    """For each edge the gathered and the aggregating node, and the number of the latter."""
    src, dst = graph.edge_list()
    return (dst, src, graph.num_src) if transpose else (src, dst, graph.num_dst)


class Attention(NamedTuple):
    """A softmax over the edges of each aggregating node, one for each head.

    Attributes:
        weight: the softmax of the scores, ``[E, heads]``, differentiable.
        keep: the factors of attention dropout, ``[E, heads]``.
        gathered, aggregating: the nodes that each edge joins.
        stats: see :mod:`fastgraph.plugins.backend`.
    """

    weight: Tensor
    keep: Tensor
    gathered: Tensor
    aggregating: Tensor
    stats: Tensor

    @property
    def alpha(self) -> Tensor:
        """The weights with dropout, ``[E, heads]``."""
        return self.keep * self.weight

    def combine(self, value: Tensor) -> Tensor:
        """The weighted sum of the edges' values ``[E, heads, channels]`` at each node."""
        return self.sum_at(self.aggregating, self.alpha.unsqueeze(-1) * value, self.stats.shape[0])

    def with_shares(self, stats: Tensor) -> Attention:
        """The softmax without the weights of nodes whose inverse sum is said to be 0."""
        has_none = (stats[..., 1] == 0)[self.aggregating]
        return self._replace(weight=self.weight.masked_fill(has_none, 0))

    def gradients(
        self, grad: Tensor, grad_alpha: Tensor | None, grad_logsum: Tensor | None, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradients of the scores and of the edges' values, given those of all results."""
        message = grad[self.aggregating]
        product = (message * value).sum(-1)
        if grad_alpha is not None:
            product = product + grad_alpha
        product = self.keep * product
        delta = self.sum_at(self.aggregating, self.weight * product, self.stats.shape[0])
        if grad_logsum is not None:
            delta = delta - grad_logsum
        grad_score = self.weight * (product - delta[self.aggregating])
        return grad_score, self.alpha.unsqueeze(-1) * message

    @staticmethod
    def sum_at(node: Tensor, edges: Tensor, num_nodes: int) -> Tensor:
        """Add up what edges carry at one of their ends."""
        return edges.new_zeros(num_nodes, *edges.shape[1:]).index_add(0, node, edges)


def attend(
    score: Tensor,
    nodes: tuple[Tensor, Tensor, int],
    dropout: float,
    seed: int,
    *,
    may_hide_all: bool = False,
) -> Attention:
    """The softmax of ``score`` ``[E, heads]``; ``nodes`` are :func:`endpoints`.

    With ``may_hide_all`` a node whose scores are all -infinity is as one without edges.
    """
    gathered, aggregating, num_out = nodes
    heads = score.shape[1]
    index = aggregating.unsqueeze(-1).expand_as(score)
    # The result does not depend on what is subtracted, so its gradient need not be followed.
    largest = score.new_zeros(num_out, heads).scatter_reduce(
        0, index, score.detach(), "amax", include_self=False
    )
    if may_hide_all:
        largest = largest.masked_fill(largest == -torch.inf, 0)
    exponential = (score - largest[aggregating]).exp()
    total = exponential.new_zeros(num_out, heads).index_add(0, aggregating, exponential)
    inverse = torch.where(total == 0, 0, total.reciprocal())
    # As kernels have it: they take the exponentials relative to 0, which are 0.
    inverse = torch.where(largest == -torch.inf, torch.inf, inverse)
    keep = dropout_factors(score, dropout, seed)
    stats = torch.stack([largest, inverse], dim=-1)
    if may_hide_all:
        total = total.masked_fill(total == 0, 1)
    return Attention(exponential / total[aggregating], keep, gathered, aggregating, stats)


def widened(*tensors: Tensor | None) -> list[Any]:
    return [None if t is None else t.to(accumulator(t.dtype)) for t in tensors]


def results(
    softmax: Attention, value: Tensor, addend: Tensor | None, dtype: torch.dtype, weights: bool
) -> Results:
    alpha = softmax.alpha if weights else softmax.weight.new_empty(0, softmax.weight.shape[1])
    out = softmax.combine(value)
    out = out if addend is None else out + addend
    return out.to(dtype), softmax.stats, alpha.to(dtype)


def made(
    like: Tensor, wanted: Sequence[bool] | None, *gradients: Callable[[], Tensor | None]
) -> Gradients:
    """The gradients that are wanted, in the dtype of the operands."""
    found = [None if wanted and not wanted[i] else make() for i, make in enumerate(gradients)]
    return tuple(None if t is None else t.to(like.dtype) for t in found)
