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

from fastgraph.dist.balance.balance import Balance, measured
from fastgraph.dist.balance.performance import Performance, measure_performance
from fastgraph.dist.balance.rebalancing import Rebalanced, rebalance
from fastgraph.dist.balance.shares import shard
from fastgraph.dist.files.checkpoint import CheckpointError, load, save
from fastgraph.dist.files.shards import Shards, load_shards, write_shards
from fastgraph.dist.graphs.generated import erdos_renyi, kronecker
from fastgraph.dist.graphs.partition import PartitionError, partition
from fastgraph.dist.operators import registration as registration
from fastgraph.dist.ranks import ending as ending
from fastgraph.dist.ranks.counts import COUNTS, Counts
from fastgraph.dist.ranks.phases import Phases
from fastgraph.dist.ranks.world import CollectiveError, RanksDivergedError, init
from fastgraph.dist.running.differences import DifferenceError, Validation
from fastgraph.dist.running.validation import validate
from fastgraph.dist.tensor.sharded import ShardedTensor, is_sharded, whole
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
    "ShardedTensor",
    "Shards",
    "Validation",
    "erdos_renyi",
    "init",
    "is_sharded",
    "kronecker",
    "load",
    "load_shards",
    "measure_performance",
    "measured",
    "partition",
    "rebalance",
    "save",
    "shard",
    "validate",
    "whole",
    "write_shards",
]
