"""Degrees of all nodes, from the edges as they are held here.

DGL makes a CSC to count in-degrees and a CSR to count out-degrees, which message passing that has a
route would not need. ``APPNPConv``, ``GCN2Conv``, ``ChebConv`` and others ask for them first.
In-degrees come of grouping edges by destination, as what follows needs them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
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
    """Replace ``in_degrees`` and ``out_degrees`` of DGL's index objects."""
    for name, count in (("in_degrees", _in_degrees), ("out_degrees", _out_degrees)):
        patches.replace(HeteroGraphIndex, name, _counting(getattr(HeteroGraphIndex, name), count))


def _counting(
    upstream: Callable[..., Tensor], count: Callable[[Any, Tensor], Tensor | None]
) -> Callable[..., Tensor]:
    @functools.wraps(upstream)
    def degrees(self: Any, etype: int, v: Tensor) -> Tensor:
        if is_below(self, SUM.bound()):  # first of all, as such calls would notice
            return upstream(self, etype, v)
        found = count(self, v) if SWITCH.active else None
        return upstream(self, etype, v) if found is None else found

    return degrees


def _in_degrees(gidx: Any, v: Tensor) -> Tensor | None:
    found = _structure(gidx, v)
    if found is None or not _are_all(v, found.num_dst):
        return None
    return found.degrees().to(v.dtype, copy=True)  # the caller's own


def _out_degrees(gidx: Any, v: Tensor) -> Tensor | None:
    found = _structure(gidx, v)
    if found is None or not _are_all(v, found.num_src):
        return None
    return found.out_degrees.to(v.dtype, copy=True)  # the caller's own


def _are_all(v: Tensor, num_nodes: int) -> bool:
    return torch.equal(v, torch.arange(num_nodes, dtype=v.dtype))


def _structure(gidx: Any, v: Tensor) -> Ungrouped | None:
    """The edges of which degrees come; ``None`` where DGL is to count.

    That is where it has a CSC already, where sums over neighbourhoods would be left to it, for
    which it needs one, as is a layer that has a route of its own.
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
    return structure
