"""Counting what aggregates in DGL neither by messages nor by segments."""

from __future__ import annotations

from fastgraph.plugins.patching import Patches
from fastgraph.routing.unrouted import count_modules


def install(patches: Patches) -> None:
    """Replace the ``forward`` of such modules."""
    count_modules(patches, "dgl.nn.pytorch.glob")
