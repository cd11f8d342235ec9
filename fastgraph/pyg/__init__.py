"""The PyG adapter: layers and message passing of known form become operators.

Nothing here imports ``torch_geometric`` until a user has: routes are installed after its import.
"""

from __future__ import annotations

import importlib

from fastgraph.hookspecs import hookimpl
from fastgraph.pyg.framework import PyG
from fastgraph.routing.patching import Patches
from fastgraph.routing.route import Route


def _route(replaced: str, module: str) -> Route:
    """The route that ``fastgraph.pyg.<module>`` installs."""

    def install(patches: Patches) -> None:
        importlib.import_module(f"fastgraph.pyg.{module}").install(patches)

    return Route(f"PyG {replaced}", "torch_geometric.nn", install)


@hookimpl
def fastgraph_routes() -> list[Route]:
    """The routes of PyG's layers."""
    return [
        _route("propagate", "propagate"),
        _route("gcn_norm", "gcn_norm"),
        _route("scripting", "scripting"),
        _route("GCNConv", "gcn_conv"),
        _route("SAGEConv", "sage_conv"),
        _route("GraphConv", "graph_conv"),
        _route("GATv2Conv", "gatv2_conv"),
        _route("GATConv", "gat_conv"),
        _route("TransformerConv", "transformer_conv"),
    ]


@hookimpl
def fastgraph_frameworks() -> list[PyG]:
    """PyG as comparisons and reports see it."""
    return [PyG()]
