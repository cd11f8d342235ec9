"""The DGL adapter: layers and message passing of known form become operators.

Nothing here imports ``dgl``, or anything that takes long to import, until a user has: routes are
installed after its import. Where DGL's own import fails on a newer torch, :func:`fix_import` helps.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from fastgraph.dgl.importing import (
    fix_import,
    while_enabled,
    why_incomplete,
    why_no_graphbolt,
)
from fastgraph.plugins.hookspecs import hookimpl
from fastgraph.plugins.patching import Patches
from fastgraph.plugins.route import Route
from fastgraph.upstream import LAYERS

if TYPE_CHECKING:
    from fastgraph.dgl.framework import DGL

__all__ = ["fix_import", "why_incomplete", "why_no_graphbolt"]


def _route(replaced: str, upstream: str, module: str) -> Route:
    """The route that ``fastgraph.dgl.<module>`` installs once ``upstream`` is imported."""

    def install(patches: Patches) -> None:
        if "dgl.backend.pytorch.sparse" not in sys.modules:  # DGL computes by another library
            return
        importlib.import_module(f"fastgraph.dgl.{module}").install(patches)

    return Route(f"DGL {replaced}", upstream, install)


@hookimpl
def fastgraph_routes() -> list[Route]:
    """The routes of DGL's message passing and layers."""
    layers = LAYERS["dgl.nn.pytorch.conv"]
    return [
        _route("index objects", "dgl", "index_objects"),
        _route("graphs", "dgl", "structure"),
        _route("degrees", "dgl", "degrees"),
        _route("message passing", "dgl", "message_passing"),
        _route("NeighborSampler", "dgl.dataloading", "neighbor_sampler"),
        _route("unrouted", "dgl.nn.pytorch", "unrouted"),
        *(_route(name, "dgl.nn.pytorch", file) for name, file, _ in layers if file is not None),
    ]


@hookimpl
def fastgraph_frameworks() -> list[DGL]:
    """DGL as comparisons and reports see it."""
    from fastgraph.dgl.framework import DGL

    return [DGL()]


@hookimpl
def fastgraph_switched(active: bool) -> None:
    """Have ``import dgl`` succeed from now on, or not any more."""
    while_enabled(active)
