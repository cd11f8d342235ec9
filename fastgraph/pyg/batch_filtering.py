"""Samples as batches of PyG: their edges get the numbers of the graph at once."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import HGTSampler, NeighborSampler


def numbering_edges_once(upstream: Callable[[Any, Any], Any], sampler: str) -> Any:
    """``filter_fn`` of a loader, which gets the edges of a sample by their own numbers.

    PyG finds these by ``permutation[edges]``, for ``e_id`` and again for each attribute of edges.
    torch's ``index_select`` takes half of the time of that.

    Args:
        upstream: the method.
        sampler: the name of the loader's attribute.
    """

    @functools.wraps(upstream)
    def filter_fn(self: Any, out: Any) -> Any:
        of_edges = None
        own = getattr(self, sampler)
        if _is_usual(self, own):
            of_edges = _numbers(own.edge_permutation, out.edge)
        if of_edges is None:
            return upstream(self, out)
        numbered, loader = copy.copy(out), copy.copy(self)
        numbered.edge = of_edges
        # Nothing else is asked of the sampler here.
        vars(loader)[sampler] = SimpleNamespace(edge_permutation=None)
        return upstream(loader, numbered)

    return filter_fn


def _is_usual(loader: Any, sampler: Any) -> bool:
    """True if nobody but PyG sees the places of edges that it sampled."""
    return (
        loader.transform_sampler_output is None
        and type(sampler) in (NeighborSampler, HGTSampler)
        and isinstance(loader.data, Data | HeteroData)
    )


def _numbers(permutation: Any, edges: Any) -> Any:
    """Places of edges in the order of the sampler by their numbers in the graph.

    Returns:
        ``None`` if there is nothing to be done, or not here.
    """
    if isinstance(permutation, dict) and isinstance(edges, dict):
        found = {key: _of_type(permutation.get(key), edge) for key, edge in edges.items()}
        return None if any(edge is None for edge in found.values()) else found
    return None if permutation is None else _of_type(permutation, edges)


def _of_type(permutation: Tensor | None, edge: Any) -> Any:
    if permutation is None:  # edges came in the order of the sampler
        return edge
    if type(edge) is not Tensor or edge.device.type != "cpu" or permutation.device.type != "cpu":
        return None
    return torch.index_select(permutation, 0, edge)
