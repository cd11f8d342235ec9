"""Training steps on ranks whose rows are in the order of the graph, and cluster by cluster."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch_geometric.data import Data

import fastgraph
import fastgraph.dist as fgd
from fastgraph.dist.ranks import transport
from measure.dist_steps import Training, features
from measure.timing import Spread, no_garbage_collection

ORDERS = {"its own": None, "clusters": "cluster"}


def measure(
    graph: str, numbering: str, layers: Sequence[str], channels: int, rounds: int
) -> dict[str, Any]:
    """Seconds of the processor of a step on this rank, by layer and order, in turns.

    Args:
        graph: its name.
        numbering: of its nodes: ``"as it is"``, or ``"random"``.
        layers: kinds of layers.
        channels: of all layers.
        rounds: steps of each.
    """
    torch.set_num_threads(1)
    fastgraph.enable()
    data = features(graph, channels)
    if numbering == "random":
        data = _numbered_at_random(data)
    sharded = {name: fgd.shard(data, order=order, mode="halo") for name, order in ORDERS.items()}
    return {layer: _measured(layer, sharded, channels, rounds) for layer in layers}


def _measured(
    layer: str, sharded: dict[str, Data], channels: int, rounds: int
) -> dict[str, dict[str, Any]]:
    trainings = {name: Training(layer, data, channels) for name, data in sharded.items()}
    losses = {name: [one.step() for _ in range(3)] for name, one in trainings.items()}
    seconds: dict[str, list[float]] = {name: [] for name in trainings}
    with no_garbage_collection():
        for _ in range(rounds):
            for name, one in trainings.items():
                transport.barrier()
                started = time.thread_time()
                one.step()
                seconds[name].append(time.thread_time() - started)
    return {
        name: {"losses": losses[name], "spread": Spread.of(found).to_json()}
        for name, found in seconds.items()
    }


def _numbered_at_random(data: Data) -> Data:
    number = torch.randperm(data.num_nodes, generator=torch.Generator().manual_seed(0))
    old = number.argsort()
    return Data(x=data.x[old], y=data.y[old], edge_index=number[data.edge_index])
