"""The route of ``GCNConv``: one operator normalises and aggregates; the bias is added in place.

Where a layer keeps its normalisation, or has to differentiate it, that is upstream's, and the
aggregation takes the route of ``propagate``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.conv import GCNConv, gcn_conv

from fastgraph import ops
from fastgraph.pyg import gcn_norm
from fastgraph.pyg.in_place import add_to, replace_forward
from fastgraph.pyg.linear import project
from fastgraph.pyg.propagate import aggregate, aggregate_by
from fastgraph.routing.patching import Patches


def install(patches: Patches) -> None:
    """Replace ``GCNConv.forward``."""
    replace_forward(patches, GCNConv, _forward)


def _forward(
    module: GCNConv, x: Any, edge_index: Any, edge_weight: Tensor | None = None
) -> Tensor | None:
    if not isinstance(x, Tensor) or not isinstance(edge_index, Tensor):
        return None
    dtype = x.dtype
    x = project(module.lin, x)
    found = None
    # Under autocast weights of the dtype before the projection are wider than what they multiply.
    promoted = torch.promote_types(x.dtype, dtype) == dtype
    if promoted and _is_constant(module, edge_index, edge_weight, dtype):
        operator = functools.partial(ops.gcn, loop_weight=_loop_weight(module, edge_weight))
        found = aggregate_by(operator, module, edge_index, x=x.to(dtype), edge_weight=edge_weight)
    if found is None:
        if module.normalize:
            edge_index, edge_weight = _normalised(module, x, dtype, edge_index, edge_weight)
        found = aggregate(module, edge_index, x=x, edge_weight=edge_weight)
    out, owned = found
    if module.bias is None:
        return out
    return add_to(out, module.bias) if owned else out + module.bias


def _is_constant(
    module: GCNConv, edge_index: Tensor, edge_weight: Tensor | None, dtype: torch.dtype
) -> bool:
    """Whether upstream would compute the same normalisation at every call, in this dtype."""
    if not module.normalize or module.cached or type(edge_index) is not Tensor:
        return False
    if edge_index.layout != torch.strided or gcn_conv.gcn_norm is not gcn_norm.UPSTREAM:
        return False
    if edge_weight is None:
        return True
    return (
        isinstance(edge_weight, Tensor)
        and edge_weight.dim() == 1
        and edge_weight.dtype == dtype
        and not edge_weight.requires_grad
    )


def _loop_weight(module: GCNConv, edge_weight: Tensor | None) -> float:
    if not module.add_self_loops:
        return 0.0
    return 2.0 if module.improved and edge_weight is not None else 1.0  # as upstream does


def _normalised(
    module: GCNConv,
    x: Tensor,
    dtype: torch.dtype,
    edge_index: Tensor,
    edge_weight: Tensor | None,
) -> Any:
    """What upstream's ``forward`` propagates along, for features that had this dtype."""
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
            dtype,
        )
        if module.cached:
            module._cached_edge_index = cached
    return cached[0], cached[1]
