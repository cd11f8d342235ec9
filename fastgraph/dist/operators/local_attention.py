"""Attention over the edges of a rank, with the dropout of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fastgraph.dist.operators.rank_graph import RankGraph
from fastgraph.dist.tensor.rules.random import dropout_factor
from fastgraph.dist.tensor.sharded import enter, is_sharded
from fastgraph.dist.tensor.table import NoRuleError
from fastgraph.graphs.edges import Edges
from fastgraph.layers.sums import add_to
from fastgraph.ops.heads import Call
from fastgraph.ops.spmm import SPMM
from fastgraph.registry import operators

SUMMED = {"gat": 0, "gatv2": 0, "attention": 2}
"""Positions of the operands whose rows operators add up."""


def needs_weights(call: Call) -> bool:
    """True if weights are made, ``[edges, heads]``."""
    return bool(call.weights or call.dropout > 0)


def check_dropout(call: Call, operator: operators.Attention, *, has_features: bool) -> None:
    """Weights are dropped after an operator made them, and sources summed by those that are left.

    Raises:
        NoRuleError: the operator adds up features of edges as well.
    """
    if call.dropout > 0 and has_features and operator is operators.ATTENTION:
        raise NoRuleError


def dropout_of_weights(call: Call, graph: RankGraph) -> Tensor | None:
    """The dropout factors of the weights of local edges, ``[edges, heads]``; ``None`` for 1.

    An operator drops edges by their numbers, which are others on each rank. These are dropped by
    where they are among those of all ranks.
    """
    if call.dropout == 0:
        return None
    features = call.inputs[0]
    shape = [graph.edges.n, features.shape[1]]
    return dropout_factor(shape, {0: graph.edges.position}, call.dropout, features.dtype)


def local_attention(
    call: Call,
    operator: operators.Attention,
    kernel: Callable[..., Any],
    inputs: Sequence[Any],
    edges: Edges,
    num_destinations: int,
    factor: Tensor | None,
    addend: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The output, statistics and weights of an operator for some edges of this rank.

    Args:
        call: what was asked for.
        operator: its specification.
        kernel: the operator.
        inputs: its operands for the nodes of these edges.
        edges: the edges.
        num_destinations: how many nodes they lead to.
        factor: of their weights, by :func:`dropout_of_weights`.
        addend: added to the output.

    Returns:
        The output, the statistics, and the weights after dropout if they are needed.
    """
    topology, weights = (edges.index, edges.ptr), needs_weights(call)
    rest = (*topology, None, 0, False, call.option, 0.0, weights)
    if factor is None:
        out, stats, alpha, *_ = kernel(*inputs, addend, *rest)
        return out, stats, alpha if weights else None
    _, stats, alpha, *_ = kernel(*_for_weights(inputs, operator), None, *rest)
    dropped = alpha * factor
    values = inputs[SUMMED[operator.name]]
    out = SPMM(values, *topology, dropped, num_destinations, "sum", False)
    return out if addend is None else add_to(out, addend), stats, dropped


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
