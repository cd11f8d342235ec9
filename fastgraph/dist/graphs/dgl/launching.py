"""Graphs of DGL in scripts that know nothing of ranks: they are sharded where scripts get them."""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Callable
from typing import Protocol, TypeGuard

import dgl
from dgl.data.dgl_dataset import DGLDataset

from fastgraph.dist.graphs.dgl.graphs import is_sharded_graph
from fastgraph.dist.graphs.dgl.patches import PATCHES
from fastgraph.dist.graphs.protocols import DglGraph
from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.agreement import first_rank_first, on_first_rank
from fastgraph.dist.ranks.spawning import pickler
from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.tensor.sharded import tree_map


class Dataset(Protocol):
    """A ``DGLDataset``."""

    _force_reload: bool

    def has_cache(self) -> bool:
        """True if its files are there."""

    def __len__(self) -> int: ...


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


def shard_graphs(shard: Callable[[DglGraph], object], min_nodes: int, seed: int) -> None:
    """Have graphs sharded that a script makes, and the single one of a dataset.

    Args:
        shard: does it.
        min_nodes: smaller graphs stay whole.
        seed: of DGL's own random numbers, the same on all ranks.
    """
    _SEEDS.remember()
    dgl.seed(seed)
    sharding = _Sharding(shard, min_nodes)
    for name in _MAKERS:
        PATCHES.replace(dgl, name, sharding.of_own(getattr(dgl, name)))
    PATCHES.replace(DGLDataset, "_load", sharding.after(DGLDataset._load))


class _Seeds:
    """The last seed of DGL's random numbers, whose state nobody can read."""

    def __init__(self) -> None:
        self._last: int | None = None

    def remember(self) -> None:
        """Know of the seeds that are set from now on."""
        PATCHES.replace(dgl, "seed", self._of(dgl.seed))
        PATCHES.replace(dgl.random, "seed", self._of(dgl.random.seed))

    def _of(self, upstream: Callable[[int], None]) -> Callable[[int], None]:
        @functools.wraps(upstream)
        def seed(val: int) -> None:
            self._last = val
            upstream(val)

        return seed

    def again(self) -> None:
        """Go on with the numbers after the last seed, as other ranks have drawn fewer or none."""
        if self._last is not None:
            dgl.seed(self._last)


_SEEDS = _Seeds()


class _Sharding:
    """A hook that shards graphs that are large enough, unless a dataset is being made."""

    def __init__(self, shard: Callable[[DglGraph], object], min_nodes: int) -> None:
        self._shard, self._min_nodes = shard, min_nodes
        self._classes: set[type] = set()

    def _sharded(self, value: object) -> object:
        return tree_map(lambda x: self._shard(x) if self._fits(x) else x, value)

    def _fits(self, value: object) -> TypeGuard[DglGraph]:
        if WORLD.is_alone or not isinstance(value, dgl.DGLGraph):
            return False
        if is_sharded_graph(value) or value.is_block or value.batch_size != 1:
            return False
        return value.num_nodes() >= self._min_nodes and bool(value.num_edges())

    def of_own(self, upstream: Callable[..., object]) -> Callable[..., object]:
        """A function that makes graphs, as the script calls it."""

        @functools.wraps(upstream)
        def make(*args: object, **kwargs: object) -> object:
            found = upstream(*args, **kwargs)
            caller = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
            return found if caller in ("dgl", "fastgraph") else self._sharded(found)

        return make

    def after(self, upstream: Callable[..., None]) -> Callable[..., None]:
        """``DGLDataset._load``, after which the single graph of a dataset is sharded."""

        @functools.wraps(upstream)
        def load(dataset: Dataset) -> None:
            """The files of a dataset are made by one rank, on which the others wait."""
            if WORLD.is_alone:  # a dataset that is made of another one
                upstream(dataset)
            elif on_first_rank(lambda: dataset._force_reload or not dataset.has_cache()):
                _make_once(upstream, dataset)
                _SEEDS.again()  # what was drawn meanwhile, was drawn by the first rank
            else:
                first_rank_first(lambda: upstream(dataset))
            for cls in type(dataset).__mro__:
                is_of_dgl = issubclass(cls, DGLDataset) and "__getitem__" in vars(cls)
                if is_of_dgl and cls not in self._classes:
                    self._classes.add(cls)
                    PATCHES.replace(cls, "__getitem__", self._of_item(vars(cls)["__getitem__"]))

        return load

    def _of_item(self, upstream: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(upstream)
        def getitem(dataset: Dataset, index: object) -> object:
            value = upstream(dataset, index)
            return self._sharded(value) if len(dataset) == 1 else value

        return getitem


def _make_once(upstream: Callable[..., None], dataset: Dataset) -> None:
    """Have the first rank make a dataset, and the others have what it has then.

    What files give may differ: DGL writes masks as bytes, and a dataset may forget what it did not
    write. Others load what cannot be sent.
    """
    made: bytes | None = None

    def action() -> None:
        nonlocal made
        if WORLD.rank == 0:
            upstream(dataset)
            made = _pickled(vars(dataset))

    first_rank_first(action)
    made = transport.broadcast(made)
    if made is None:
        first_rank_first(lambda: None if WORLD.rank == 0 else upstream(dataset))
    elif WORLD.rank != 0:
        vars(dataset).update(pickle.loads(made))


def _pickled(values: dict[str, object]) -> bytes | None:
    """The bytes of some values; ``None`` if one of them is bound to this process."""
    try:
        found: bytes = pickler().dumps(values)
    except (pickle.PicklingError, TypeError, AttributeError):  # as such objects raise
        return None
    return found
