"""The PyG adapter: layers and message passing of known form become operators.

Nothing here imports ``torch_geometric`` until a user has: routes are installed after its import.
"""

from __future__ import annotations

import importlib

from fastgraph.routing.patching import Patches
from fastgraph.routing.route import Route


def _route(replaced: str, module: str) -> Route:
    """The route that ``fastgraph.pyg.<module>`` installs."""

    def install(patches: Patches) -> None:
        importlib.import_module(f"fastgraph.pyg.{module}").install(patches)

    return Route(f"PyG {replaced}", "torch_geometric.nn", install)


ROUTES = (
    _route("propagate", "propagate"),
    _route("gcn_norm", "gcn_norm"),
    _route("scripting", "scripting"),
    _route("GCNConv", "gcn_conv"),
    _route("SAGEConv", "sage_conv"),
    _route("GraphConv", "graph_conv"),
    _route("GATv2Conv", "gatv2_conv"),
    _route("GATConv", "gat_conv"),
    _route("TransformerConv", "transformer_conv"),
)


def routed_layers() -> list[str]:
    """Names of PyG's layers that have a route. Imports ``torch_geometric``."""
    import torch_geometric.nn.conv as conv

    from fastgraph.pyg.messages import known_message

    classes = (vars(conv)[name] for name in conv.__all__ if name != "MessagePassing")
    attention = (conv.GATConv, conv.GATv2Conv, conv.TransformerConv)
    return [
        c.__name__
        for c in classes
        if c in attention or (hasattr(c, "message") and known_message(c))
    ]
