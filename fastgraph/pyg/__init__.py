"""The PyG adapter: layers and message passing of known form become operators.

Nothing here imports ``torch_geometric`` until a user has: routes are installed after its import.
"""

from __future__ import annotations

import importlib

from fastgraph.plugins.hookspecs import hookimpl
from fastgraph.plugins.patching import Patches
from fastgraph.plugins.route import Route
from fastgraph.pyg.framework import PyG
from fastgraph.upstream import LAYERS


def _route(replaced: str, module: str) -> Route:
    """The route that ``fastgraph.pyg.<module>`` installs."""

    def install(patches: Patches) -> None:
        importlib.import_module(f"fastgraph.pyg.{module}").install(patches)

    return Route(f"PyG {replaced}", "torch_geometric.nn", install)


@hookimpl
def fastgraph_routes() -> list[Route]:
    """The routes of PyG's layers."""
    layers = LAYERS["torch_geometric.nn.conv"]
    return [
        _route("propagate", "propagate"),
        _route("gcn_norm", "gcn_norm"),
        _route("scripting", "scripting"),
        _route("scatter, segment and softmax", "groups"),
        _route("spmm", "spmm"),
        _route("unrouted", "unrouted"),
        *(_route(name, file) for name, file, _ in layers if file is not None),
    ]


@hookimpl
def fastgraph_frameworks() -> list[PyG]:
    """PyG as comparisons and reports see it."""
    return [PyG()]
