"""Which of its paths upstream took in each message-passing layer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastgraph.comparison.values import is_edge_index


@dataclass(frozen=True)
class UpstreamPath:
    """How upstream ran one layer.

    Attributes:
        layer: the layer's name in the module; empty for the module itself.
        kind: its class.
        graph: the form of the graph that messages were passed along.
        fused: whether ``message_and_aggregate`` multiplied by the adjacency matrix instead of
            making a message for each edge.
    """

    layer: str
    kind: str
    graph: str
    fused: bool


@contextmanager
def recorded_paths(module: nn.Module) -> Iterator[list[UpstreamPath]]:
    """Collects the paths of all calls of PyG layers within ``module``, first call of each layer.

    PyG's own message-passing hooks are set on the layers, which must therefore be copies.
    """
    found: dict[str, UpstreamPath] = {}
    paths: list[UpstreamPath] = []
    with ExitStack() as stack:
        for name, layer in module.named_modules():
            if is_message_passing(layer):
                for handle in _set_hooks(name, layer, found):
                    stack.callback(handle.remove)
        yield paths
    paths.extend(found.values())


def is_message_passing(layer: nn.Module) -> bool:
    """Whether a layer is one of PyG's, without importing PyG."""
    pyg = sys.modules.get("torch_geometric.nn")
    return pyg is not None and isinstance(layer, pyg.MessagePassing)


def _set_hooks(name: str, layer: Any, found: dict[str, UpstreamPath]) -> list[Any]:
    kind = type(layer).__name__

    def before_propagate(_: Any, given: Any) -> None:
        found.setdefault(name, UpstreamPath(name, kind, _form(given[0]), False))

    def before_product(_: Any, given: Any) -> None:
        found[name] = UpstreamPath(name, kind, _form(given[0]), True)

    return [
        layer.register_propagate_forward_pre_hook(before_propagate),
        layer.register_message_and_aggregate_forward_pre_hook(before_product),
    ]


def _form(graph: object) -> str:
    if is_edge_index(graph):
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
