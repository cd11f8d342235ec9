"""DGL as a :class:`fastgraph.plugins.framework.Framework`. Imports it when it is asked only."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from fastgraph.plugins.framework import MapTensors
from fastgraph.upstream import LAYERS

_LAYERS = "dgl.nn.pytorch.conv"


class DGL:
    """See :class:`fastgraph.plugins.framework.Framework`."""

    name = "DGL"
    package = "dgl"

    def routed_layers(self) -> list[str]:
        """Names of the layers in ``dgl.nn`` whose aggregation has a route."""
        import dgl.nn

        return sorted(layer.name for layer in LAYERS[_LAYERS] if hasattr(dgl.nn, layer.name))

    def is_layer(self, module: nn.Module) -> bool:
        """True if a module is one of the layers of ``dgl.nn``, or of a subclass."""
        return any(f"{cls.__module__}.".startswith(f"{_LAYERS}.") for cls in type(module).__mro__)

    def record_path(self, layer: nn.Module, record: Callable[[str, bool], None]) -> list[Any]:
        """A hook on a layer, which must therefore be a copy: DGL has one path only."""

        def before(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            record(type(arguments[0]).__name__ if arguments else "DGLGraph", False)

        return [layer.register_forward_pre_hook(before)]

    def map_tensors(self, value: Any, replace: MapTensors, name: str) -> Any:
        """A copy of a ``DGLGraph`` or a block over the same edges, with other features."""
        dgl = sys.modules.get("dgl")
        if dgl is None or not isinstance(value, dgl.DGLGraph):
            return NotImplemented
        copied = value.local_var()
        frames = [
            (f"{name}.edges[{etype!r}]", copied.edges[etype]) for etype in value.canonical_etypes
        ]
        if value.is_block:
            frames += [(f"{name}.srcnodes[{t!r}]", copied.srcnodes[t]) for t in value.srctypes]
            frames += [(f"{name}.dstnodes[{t!r}]", copied.dstnodes[t]) for t in value.dsttypes]
        else:
            frames += [(f"{name}.nodes[{t!r}]", copied.nodes[t]) for t in value.ntypes]
        for prefix, frame in frames:
            for key, part in dict(frame.data).items():
                frame.data[key] = replace(part, f"{prefix}.{key}")
        return copied

    def to_double(self, tensor: Any) -> None:
        """DGL has no tensors of its own."""
