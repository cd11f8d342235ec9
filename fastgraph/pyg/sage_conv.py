"""The route of ``SAGEConv``: the node's own term is added in place to that of its neighbours.

Everything else is upstream's ``forward``; the aggregation takes the route of ``propagate``.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn.conv import SAGEConv

from fastgraph.pyg.in_place import add_projections, replace_forward
from fastgraph.pyg.linear import project
from fastgraph.pyg.propagate import aggregate
from fastgraph.routing.patching import Patches


def install(patches: Patches) -> None:
    """Replace ``SAGEConv.forward``."""
    replace_forward(patches, SAGEConv, _forward)


def _forward(module: SAGEConv, x: Any, edge_index: Any, size: Any = None) -> Tensor | None:
    if isinstance(x, Tensor):
        x = (x, x)
    if not module.root_weight or x[1] is None:
        return None
    if module.project and hasattr(module, "lin"):
        x = (project(module.lin, x[0]).relu(), x[1])
    neighbours, owned = aggregate(module, edge_index, x=x, size=size)
    out = add_projections(module.lin_l, neighbours, owned, module.lin_r, x[1])
    return F.normalize(out, p=2.0, dim=-1) if module.normalize else out
