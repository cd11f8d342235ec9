"""The route of ``GCNConv``: its bias is added to the aggregation in place.

Everything else is upstream's ``forward``; the aggregation takes the route of ``propagate``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch_geometric.nn.conv import GCNConv, gcn_conv

from fastgraph.pyg.in_place import add_to
from fastgraph.pyg.linear import project
from fastgraph.pyg.propagate import aggregate
from fastgraph.routing.patching import Patches
from fastgraph.routing.state import SWITCH


def install(patches: Patches) -> None:
    """Replace ``GCNConv.forward``."""
    patches.replace(GCNConv, "forward", _routed(GCNConv.forward))


def _routed(upstream: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(upstream)
    def forward(
        self: GCNConv, x: Any, edge_index: Any, edge_weight: Tensor | None = None
    ) -> Tensor:
        tensors = isinstance(x, Tensor) and isinstance(edge_index, Tensor)
        if not (SWITCH.active and tensors) or self.bias is None:
            return upstream(self, x, edge_index, edge_weight)
        if self.normalize:
            edge_index, edge_weight = _normalised(self, x, edge_index, edge_weight)
        out, owned = aggregate(self, edge_index, x=project(self.lin, x), edge_weight=edge_weight)
        return add_to(out, self.bias) if owned else out + self.bias

    return forward


def _normalised(self: GCNConv, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None) -> Any:
    cached = self._cached_edge_index
    if cached is None:
        cached = gcn_conv.gcn_norm(
            edge_index,
            edge_weight,
            x.size(self.node_dim),
            self.improved,
            self.add_self_loops,
            self.flow,
            x.dtype,
        )
        if self.cached:
            self._cached_edge_index = cached
    return cached[0], cached[1]
