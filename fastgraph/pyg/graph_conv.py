"""The route of ``GraphConv``: the node's own term is added in place to that of its neighbours.

The product of the neighbours may come before their sum or mean. Everything else is upstream's
``forward``; the aggregation takes the route of ``propagate``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch_geometric.nn.conv import GraphConv

from fastgraph.plugins.patching import Patches
from fastgraph.pyg.hetero_conv import leaves_out
from fastgraph.pyg.modules import add_root, pair_of
from fastgraph.pyg.propagate import aggregate_and_project, least_edges
from fastgraph.routing.dispatch import Computation, replace_method
from fastgraph.routing.sizes import Least, on_edge_index


def install(patches: Patches) -> None:
    """Replace ``GraphConv.forward``."""
    replace_method(
        patches,
        GraphConv,
        "forward",
        plan,
        decided=False,
        is_small=on_edge_index(_least),
        has_edge_index=True,
    )


def _least(module: GraphConv, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Least:
    return least_edges(module, args[2] if len(args) > 2 else kwargs.get("edge_weight"))


def plan(
    module: GraphConv,
    x: Any,
    edge_index: Any,
    edge_weight: Tensor | None = None,
    size: Any = None,
) -> Computation | None:
    """The forward pass of a call, or ``None`` where there is nothing to gain."""
    x = pair_of(x)
    if x is None or x[1] is None:
        return None
    return lambda: _forward(module, x, edge_index, edge_weight, size)


def _forward(
    module: GraphConv, x: Any, edge_index: Any, edge_weight: Tensor | None, size: Any
) -> Tensor:
    arguments = {"x": x, "edge_weight": edge_weight, "size": size}
    out, owned = aggregate_and_project(module, module.lin_rel, edge_index, **arguments)
    if leaves_out(module, out, module.lin_root, x[1]):
        return out
    return add_root(out, owned, module.lin_root, x[1])
