"""Layers that normalise or propagate several times: run by upstream as a whole on small graphs.

Each propagation is left to upstream where its graph has too few edges for an operator. Where that
holds for all of a layer's, it is decided once for the call of the layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import conv

from fastgraph.plugins.patching import Patches
from fastgraph.pyg.propagate import least_edges
from fastgraph.pyg.traced import kind_of
from fastgraph.routing.programs import forget, last_outcome
from fastgraph.routing.sizes import LEARNED_SUM, TOO_SMALL, WEIGHTED_SUM, is_tiny, is_too_small
from fastgraph.routing.small_calls import SmallCalls
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
"""By layer, the tensor with as many channels as its messages, or their number. All have weights."""

_LEAST = {"ChebConv": WEIGHTED_SUM, "ClusterGCNConv": WEIGHTED_SUM, "PDNConv": LEARNED_SUM}
"""Of layers that add or leave out edges at each call, or learn weights."""

_TRACED = ("EGConv", "FAConv")
"""Layers that normalise and pass traced messages once, of which a first call tells the size."""

_TOO_LITTLE = SmallCalls()
"""Their calls of which the message was too small."""


def install(patches: Patches) -> None:
    """Replace the ``forward`` of these layers."""
    for name, width in _WIDTHS.items():
        cls = vars(conv).get(name)
        wrapper = None if cls is None else _asking(cls, width)
        if wrapper is not None:
            patches.replace(cls, "forward", wrapper)
    for name in _TRACED:
        cls = vars(conv).get(name)
        if cls is not None and "edge_index" in inspect.signature(cls.forward).parameters:
            patches.replace(cls, "forward", _learning(cls) or cls.forward)


def _asking(cls: Any, width: Width) -> Callable[..., Any] | None:
    """``cls.forward``, left to upstream on small graphs; ``None`` for an unknown signature."""
    label, upstream = label_of(cls), cls.forward
    least = _LEAST.get(cls.__name__, least_edges)
    is_seen_by_dynamo = torch.compiler.is_dynamo_compiling

    def left_if_small(module: Any, x: object, edge_index: object) -> list[object] | None:
        # A subclass may have messages of its own.
        if is_seen_by_dynamo() or type(module) is not cls:
            return None
        if not is_too_small(least, edge_index, width, module, x) or not SWITCH.active:
            return None
        return leave(label, module)

    return wrapped(upstream, left_if_small, ("self", "x", "edge_index"), upstream)


def _learning(cls: Any) -> Callable[..., Any] | None:
    """The same for a layer whose first call of a kind shows that its message is too small."""
    label, upstream = label_of(cls), cls.forward
    at = list(inspect.signature(upstream).parameters).index("edge_index") - 1
    is_seen_by_dynamo = torch.compiler.is_dynamo_compiling

    def kind(*values: Any) -> tuple[object, ...]:
        return kind_of(*values[:at], *values[at + 1 :])

    def left_if_small(module: Any, *values: Any) -> list[object] | None:
        edge_index = values[at]
        if is_seen_by_dynamo() or type(edge_index) is not Tensor or not edge_index.is_cpu:
            return None
        is_own = type(module) is cls
        if not (is_own and is_tiny(edge_index)):
            num_edges = edge_index.numel() // 2
            if not _TOO_LITTLE.cover(module, num_edges, kind, *values):
                return None
        if not SWITCH.active:
            return None
        return leave(label if is_own else label_of(type(module)), module)

    def forward(module: Any, *values: Any) -> Any:
        edge_index = values[at]
        if is_seen_by_dynamo() or type(edge_index) is not Tensor or not edge_index.is_cpu:
            return upstream(module, *values)
        forget(module)  # this call may have none, as where `propagate` is another function
        out = upstream(module, *values)
        if last_outcome(module) is TOO_SMALL:
            _TOO_LITTLE.add(module, edge_index.numel() // 2, kind(*values))
        return out

    parameters = inspect.signature(upstream).parameters.values()
    if any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in parameters):
        return None
    return wrapped(upstream, left_if_small, tuple(p.name for p in parameters), forward)
