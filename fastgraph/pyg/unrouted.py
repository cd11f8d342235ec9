"""Counting what aggregates in PyG outside message passing, by the functions that it calls."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch_geometric import experimental
from torch_geometric.nn.aggr import Aggregation
from torch_geometric.nn.pool import glob

from fastgraph.plugins.patching import Patches
from fastgraph.routing.status import THREAD
from fastgraph.routing.unrouted import count_calls, count_modules, counting
from fastgraph.upstream import GLOBAL_POOLING, label_of


def install(patches: Patches) -> None:
    """Replace the calls of aggregations, pooling and other modules."""
    count_modules(patches, "torch_geometric.nn.conv")
    count_modules(patches, "torch_geometric.nn.pool")
    # Not its `forward`, which each class has of its own.
    patches.replace(Aggregation, "__call__", _calling(Aggregation.__call__))
    # What the functions call: programs import them by name.
    count_calls(patches, glob, "scatter", _pooling)


_MODE = "disable_dynamic_shapes"
_PARAMETERS = ["self", "x", "index", "ptr", "dim_size", "dim"]


def _calling(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """``Aggregation.__call__``, counted where it is no part of a call that is counted as a whole.

    In such parts PyG's decorator around it, which asks for an experimental mode, takes longer than
    we do, so that what it asks is looked up here.
    """
    counted = counting(upstream, _aggregation)
    modes = getattr(experimental, "__experimental_flag__", {})
    is_decorated = (
        inspect.isfunction(upstream) and upstream.__code__.co_filename == experimental.__file__
    )
    decorated: Any = getattr(upstream, "__wrapped__", None)  # and not what others have put there
    if (
        not is_decorated
        or _MODE not in modes
        or inspect.getfullargspec(decorated).args != _PARAMETERS
    ):
        return counted
    is_seen_by_dynamo = torch.compiler.is_dynamo_compiling

    @functools.wraps(upstream)
    def called(
        self: Aggregation,
        x: Any,
        index: Any = None,
        ptr: Any = None,
        dim_size: Any = None,
        dim: Any = -2,
        **others: Any,
    ) -> Any:
        if others or is_seen_by_dynamo() or not THREAD.counted or modes[_MODE]:
            return counted(self, x, index=index, ptr=ptr, dim_size=dim_size, dim=dim, **others)
        return decorated(self, x, index, ptr, dim_size, dim)

    return called


def _aggregation(args: tuple[Any, ...], _: dict[str, Any]) -> tuple[str, str]:
    return label_of(type(args[0])), "the aggregation is called by itself"


def _pooling(_: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, str]:
    reduce = kwargs.get("reduce", "sum")  # of users, who may call it with anything
    found = GLOBAL_POOLING.get(reduce) if isinstance(reduce, str) else None
    return found or ("scatter", "the reduction is none of a pooling function")
