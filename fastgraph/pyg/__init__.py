"""The PyG adapter: layers and message passing of known form become operators.

Nothing here imports ``torch_geometric`` until a user has: routes are installed after its import.
Where it has no sampler, :func:`fix_sampling` gives it ours.
"""

from __future__ import annotations

import importlib

from fastgraph.plugins.hookspecs import hookimpl
from fastgraph.plugins.patching import Patches
from fastgraph.plugins.route import Route
from fastgraph.pyg.framework import PyG
from fastgraph.pyg.sampling import fix_sampling, while_enabled
from fastgraph.upstream import LAYERS

__all__ = ["fix_sampling"]


def _route(replaced: str, module: str) -> Route:
    """The route that ``fastgraph.pyg.<module>`` installs."""

    def install(patches: Patches) -> None:
        importlib.import_module(f"fastgraph.pyg.{module}").install(patches)

    return Route(f"PyG {replaced}", "torch_geometric.nn", install)


@hookimpl
def fastgraph_routes() -> list[Route]:
    """The routes of PyG's layers."""
    layers = LAYERS["torch_geometric.nn.conv"] + LAYERS["torch_geometric.nn.aggr.utils"]
    return [
        _route("propagate", "propagate"),
        _route("gcn_norm", "gcn_norm"),
        _route("small layers", "small_layers"),
        _route("products of PNAConv", "pna_conv"),
        _route("scripting", "scripting"),
        _route("scatter, segment and softmax", "groups"),
        _route("spmm", "spmm"),
        _route("batches of graphs", "collating"),
        _route("sums over types of edges", "hetero_conv"),
        _route("unrouted", "unrouted"),
        *(_route(name, file) for name, file, _ in layers if file is not None),
    ]


@hookimpl
def fastgraph_frameworks() -> list[PyG]:
    """PyG as comparisons and reports see it."""
    return [PyG()]


@hookimpl
def fastgraph_switched(active: bool) -> None:
    """Give PyG our sampler from now on where it has none, or not any more."""
    while_enabled(active)
