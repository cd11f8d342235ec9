"""The route of ``SAGEConv``: the node's own term is added in place to that of its neighbours.

Everything else is upstream's ``forward``; the aggregation takes the route of ``propagate``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn.conv import SAGEConv

from fastgraph.pyg.in_place import add_projections
from fastgraph.pyg.linear import project
from fastgraph.pyg.propagate import aggregate
from fastgraph.routing.patching import Patches
from fastgraph.routing.state import SWITCH


def install(patches: Patches) -> None:
    """Replace ``SAGEConv.forward``."""
    patches.replace(SAGEConv, "forward", _routed(SAGEConv.forward))


def _routed(upstream: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(upstream)
    def forward(self: SAGEConv, x: Any, edge_index: Any, size: Any = None) -> Tensor:
        if isinstance(x, Tensor):
            x = (x, x)
        if not SWITCH.active or not self.root_weight or x[1] is None:
            return upstream(self, x, edge_index, size)
        if self.project and hasattr(self, "lin"):
            x = (project(self.lin, x[0]).relu(), x[1])
        neighbours, owned = aggregate(self, edge_index, x=x, size=size)
        out = add_projections(neighbours, owned, self.lin_l, self.lin_r, x[1])
        return F.normalize(out, p=2.0, dim=-1) if self.normalize else out

    return forward
