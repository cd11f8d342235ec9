"""In-degrees of all nodes, from the edges as they are grouped here.

DGL makes a CSC to count them, which message passing that has a route would not need. ``GCN2Conv``,
``ChebConv`` and others ask for them first.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from dgl.heterograph_index import HeteroGraphIndex
from torch import Tensor

from fastgraph.dgl.conditions import layer_left
from fastgraph.dgl.index_objects import is_below, is_single, num_edges_of
from fastgraph.dgl.sizes import SUM
from fastgraph.dgl.structure import Ungrouped, structure_of
from fastgraph.graphs.memo import is_recording
from fastgraph.plugins.patching import Patches
from fastgraph.routing.conditions import too_few_edges
from fastgraph.routing.sizes import are_too_few
from fastgraph.routing.switch import SWITCH


def install(patches: Patches) -> None:
    """Replace ``in_degrees`` of DGL's index objects."""
    upstream = HeteroGraphIndex.in_degrees

    @functools.wraps(upstream)
    def in_degrees(self: Any, etype: int, v: Tensor) -> Tensor:
        if is_below(self, SUM.bound()):  # first of all, as such calls would notice
            counted: Tensor = upstream(self, etype, v)
            return counted
        found = _in_degrees(self, v) if SWITCH.active else None
        return upstream(self, etype, v) if found is None else found

    patches.replace(HeteroGraphIndex, "in_degrees", in_degrees)


def _in_degrees(gidx: Any, v: Tensor) -> Tensor | None:
    """The in-degree of every node of ``v``; ``None`` where DGL is to count.

    That is where it has a CSC already, where sums over neighbourhoods would be left to it, for
    which it needs one, as is a layer that has a route of its own, and where not all nodes are
    meant.
    """
    if type(gidx) is not HeteroGraphIndex:
        return None
    if not is_single(gidx) and gidx.number_of_etypes() != 1:
        return None
    num_edges = num_edges_of(gidx)
    if are_too_few(SUM, num_edges) or too_few_edges(num_edges) is not None:
        return None
    if layer_left() is not None:
        return None
    if not v.is_cpu or is_recording() or torch.is_autocast_enabled("cpu"):
        return None
    structure = structure_of(gidx)
    if not isinstance(structure, Ungrouped) or structure.device != v.device:
        return None
    if not torch.equal(v, torch.arange(structure.num_dst, dtype=v.dtype)):
        return None
    return structure.degrees().to(v.dtype)
