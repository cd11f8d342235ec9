"""The route of ``GraphConv``: the node's own term is added in place to that of its neighbours.

Everything else is upstream's ``forward``; the aggregation takes the route of ``propagate``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch_geometric.nn.conv import GraphConv

from fastgraph.pyg.in_place import add_projections, replace_forward
from fastgraph.pyg.propagate import aggregate
from fastgraph.routing.patching import Patches


def install(patches: Patches) -> None:
    """Replace ``GraphConv.forward``."""
    replace_forward(patches, GraphConv, _forward)


def _forward(
    module: GraphConv,
    x: Any,
    edge_index: Any,
    edge_weight: Tensor | None = None,
    size: Any = None,
) -> Tensor | None:
    if isinstance(x, Tensor):
        x = (x, x)
    if x[1] is None:
        return None
    neighbours, owned = aggregate(module, edge_index, x=x, edge_weight=edge_weight, size=size)
    return add_projections(module.lin_rel, neighbours, owned, module.lin_root, x[1])
