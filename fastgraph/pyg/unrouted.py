"""Counting what aggregates in PyG outside message passing, by the functions that it calls."""

from __future__ import annotations

from typing import Any

from torch_geometric.nn.aggr import Aggregation
from torch_geometric.nn.pool import glob

from fastgraph.plugins.patching import Patches
from fastgraph.routing.unrouted import count_calls, count_modules
from fastgraph.upstream import GLOBAL_POOLING, label_of


def install(patches: Patches) -> None:
    """Replace the calls of aggregations, pooling and other modules."""
    count_modules(patches, "torch_geometric.nn.conv")
    count_modules(patches, "torch_geometric.nn.pool")
    # Not its `forward`, which each class has of its own.
    count_calls(patches, Aggregation, "__call__", _aggregation)
    # What the functions call: programs import them by name.
    count_calls(patches, glob, "scatter", _pooling)


def _aggregation(args: tuple[Any, ...], _: dict[str, Any]) -> tuple[str, str]:
    return label_of(type(args[0])), "the aggregation is called by itself"


def _pooling(_: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, str]:
    return GLOBAL_POOLING[kwargs["reduce"]]
