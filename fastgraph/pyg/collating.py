"""Batches of many small graphs: what PyG does for each of them is done for all at once.

Of 128 molecules PyG adds up their nodes, shifts their edges and numbers them graph by graph, which
takes as long as a layer. Numbers, dtypes and errors are PyG's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info
from torch_geometric.data import Data
from torch_geometric.utils import cumsum

from fastgraph.plugins.patching import Patches

_rules = attrgetter("__inc__", "__cat_dim__", "num_nodes")

_RULES = _rules(Data)
_ARE_PYGS = all(
    getattr(getattr(rule, "fget", rule), "__globals__", None) is vars(sys.modules[Data.__module__])
    for rule in _RULES
)
"""False for rules of a program that has changed PyG's before this module was imported."""


def install(patches: Patches) -> None:
    """Collate plain tensors of plain graphs at once."""
    module = import_module("torch_geometric.data.collate")
    patches.replace(module, "_collate", _collated(module._collate))
    patches.replace(module, "repeat_interleave", _repeated(module.repeat_interleave))


def _collated(upstream: Callable[..., Any]) -> Callable[..., Any]:
    def _collate(
        key: str, values: list[Any], data_list: Sequence[Any], stores: list[Any], increment: bool
    ) -> Any:
        found = None
        if increment and _are_plain(key, values, data_list):
            collated = _indices if "index" in key or key == "face" else _attributes
            found = collated(values, stores)
        return upstream(key, values, data_list, stores, increment) if found is None else found

    return _collate


def _are_plain(key: str, values: list[Any], data_list: Sequence[Any]) -> bool:
    """True for tensors in memory of graphs of the class ``Data``, whose rules nobody has changed.

    Workers are left to PyG: they write into memory that is shared.
    """
    return (
        type(key) is str
        and "batch" not in key
        and all(type(value) is Tensor and value.layout == torch.strided for value in values)
        and not values[0].is_nested
        and all(type(data) is Data for data in data_list)
        and _ARE_PYGS
        and _rules(Data) == _RULES
        and get_worker_info() is None
    )


def _attributes(values: list[Tensor], stores: list[Any]) -> tuple[Tensor, Tensor, Tensor] | None:
    """The rows of all graphs, where those of each begin and end, and zeros, which are added."""
    if any(value.dim() == 0 for value in values):
        return None
    slices = cumsum(torch.tensor([value.shape[0] for value in values]))
    return torch.cat(values), slices, torch.zeros(len(values), dtype=torch.int64)


def _indices(values: list[Tensor], stores: list[Any]) -> tuple[Tensor, Tensor, Tensor] | None:
    """The same of indices of nodes, which those before are added to, and how many these are."""
    first = values[0]
    kind = first.dtype, first.dim(), first.device
    if first.dim() == 0 or first.dtype not in (torch.int32, torch.int64) or not first.is_cpu:
        return None
    if any((value.dtype, value.dim(), value.device) != kind for value in values):
        return None
    if any("x" not in store and "num_nodes" not in store for store in stores):
        return None  # PyG warns of numbers of nodes that it has to guess
    counts = [_num_nodes(store) for store in stores]
    if any(type(count) is not int for count in counts):
        return None
    sizes = torch.tensor([value.shape[-1] for value in values])
    before = cumsum(torch.tensor(counts)[:-1])
    merged = torch.cat(values, dim=-1)
    if int(before[-1]) != 0:
        merged += before.repeat_interleave(sizes, output_size=merged.shape[-1])
    return merged, cumsum(sizes), before


def _num_nodes(store: Any) -> Any:
    """As ``store.num_nodes``, which asks a storage by key what features in front of it say."""
    mapping = store._mapping
    x = mapping["x"] if next(iter(mapping), None) == "x" and "num_nodes" not in mapping else None
    if type(x) is Tensor and x.layout == torch.strided and x.dim() > 0:
        return x.shape[0]
    return store.num_nodes


def _repeated(upstream: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def repeat_interleave(repeats: list[int], device: torch.device | None = None) -> Tensor:
        if not repeats or any(type(count) is not int or count < 0 for count in repeats):
            return upstream(repeats, device)
        counts = torch.tensor(repeats, device=device)
        return torch.arange(len(repeats), device=device).repeat_interleave(
            counts, output_size=sum(repeats)
        )

    return repeat_interleave
