"""PyG as a :class:`fastgraph.plugins.framework.Framework`. Imports it when it is asked only."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fastgraph.plugins.framework import MapTensors
from fastgraph.upstream import LAYERS


class PyG:
    """See :class:`fastgraph.plugins.framework.Framework`."""

    name = "PyG"
    package = "torch_geometric"

    def routed_layers(self) -> list[str]:
        """Names of the layers in ``torch_geometric.nn.conv`` that have a route."""
        import torch_geometric.nn.conv as conv

        from fastgraph.pyg.messages import known_message

        named = {layer.name for layer in LAYERS[conv.__name__]}
        classes = (vars(conv)[name] for name in conv.__all__ if name != "MessagePassing")
        return [c.__name__ for c in classes if c.__name__ in named or known_message(c)]

    def is_layer(self, module: nn.Module) -> bool:
        """True if a module is a ``MessagePassing``."""
        pyg = sys.modules.get("torch_geometric.nn")
        return pyg is not None and isinstance(module, pyg.MessagePassing)

    def record_path(self, layer: Any, record: Callable[[str, bool], None]) -> list[Any]:
        """PyG's own message-passing hooks on a layer, which must therefore be a copy."""

        def before_propagate(_: Any, arguments: Any) -> None:
            record(_form(arguments[0]), False)

        def before_product(_: Any, arguments: Any) -> None:
            record(_form(arguments[0]), True)

        return [
            layer.register_propagate_forward_pre_hook(before_propagate),
            layer.register_message_and_aggregate_forward_pre_hook(before_product),
        ]

    def map_tensors(self, value: Any, replace: MapTensors, name: str) -> Any:
        """A copy of a ``Data``, a ``HeteroData`` or the like."""
        data = sys.modules.get("torch_geometric.data.data")
        if data is None or not isinstance(value, data.BaseData):
            return NotImplemented
        copied = value.__copy__()
        for store in copied.stores:
            prefix = name if store._key is None else f"{name}[{store._key!r}]"
            for key, part in store.items():
                store[key] = replace(part, f"{prefix}.{key}")
        return copied

    def to_double(self, tensor: Any) -> Tensor | None:
        """A fresh ``EdgeIndex``, because upstream keeps a float32 matrix of ones in it."""
        if not _is_edge_index(tensor):
            return None
        fresh: Tensor = type(tensor)(
            tensor.as_tensor(),
            sparse_size=tensor.sparse_size(),
            sort_order=tensor.sort_order,
            is_undirected=tensor.is_undirected,
        )
        return fresh


def _is_edge_index(value: object) -> bool:
    pyg = sys.modules.get("torch_geometric")
    return pyg is not None and isinstance(value, pyg.EdgeIndex)


def _form(graph: object) -> str:
    if _is_edge_index(graph):
        return "EdgeIndex"
    if isinstance(graph, Tensor):
        layouts = {
            torch.strided: "edge_index tensor",
            torch.sparse_coo: "torch.sparse COO adjacency",
            torch.sparse_csr: "torch.sparse CSR adjacency",
            torch.sparse_csc: "torch.sparse CSC adjacency",
        }
        return layouts.get(graph.layout, str(graph.layout))
    return type(graph).__name__
