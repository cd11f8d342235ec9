"""Reductions of groups of rows, and the softmax of what the rows of a group have."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fastgraph import ops
from fastgraph.graphs.edges import DerivedIndex, Grouped, RenumberedGraph
from fastgraph.layers.aggregation import SUMS


def reduce_groups(x: Tensor, groups: Grouped, reduce: str, caller_index: Tensor) -> Tensor:
    """The sum, mean, maximum or minimum of each group of rows; 0 of a group without any.

    Args:
        x: ``[rows, *channels]``.
        groups: of the rows.
        reduce: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``.
        caller_index: the tensor that says the groups, which must not change before the gradient.

    Returns:
        ``[groups, *channels]``.
    """
    rows = x.unsqueeze(1) if x.dim() == 1 else x
    if reduce in SUMS:
        out = _computed(functools.partial(ops.spmm, reduce=reduce), rows, groups, caller_index)
    else:
        # Upstream saves the rows themselves, which nothing has gathered.
        callers = DerivedIndex(groups.edges.index, (caller_index, x))
        operator = functools.partial(ops.segment_reduce, reduce=reduce)
        out = callers.while_computing(_computed, operator, rows, groups, caller_index)
    return out.squeeze(1) if x.dim() == 1 else out


def softmax_of_groups(score: Tensor, groups: Grouped, caller_index: Tensor) -> Tensor:
    """The softmax of the scores of the rows of each group, ``[rows, *heads]``.

    Arguments as for :func:`reduce_groups`.
    """
    operator = functools.partial(ops.edge_softmax, num_in=groups.graph.num_src)
    return _computed(operator, score, groups, caller_index)


def _computed(
    operator: Callable[..., Any], rows: Tensor, groups: Grouped, caller_index: Tensor
) -> Tensor:
    graph, edges = groups.graph, groups.edges
    out: Tensor = RenumberedGraph(graph, caller_index).while_computing(
        functools.partial(operator, ptr=edges.ptr, num_out=graph.num_dst), rows, edges.index
    )
    return out
