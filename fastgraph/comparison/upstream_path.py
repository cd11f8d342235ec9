"""The code path that upstream takes in each message-passing layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from torch import nn

from fastgraph.plugins.framework import imported_frameworks


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
    """Collects the paths of all calls of layers within ``module``, first call of each layer.

    Hooks are set on the layers, which must therefore be copies.
    """
    found: dict[str, UpstreamPath] = {}
    paths: list[UpstreamPath] = []
    with ExitStack() as stack:
        for name, layer in module.named_modules():
            for framework in imported_frameworks():
                if framework.is_layer(layer):
                    for handle in framework.record_path(layer, _recorder(name, layer, found)):
                        stack.callback(handle.remove)
        yield paths
    paths.extend(found.values())


def _recorder(
    name: str, layer: nn.Module, found: dict[str, UpstreamPath]
) -> Callable[[str, bool], None]:
    kind = type(layer).__name__

    def record(graph: str, fused: bool) -> None:
        if fused or name not in found:
            found[name] = UpstreamPath(name, kind, graph, fused)

    return record
