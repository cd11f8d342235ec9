"""The interface of a library of graph layers: all that the rest of fastgraph knows of it.

An adapter (:mod:`fastgraph.pyg`) describes its library through the hook
``fastgraph_frameworks``. Nothing here imports the library before the program does.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from fastgraph.plugins.hookspecs import plugin_manager

MapTensors = Callable[[Any, str], Any]
"""Replaces the tensors in a value, given its name."""


@runtime_checkable
class Framework(Protocol):
    """A library of graph layers. The methods are called once its package is imported.

    Attributes:
        name: for people.
        package: the name by which programs import it.
    """

    name: str
    package: str

    def routed_layers(self) -> list[str]:
        """Names of the layers that have a route. Imports the package."""
        ...

    def is_layer(self, module: nn.Module) -> bool:
        """True if a module passes messages, so that its calls can be routed and compared."""
        ...

    def record_path(self, layer: nn.Module, record: Callable[[str, bool], None]) -> list[Any]:
        """Have upstream's calls of a layer recorded: handles with a method ``remove``.

        ``record`` takes the form of the graph, and whether messages were multiplied by it instead
        of being made.
        """
        ...

    def map_tensors(self, value: object, replace: MapTensors, name: str) -> Any:
        """A copy of one of the library's containers of tensors, or ``NotImplemented``."""
        ...

    def to_double(self, tensor: Tensor) -> Tensor | None:
        """A copy of one of the library's own tensors for float64, ``None`` for others."""
        ...


@functools.cache
def frameworks() -> tuple[Framework, ...]:
    """All that plugins describe."""
    found = [f for fs in plugin_manager().hook.fastgraph_frameworks() for f in fs]
    for framework in found:
        if not isinstance(framework, Framework):
            raise TypeError(
                "fastgraph_frameworks must return objects as described in "
                f"fastgraph.plugins.framework.Framework, got {framework!r}"
            )
    return tuple(found)


def imported_frameworks() -> Iterator[Framework]:
    """Those whose package the program has imported."""
    return (framework for framework in frameworks() if framework.package in sys.modules)


def is_message_passing(module: nn.Module) -> bool:
    """True if a module is a layer of any of them."""
    return any(framework.is_layer(module) for framework in imported_frameworks())
