"""Layers that normalise or pass messages several times: left to upstream as a whole where small.

Each part of such a layer is left to upstream by itself if it is too small. On a graph where all are,
the layer asks once for all of them, and nothing in it asks again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch_geometric.nn import conv

from fastgraph.plugins.patching import Patches
from fastgraph.pyg.propagate import least_edges
from fastgraph.routing.sizes import is_too_small
from fastgraph.routing.status import leave
from fastgraph.routing.switch import SWITCH
from fastgraph.routing.wrappers import wrapped
from fastgraph.upstream import label_of

Width = Callable[[Any, object], object]


def _of_features(_: object, x: object) -> object:
    return x


def _of_result(module: Any, _: object) -> object:
    return module.out_channels


def _of_stacks(module: Any, _: object) -> object:
    return module.num_stacks * module.out_channels


_WIDTHS: dict[str, Width] = {
    "APPNP": _of_features,
    "ARMAConv": _of_stacks,
    "ChebConv": _of_features,
    "ClusterGCNConv": _of_features,
    "GCN2Conv": _of_features,
    "LGConv": _of_features,
    "MixHopConv": _of_features,
    "PDNConv": _of_result,
    "SGConv": _of_features,
    "SSGConv": _of_features,
    "TAGConv": _of_features,
}
"""By layer, what has as many channels as its messages, or their number. All have weights."""


def install(patches: Patches) -> None:
    """Replace the ``forward`` of these layers."""
    for name, width in _WIDTHS.items():
        cls = vars(conv).get(name)
        wrapper = None if cls is None else _asking(cls, width)
        if wrapper is not None:
            patches.replace(cls, "forward", wrapper)


def _asking(cls: Any, width: Width) -> Callable[..., Any] | None:
    """``cls.forward``, which asks whether all is too small; ``None`` for an unknown signature."""
    label, upstream = label_of(cls), cls.forward
    is_seen_by_dynamo = torch.compiler.is_dynamo_compiling

    def left_if_small(module: Any, x: object, edge_index: object) -> list[object] | None:
        # A subclass may have messages of its own.
        if is_seen_by_dynamo() or type(module) is not cls:
            return None
        if not is_too_small(least_edges, edge_index, width, module, x) or not SWITCH.active:
            return None
        return leave(label, module)

    return wrapped(upstream, left_if_small, ("self", "x", "edge_index"), upstream)
