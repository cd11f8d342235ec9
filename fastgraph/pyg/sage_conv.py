"""The route of ``SAGEConv``: the node's own term is added in place to that of its neighbours.

The product of the neighbours may come before their sum or mean. Everything else is upstream's
``forward``; the aggregation takes the route of ``propagate``.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn.conv import SAGEConv

from fastgraph.plugins.patching import Patches
from fastgraph.pyg.hetero_conv import leaves_out
from fastgraph.pyg.modules import add_root, pair_of, project
from fastgraph.pyg.propagate import aggregate_and_project, least_edges
from fastgraph.routing.dispatch import Computation, replace_method
from fastgraph.routing.sizes import Least, on_edge_index


def install(patches: Patches) -> None:
    """Replace ``SAGEConv.forward``."""
    replace_method(
        patches,
        SAGEConv,
        "forward",
        plan,
        decided=False,
        is_small=on_edge_index(_least),
        has_edge_index=True,
    )


def _least(module: SAGEConv, *_: object) -> Least:
    return least_edges(module, None)


def plan(module: SAGEConv, x: Any, edge_index: Any, size: Any = None) -> Computation | None:
    """The forward pass of a call; ``None`` where ``x`` is neither a tensor nor a pair."""
    x = pair_of(x)
    if x is None:
        return None
    return lambda: _forward(module, x, edge_index, size)


def _forward(module: SAGEConv, x: Any, edge_index: Any, size: Any) -> Tensor:
    if module.project and hasattr(module, "lin"):
        x = (project(module.lin, x[0]).relu(), x[1])
    out, owned = aggregate_and_project(module, module.lin_l, edge_index, x=x, size=size)
    if module.root_weight and x[1] is not None:
        if leaves_out(module, out, module.lin_r, x[1]):
            return out
        out = add_root(out, owned, module.lin_r, x[1])
    return F.normalize(out, p=2.0, dim=-1) if module.normalize else out
