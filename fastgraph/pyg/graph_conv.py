"""The route of ``GraphConv``: the node's own term is added in place to that of its neighbours.

Everything else is upstream's ``forward``; the aggregation takes the route of ``propagate``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch_geometric.nn.conv import GraphConv

from fastgraph.pyg.in_place import add_projections
from fastgraph.pyg.propagate import aggregate
from fastgraph.routing.patching import Patches
from fastgraph.routing.state import SWITCH


def install(patches: Patches) -> None:
    """Replace ``GraphConv.forward``."""
    patches.replace(GraphConv, "forward", _routed(GraphConv.forward))


def _routed(upstream: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(upstream)
    def forward(
        self: GraphConv,
        x: Any,
        edge_index: Any,
        edge_weight: Tensor | None = None,
        size: Any = None,
    ) -> Tensor:
        if isinstance(x, Tensor):
            x = (x, x)
        if not SWITCH.active or x[1] is None:
            return upstream(self, x, edge_index, edge_weight, size)
        neighbours, owned = aggregate(self, edge_index, x=x, edge_weight=edge_weight, size=size)
        return add_projections(neighbours, owned, self.lin_rel, self.lin_root, x[1])

    return forward
