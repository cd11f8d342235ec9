"""Tensors within the arguments and results of a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastgraph.plugins.framework import imported_frameworks

Visit = Callable[[str, Tensor], Any]


def map_tensors(value: Any, visit: Visit, name: str) -> Any:
    """``value`` with ``visit(name, tensor)`` in place of each tensor.

    Looks into tuples, named tuples, lists, dictionaries and the data objects of frameworks; what
    else there is stays the same object. Names read like Python: ``x[0]``, ``x_dict['paper']``.
    """
    if isinstance(value, Tensor):
        return visit(name, value)
    if isinstance(value, dict):
        return {
            key: map_tensors(part, visit, f"{name}[{key!r}]" if name else str(key))
            for key, part in value.items()
        }
    if isinstance(value, (tuple, list)):
        parts = [map_tensors(part, visit, f"{name}[{i}]") for i, part in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    for framework in imported_frameworks():
        copied = framework.map_tensors(value, lambda part, n: map_tensors(part, visit, n), name)
        if copied is not NotImplemented:
            return copied
    return value


def named_tensors(value: Any, name: str) -> dict[str, Tensor]:
    """All tensors within ``value``, by name."""
    found: dict[str, Tensor] = {}

    def visit(name: str, tensor: Tensor) -> Tensor:
        found[name] = tensor
        return tensor

    map_tensors(value, visit, name)
    return found


def to_double(tensor: Tensor) -> Tensor:
    """A floating-point tensor of any layout as float64; others as they are."""
    for framework in imported_frameworks():
        own = framework.to_double(tensor)
        if own is not None:
            return own
    return tensor.to(torch.float64) if tensor.is_floating_point() else tensor


def is_differentiable(tensor: Tensor) -> bool:
    """True if gradients of an input can be compared: it is of floating point and dense."""
    return tensor.is_floating_point() and tensor.layout == torch.strided
