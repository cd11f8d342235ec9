"""Graphs of DGL in scripts that know nothing of ranks: they are sharded where scripts get them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import dgl
from dgl.data.dgl_dataset import DGLDataset

from fastgraph.dist import transport
from fastgraph.dist.dgl.graphs import is_sharded_graph
from fastgraph.dist.dgl.patches import PATCHES
from fastgraph.dist.sharded import tree_map
from fastgraph.dist.world import WORLD

_MAKERS = (
    "graph",
    "heterograph",
    "from_scipy",
    "from_networkx",
    "bipartite_from_scipy",
    "bipartite_from_networkx",
    "rand_graph",
    "rand_bipartite",
)


def shard_graphs(shard: Callable[[Any], Any], min_nodes: int, seed: int) -> None:
    """Have graphs sharded that a script makes, and the single one of a dataset.

    Args:
        shard: does it.
        min_nodes: smaller graphs stay whole.
        seed: of DGL's own random numbers, the same on all ranks.
    """
    dgl.seed(seed)

    def sharded(value: Any) -> Any:
        return tree_map(lambda x: shard(x) if _fits(x, min_nodes) else x, value)

    for name in _MAKERS:
        PATCHES.replace(dgl, name, _sharding_own(getattr(dgl, name), sharded))
    PATCHES.replace(DGLDataset, "_load", _loading_once(DGLDataset._load))
    for cls in _subclasses(DGLDataset):
        if "__getitem__" in vars(cls):
            PATCHES.replace(cls, "__getitem__", _sharding_item(cls.__getitem__, sharded))


def _fits(value: Any, min_nodes: int) -> bool:
    if not isinstance(value, dgl.DGLGraph) or is_sharded_graph(value) or value.is_block:
        return False
    return value.batch_size == 1 and value.num_nodes() >= min_nodes and bool(value.num_edges())


def _subclasses(cls: Any) -> list[Any]:
    direct: list[Any] = cls.__subclasses__()
    return list(dict.fromkeys([*direct, *(c for found in direct for c in _subclasses(found))]))


def _sharding_own(upstream: Callable[..., Any], sharded: Callable[[Any], Any]) -> Any:
    @functools.wraps(upstream)
    def make(*args: Any, **kwargs: Any) -> Any:
        found = upstream(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        return found if caller in ("dgl", "fastgraph") else sharded(found)

    return make


def _sharding_item(upstream: Callable[..., Any], sharded: Callable[[Any], Any]) -> Any:
    @functools.wraps(upstream)
    def getitem(self: Any, index: Any) -> Any:
        value = upstream(self, index)
        return sharded(value) if len(self) == 1 else value

    return getitem


def _loading_once(upstream: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(upstream)
    def load(self: Any) -> None:
        """The files of a dataset are made by one rank, on which the others wait."""
        if WORLD.rank == 0:
            upstream(self)
        transport.barrier()
        if WORLD.rank != 0:
            upstream(self)

    return load
