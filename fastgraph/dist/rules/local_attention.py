"""What an operator of attention gives for the edges of a rank, with the dropout of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fastgraph.dist.rank_graph import RankGraph
from fastgraph.dist.sharded import ShardedTensor, enter, is_sharded
from fastgraph.dist.table import NoRuleError
from fastgraph.ops.heads import Call
from fastgraph.ops.spmm import SPMM
from fastgraph.registry import operators

SUMMED = {"gat": 0, "gatv2": 0, "attention": 2}
"""Positions of the operands whose rows operators add up."""


def local_attention(
    call: Call,
    graph: RankGraph,
    kernel: Callable[..., Any],
    inputs: Sequence[Any],
    operator: operators.Attention,
    num_destinations: int,
    addend: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, the statistics and the weights of an operator, by local rows and edges.

    Args:
        call: what was asked for.
        graph: the edges.
        kernel: the operator.
        inputs: its operands for the nodes and edges of ``graph``.
        operator: its specification.
        num_destinations: of ``graph``.
        addend: for the local rows.

    Returns:
        As the operator does; weights are those that were not dropped, and empty where neither they
        nor dropout are asked for.

    Raises:
        NoRuleError: features of edges are added up besides dropout.
    """
    has_features = any(
        x is not None and operand.shape[0] == "edges"
        for x, operand in zip(inputs, operator.operands, strict=True)
    )
    weights = call.weights or call.dropout > 0
    edges = graph.edges_of(numbered=weights or has_features)
    rest = (edges.index, edges.ptr, None, 0, False, call.option, 0.0, weights)
    if call.dropout == 0:
        out, stats, alpha = kernel(*inputs, addend, *rest)
        return out, stats, alpha
    if operator is operators.ATTENTION and has_features:
        raise NoRuleError  # which it adds up as well
    # An operator drops edges by their numbers, which are others on each rank. So weights are made,
    # [E, heads], and dropped by where they are among those of all ranks.
    _, stats, alpha = kernel(*_for_weights(inputs, operator), None, *rest)
    dropped: Any = F.dropout(ShardedTensor(alpha, graph.edges, 0), call.dropout)
    values = inputs[SUMMED[operator.name]]
    given = edges.index, edges.ptr, dropped.local, num_destinations, "sum", False
    out = SPMM(values, *given)
    return out if addend is None else out + addend, stats, dropped.local


def shared(x: Tensor) -> Any:
    """An operand that is the same for all nodes and edges.

    Raises:
        NoRuleError: it is sharded.
    """
    if is_sharded(x):
        raise NoRuleError
    return enter(x)


def _for_weights(inputs: Sequence[Any], operator: operators.Attention) -> Sequence[Any]:
    """Operands that give the same weights, and the smallest output that an operator can have.

    Others than GAT's score the features that they add up.
    """
    if operator is not operators.GAT:
        return inputs
    x, *scores = inputs
    return [x.new_zeros((*x.shape[:2], 1)), *scores]
