"""The route of ``GCNConv``: one operator normalises and aggregates, and the bias is added in place.

A graph is normalised on first sight, while it is sorted. Where the operator does not compute what
upstream would, or the layer keeps the normalisation, this is what ``gcn_norm`` returns, and the
aggregation takes the route of ``propagate``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.conv import GCNConv, gcn_conv

from fastgraph import ops
from fastgraph.layers.sums import add_to
from fastgraph.pyg import gcn_norm
from fastgraph.pyg.modules import project
from fastgraph.pyg.propagate import aggregate, aggregate_by
from fastgraph.routing.conditions import operand
from fastgraph.routing.dispatch import Computation, replace_method
from fastgraph.routing.patching import Patches
from fastgraph.routing.sizes import GCN


def install(patches: Patches) -> None:
    """Replace ``GCNConv.forward``."""
    replace_method(patches, GCNConv, "forward", plan, decided=False, least=GCN, width=_width)


def _width(module: GCNConv, _: object) -> object:
    return module.out_channels


def plan(
    module: GCNConv, x: Any, edge_index: Any, edge_weight: Tensor | None = None
) -> Computation | None:
    """The forward pass of a call, or ``None`` where there is nothing to gain."""
    if not isinstance(x, Tensor) or not isinstance(edge_index, Tensor):
        return None
    return lambda: _forward(module, x, edge_index, edge_weight)


def _forward(module: GCNConv, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None) -> Tensor:
    projected = found = None
    if _takes_operator(module, x, edge_index, edge_weight):
        projected = project(module.lin, x)
        # Under autocast, weights of the dtype before it are wider than what they multiply.
        if torch.promote_types(projected.dtype, x.dtype) == x.dtype:
            operator = functools.partial(ops.gcn, loop_weight=_loop_weight(module, edge_weight))
            features = projected.to(x.dtype)
            found = aggregate_by(operator, module, edge_index, x=features, edge_weight=edge_weight)
    if found is None:
        if module.normalize:
            edge_index, edge_weight = _normalised(module, x, edge_index, edge_weight)
        projected = project(module.lin, x) if projected is None else projected
        found = aggregate(module, edge_index, x=projected, edge_weight=edge_weight)
    out, owned = found
    if module.bias is None:
        return out
    return add_to(out, module.bias) if owned else out + module.bias


def _takes_operator(
    module: GCNConv, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None
) -> bool:
    """Whether the normalisation is upstream's formula of a plain graph, and nobody sees it."""
    if not module.normalize or not gcn_norm.IS_PYGS:
        return False
    if module._cached_edge_index is not None or module.cached:
        return False
    is_edge_index = type(edge_index) is Tensor or operand("edge_index", edge_index) is None
    if not is_edge_index or edge_index.layout != torch.strided:
        return False
    if module.node_dim not in (-2, x.dim() - 2) or gcn_conv.gcn_norm is not gcn_norm.UPSTREAM:
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
