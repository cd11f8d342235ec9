"""The route of ``GCNConv``: one operator normalises and aggregates, and the bias is added in place.

A graph is normalised on first sight, while it is sorted. Where the operator does not compute what
upstream would, or the layer keeps the normalisation, this is what ``gcn_norm`` returns, and the
aggregation takes the route of ``propagate``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.nn.conv import GCNConv, gcn_conv

from fastgraph import ops
from fastgraph.graphs.edges import OutOfRange, RenumberedGraph, unless_out_of_range
from fastgraph.graphs.memo import is_recording
from fastgraph.layers.aggregation import Aggregation
from fastgraph.layers.modules import affine_map_of
from fastgraph.layers.narrowing import projects_last
from fastgraph.layers.sums import add_to
from fastgraph.ops.gcn import normalised, sum_normalised
from fastgraph.ops.library import is_defined_by
from fastgraph.plugins.patching import Patches
from fastgraph.pyg import gcn_norm
from fastgraph.pyg.modules import LINEAR, project
from fastgraph.pyg.propagate import aggregate, aggregate_by, plan_sum
from fastgraph.routing.conditions import operand
from fastgraph.routing.dispatch import Computation, replace_method
from fastgraph.routing.sizes import GCN, WEIGHTED_GCN, Least, on_edge_index


def install(patches: Patches) -> None:
    """Replace ``GCNConv.forward``."""
    replace_method(
        patches,
        GCNConv,
        "forward",
        plan,
        decided=False,
        is_small=on_edge_index(_least, _width),
        has_edge_index=True,
    )


def _least(_: GCNConv, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Least:
    is_weighted = (args[2] if len(args) > 2 else kwargs.get("edge_weight")) is not None
    return WEIGHTED_GCN if is_weighted else GCN


def _width(module: GCNConv, *_: object) -> object:
    return module.out_channels


class _Sum(NamedTuple):
    """A normalised sum that one operator computes.

    Attributes:
        planned: the sum, of features before they are projected.
        operator: as for :meth:`Aggregation.compute_by`.
    """

    planned: Aggregation
    operator: Callable[..., Tensor]

    def of(self, projected: Tensor) -> Aggregation | None:
        """The sum of projected features, if these are like those that it was planned for."""
        x = self.planned.x
        # Under autocast, weights of the dtype before it are wider than what they multiply.
        if torch.promote_types(projected.dtype, x.dtype) != x.dtype:
            return None
        if projected.shape[:-1] != x.shape[:-1] or operand("x", projected) is not None:
            return None  # a module in the place of a projection may return anything
        # Of `_replace`, compilers would compare what it is made of at each call.
        return Aggregation(projected.to(x.dtype), *self.planned[1:])


def plan(
    module: GCNConv, x: Any, edge_index: Any, edge_weight: Tensor | None = None
) -> Computation | OutOfRange | None:
    """The forward pass of a call, or ``None`` where there is nothing to gain."""
    if not isinstance(x, Tensor) or not isinstance(edge_index, Tensor):
        return None
    by_operator = _plan_operator(module, x, edge_index, edge_weight)
    if isinstance(by_operator, OutOfRange):
        return by_operator
    return lambda: _forward(module, x, edge_index, edge_weight, by_operator)


def _forward(
    module: GCNConv,
    x: Tensor,
    edge_index: Tensor,
    edge_weight: Tensor | None,
    by_operator: _Sum | None,
) -> Tensor:
    is_last = _projects_last(module, x)
    projected = found = None
    if by_operator is not None:
        projected = x if is_last else project(module.lin, x)
        planned = by_operator.of(projected)
        if planned is not None:
            found = aggregate_by(by_operator.operator, module, planned)
    if found is None:
        if module.normalize:
            edge_index, edge_weight = _normalised(module, x, edge_index, edge_weight)
        if projected is None:
            # A message of users may be no product, and an extremum is none.
            is_last = is_last and _is_sum(module, edge_index, x, edge_weight)
            projected = x if is_last else project(module.lin, x)
        found = aggregate(module, edge_index, x=projected, edge_weight=edge_weight)
    out, owned = found
    if is_last:
        out, owned = project(module.lin, out), True
    if module.bias is None:
        return out
    return add_to(out, module.bias) if owned else out + module.bias


def _projects_last(module: GCNConv, x: Tensor) -> bool:
    """True on ranks that send less so, if nobody sees what the projection is given."""
    if not is_defined_by(x) or not LINEAR.knows(module.lin):
        return False
    weight, bias = affine_map_of(module.lin)
    return bias is None and projects_last(x, weight)


def _is_sum(module: GCNConv, edge_index: Any, x: Tensor, edge_weight: Tensor | None) -> bool:
    return plan_sum(module, edge_index, x=x, edge_weight=edge_weight) is not None


def _plan_operator(
    module: GCNConv, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None
) -> _Sum | OutOfRange | None:
    if not _takes_operator(module, x, edge_index, edge_weight):
        return None
    planned = plan_sum(module, edge_index, x=x, edge_weight=edge_weight)
    if planned is None:
        return None
    loop_weight = _loop_weight(module, edge_weight)
    if is_recording() or is_defined_by(x, edge_index, edge_weight):
        return _Sum(planned, functools.partial(ops.gcn, loop_weight=loop_weight))
    transpose = planned.edges.transpose
    options = (edge_index, edge_weight, loop_weight, transpose)
    found = unless_out_of_range(normalised, planned.rows(), *options)
    if isinstance(found, OutOfRange):
        return found

    # Edges with self-loops are upstream's own: a caller may edit theirs before the backward pass.
    renumbered = RenumberedGraph(found.graph, None if loop_weight else planned.edges.index)

    def operator(features: Tensor, *_: Tensor | None, transpose: bool) -> Tensor:
        return renumbered.while_computing(
            functools.partial(sum_normalised, features, found, transpose=transpose)
        )

    return _Sum(planned, operator)


def _takes_operator(
    module: GCNConv, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None
) -> bool:
    """True if the normalisation is upstream's formula of a plain graph, and nobody sees it."""
    if not module.normalize or not gcn_norm.IS_PYGS:
        return False
    if module._cached_edge_index is not None or module.cached:
        return False
    is_edge_index = type(edge_index) is Tensor or operand("edge_index", edge_index) is None
    if not is_edge_index or edge_index.layout != torch.strided:
        return False
    if type(module.node_dim) is not int:
        return False
    if x.dim() < 2 or module.node_dim not in (-2, x.dim() - 2):
        return False
    if gcn_conv.gcn_norm is not gcn_norm.UPSTREAM:
        return False
    if edge_weight is None:
        return True
    return (
        isinstance(edge_weight, Tensor)
        and edge_weight.dim() == 1
        and edge_weight.dtype == x.dtype
        and not edge_weight.requires_grad
    )


def _loop_weight(module: GCNConv, edge_weight: Tensor | None) -> float:
    if not module.add_self_loops:
        return 0.0
    return 2.0 if module.improved and edge_weight is not None else 1.0  # as upstream does


def _normalised(module: GCNConv, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None) -> Any:
    cached = module._cached_edge_index
    if cached is None:
        normalise = gcn_conv.gcn_norm  # which a user may have replaced
        if normalise is gcn_norm.UPSTREAM and not module.cached:  # a layer's cache is its own
            normalise = gcn_norm.gcn_norm
        cached = normalise(
            edge_index,
            edge_weight,
            x.size(module.node_dim),
            module.improved,
            module.add_self_loops,
            module.flow,
            x.dtype,
        )
        if module.cached:
            module._cached_edge_index = cached
    return cached[0], cached[1]
