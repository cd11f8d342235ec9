r"""Products of aggregations that are scaled by functions of a node's degree, as those of PNA.

A node's aggregations :math:`a_v` are scaled in several ways, concatenated and multiplied by a
matrix :math:`[W_1 ... W_S]`. Nodes of one degree have one matrix instead:

.. math:: \sum_s W_s (f_s(d_v) a_v) = (\sum_s f_s(d_v) W_s) a_v

so that their product is a factor of :math:`S` less work, and nothing is concatenated. Nodes without
edges all have the same aggregations, so that one product serves them all. Results are those of the
concatenation but for roundings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgraph.graphs.graph import Graph, beside, normal_mode
from fastgraph.machine.memory import new_rows
from fastgraph.ops.library import needs_torch_operations

_LEAST_ROWS = 64
"""Nodes of a degree for whose sake the matrix of that degree is made.

It takes as long as the multiplications of some dozens of rows that it saves.
"""


class DegreeGroups(NamedTuple):
    """Nodes by degree.

    Attributes:
        order: int64 ``[nodes]``, the nodes of each frequent degree in a row, by ascending degree,
            and behind them those of the others.
        places: int64 ``[nodes]``, where each node is in that order.
        degrees: int64 ``[groups]``, ascending.
        sizes: the number of nodes of each group.
        others: int64, the degrees of the nodes of other degrees.
    """

    order: Tensor
    places: Tensor
    degrees: Tensor
    sizes: list[int]
    others: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(part.nbytes for part in self if isinstance(part, Tensor))


class _Kept:
    def __init__(self, ptr: Tensor) -> None:
        with normal_mode():  # what is remembered must serve training as well
            self.groups = degree_groups(ptr)
        self.nbytes = 0 if self.groups is None else self.groups.nbytes


def groups_of(graph: Graph, *, transpose: bool) -> DegreeGroups | None:
    """:func:`degree_groups` of a graph's destinations, or sources, made once for all layers."""
    name = "degree groups", transpose
    return beside(graph, name, lambda: _Kept(graph.grouped(transpose=transpose).ptr)).groups


def degree_groups(ptr: Tensor) -> DegreeGroups | None:
    """The groups of nodes of a graph, ``None`` where too few nodes have frequent degrees to gain.

    Args:
        ptr: ``[nodes + 1]`` on the CPU, where the edges of each node begin and end.
    """
    degrees = ptr.diff().long()
    counts = torch.bincount(degrees)
    frequent = (counts >= _LEAST_ROWS).nonzero().view(-1)
    sizes = counts[frequent].tolist()
    num_frequent = sum(sizes)
    if 2 * num_frequent < len(degrees) or len(degrees) == 0:
        return None
    ranks = torch.full_like(counts, len(frequent))
    ranks[frequent] = torch.arange(len(frequent), device=counts.device)
    order = ranks[degrees].sort(stable=True).indices
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    others = degrees[order[num_frequent:]]
    return DegreeGroups(order, places, frequent, sizes, others)


def scaled_products(
    x: Tensor,
    groups: DegreeGroups,
    factors: Callable[[Tensor], Tensor],
    weights: Sequence[Tensor],
) -> list[Tensor]:
    """The products of scaled aggregations, one for each tower.

    Args:
        x: ``[nodes, towers, channels]``, equal for all nodes without edges.
        groups: of the nodes.
        factors: gives those of nodes of some degrees, ``[degrees, scalers]``.
        weights: of each tower, ``[out_channels, scalers * channels]``.

    Returns:
        Each ``[nodes, out_channels]``.
    """
    sizes = list(groups.sizes)
    alone = sizes[0] if sizes and int(groups.degrees[0]) == 0 else 0
    if alone:
        sizes[0] = 1  # the last of them is there for all
    chosen = _rows(x, groups.order[max(alone - 1, 0) :])
    of_groups, of_others = factors(groups.degrees), factors(groups.others)
    *pieces, rest = chosen.split([*sizes, len(groups.others)])
    found = []
    for tower, weight in enumerate(weights):
        num_out, num_scalers = len(weight), of_groups.shape[1]
        by_scaler = weight.view(num_out, num_scalers, -1).transpose(0, 1).flatten(1)
        by_degree = (of_groups @ by_scaler).view(len(sizes), num_out, -1).unbind()
        parts = [F.linear(p[:, tower], w) for p, w in zip(pieces, by_degree, strict=True)]
        if alone:
            parts[0] = parts[0].expand(alone, -1)
        if len(rest):
            scaled = rest[:, tower].unsqueeze(1) * of_others.unsqueeze(2)
            parts.append(F.linear(scaled.flatten(1), weight))
        found.append(_rows(torch.cat(parts), groups.places))
    return found


def _rows(x: Tensor, rows: Tensor) -> Tensor:
    return _Rows.apply(x, rows)  # type: ignore[no-any-return,no-untyped-call]


class _Rows(torch.autograd.Function):
    """Some rows, each at most once; torch would add up their gradients to those of all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.num_rows = len(x)
        out = new_rows(x, (len(rows), *x.shape[1:]))
        return torch.index_select(x, 0, rows, out=out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        shape = (ctx.num_rows, *grad.shape[1:])
        if needs_torch_operations(grad):
            return grad.new_zeros(shape).index_add(0, rows, grad), None
        out = new_rows(grad, shape)
        if len(rows) < ctx.num_rows:
            out.zero_()
        return out.index_copy_(0, rows, grad), None
