"""The route of ``GCNConv``: its bias is added to the aggregation in place.

Everything else is upstream's ``forward``; the aggregation takes the route of ``propagate``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch_geometric.nn.conv import GCNConv, gcn_conv

from fastgraph.pyg import gcn_norm
from fastgraph.pyg.in_place import add_to, replace_forward
from fastgraph.pyg.linear import project
from fastgraph.pyg.propagate import aggregate
from fastgraph.routing.patching import Patches


def install(patches: Patches) -> None:
    """Replace ``GCNConv.forward``."""
    replace_forward(patches, GCNConv, _forward)


def _forward(
    module: GCNConv, x: Any, edge_index: Any, edge_weight: Tensor | None = None
) -> Tensor | None:
    if not isinstance(x, Tensor) or not isinstance(edge_index, Tensor):
        return None
    if module.normalize:
        edge_index, edge_weight = _normalised(module, x, edge_index, edge_weight)
    x = project(module.lin, x)
    out, owned = aggregate(module, edge_index, x=x, edge_weight=edge_weight)
    if module.bias is None:
        return out
    return add_to(out, module.bias) if owned else out + module.bias


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
