"""One view of the whole graph: a program that trains on one device trains on several, unchanged.

Run a script on several processes as it is::

    torchrun --nproc-per-node 4 -m fastgraph.dist train.py

or shard a graph by hand::

    import fastgraph.dist as fgd

    fgd.init()
    data = fgd.shard(data)

Tensors of nodes and edges then are sharded: they have the shape of the whole, and the data of this
rank's rows. Every operation returns what it would return on one process.
"""

from __future__ import annotations

from fastgraph.dist import rules as rules
from fastgraph.dist.balance import Balance, measured
from fastgraph.dist.checkpoint import CheckpointError, load, save
from fastgraph.dist.counts import COUNTS, Counts
from fastgraph.dist.differences import DifferenceError, Validation
from fastgraph.dist.partition import PartitionError, partition
from fastgraph.dist.performance import Performance, measure_performance
from fastgraph.dist.phases import Phases
from fastgraph.dist.precision import ReducedPrecision, reduce_precision
from fastgraph.dist.rebalancing import Rebalanced, rebalance
from fastgraph.dist.sharded import ShardedTensor, is_sharded, whole
from fastgraph.dist.sharding import shard
from fastgraph.dist.shards import Shards, load_shards, write_shards
from fastgraph.dist.validation import validate
from fastgraph.dist.world import CollectiveError, RanksDivergedError, init
from fastgraph.manifest import FileFormatError

__all__ = [
    "COUNTS",
    "Balance",
    "CheckpointError",
    "CollectiveError",
    "Counts",
    "DifferenceError",
    "FileFormatError",
    "PartitionError",
    "Performance",
    "Phases",
    "RanksDivergedError",
    "Rebalanced",
    "ReducedPrecision",
    "ShardedTensor",
    "Shards",
    "Validation",
    "init",
    "is_sharded",
    "load",
    "load_shards",
    "measure_performance",
    "measured",
    "partition",
    "rebalance",
    "reduce_precision",
    "save",
    "shard",
    "validate",
    "whole",
    "write_shards",
]
