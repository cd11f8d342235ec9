"""Tensors within the arguments and results of a module."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Visit = Callable[[str, Tensor], Any]


def map_tensors(value: Any, visit: Visit, name: str) -> Any:
    """``value`` with ``visit(name, tensor)`` in place of each tensor.

    Looks into tuples, named tuples, lists, dictionaries and PyG's data objects; what else there is
    stays the same object. Names read like Python: ``x[0]``, ``x_dict['paper']``.
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
    if _is_pyg_data(value):
        copied = value.__copy__()
        for store in copied.stores:
            prefix = name if store._key is None else f"{name}[{store._key!r}]"
            for key, part in store.items():
                store[key] = map_tensors(part, visit, f"{prefix}.{key}")
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
    if is_edge_index(tensor):
        # A fresh one, because upstream keeps a float32 matrix of ones in it.
        return _fresh_edge_index(tensor)
    return tensor.to(torch.float64) if tensor.is_floating_point() else tensor


def _fresh_edge_index(edge_index: Any) -> Tensor:
    fresh: Tensor = type(edge_index)(
        edge_index.as_tensor(),
        sparse_size=edge_index.sparse_size(),
        sort_order=edge_index.sort_order,
        is_undirected=edge_index.is_undirected,
    )
    return fresh


def is_edge_index(value: object) -> bool:
    """Whether a value is PyG's ``EdgeIndex``, without importing PyG."""
    pyg = sys.modules.get("torch_geometric")
    return pyg is not None and isinstance(value, pyg.EdgeIndex)


def is_differentiable(tensor: Tensor) -> bool:
    """Whether gradients of an input can be compared: floating point and dense."""
    return tensor.is_floating_point() and tensor.layout == torch.strided


def _is_pyg_data(value: object) -> bool:
    data = sys.modules.get("torch_geometric.data.data")
    return data is not None and isinstance(value, data.BaseData)
