"""Training steps on two ranks of one thread, beside one process with two threads.

The first rank is that process as well: the ranks take turns with it, and the second one waits.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch_geometric.data import Data

import fastgraph
import fastgraph.dist as fgd
from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.tensor.exchange import plan
from measure.graphs import load, mesh
from measure.timing import Contestant, interleave, no_garbage_collection

CLASSES = 16
NUM_LAYERS = 3

_LEARNING_RATE = 0.01


def _gat(inputs: int, outputs: int) -> nn.Module:
    heads = 4 if outputs % 4 == 0 else 1
    return gnn.GATConv(inputs, outputs // heads, heads)


LAYERS: dict[str, Callable[[int, int], nn.Module]] = {
    "GCN": gnn.GCNConv,
    "SAGE": gnn.SAGEConv,
    "GAT": _gat,
}


def _sizes(channels: int) -> list[int]:
    return [channels] * NUM_LAYERS + [CLASSES]


class Model(nn.Module):
    """Layers of one kind, with ReLU in between."""

    def __init__(self, layer: str, channels: int) -> None:
        super().__init__()
        sizes = itertools.pairwise(_sizes(channels))
        self.layers = nn.ModuleList(LAYERS[layer](i, o) for i, o in sizes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = layer(x, edge_index).relu()
        return self.layers[-1](x, edge_index)


def features(name: str, channels: int) -> Data:
    """A graph with random features and classes; ``mesh-SIDE`` has ``SIDE`` squared nodes."""
    side = name.removeprefix("mesh-")
    graph = load(name) if side == name else mesh(int(side))
    generator = torch.Generator().manual_seed(0)
    return Data(
        x=torch.randn(graph.num_nodes, channels, generator=generator),
        y=torch.randint(CLASSES, (graph.num_nodes,), generator=generator),
        edge_index=graph.edge_index,
    )


class Training:
    """A model and its optimizer on a graph."""

    def __init__(self, layer: str, data: Data, channels: int) -> None:
        torch.manual_seed(0)
        self.model = Model(layer, channels)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=_LEARNING_RATE)
        self.data = data

    def step(self) -> float:
        self.optimizer.zero_grad()
        out = self.model(self.data.x, self.data.edge_index)
        loss = F.cross_entropy(out, self.data.y)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


def measure_ranks(
    graph: str, layers: Sequence[str], channels: int, rounds: tuple[int, int], budget: float
) -> dict[str, Any]:
    """Steps of all ranks, in turns with those of the first one alone, with as many threads.

    Args:
        graph: its name.
        layers: kinds of layers, whose models take turns of their own.
        channels: of all layers.
        rounds: fewest and most turns.
        budget: seconds for the turns of one kind; the fewest may exceed it.

    Returns:
        By kind, of this rank: the times, the losses of the first step, which warms up, the bytes
        that it sends in a step for rows of nodes, and what its plan says that these are.
    """
    fastgraph.enable()
    data = features(graph, channels)
    sharded = fgd.shard(data, mode="halo")
    return {
        layer: _measure_layer(layer, data, sharded, channels, rounds, budget) for layer in layers
    }


def _measure_layer(
    layer: str,
    data: Data,
    sharded: Data,
    channels: int,
    rounds: tuple[int, int],
    budget: float,
) -> dict[str, Any]:
    training = Training(layer, sharded, channels)
    ranks = Contestant("ranks", training.step)
    alone = None
    if WORLD.rank == 0:
        alone = Contestant("one process", Training(layer, data, channels).step)
    losses = [_step_alone(alone), training.step()]
    fgd.COUNTS.reset()
    started = time.perf_counter()
    training.step()
    sent = fgd.COUNTS.sent["all_to_all"]
    turns = turns_within(budget, 2 * (time.perf_counter() - started), rounds)
    with no_garbage_collection():
        for _ in range(turns):
            if alone is not None:
                torch.set_num_threads(WORLD.size)
                alone.seconds += alone.turn()
                torch.set_num_threads(1)
            transport.barrier()
            ranks.seconds += ranks.turn()
    gathered = dict(fgd.COUNTS.gathers)
    fell_back = sum(row.fell_back for row in fastgraph.status().rows)
    if gathered or fell_back:
        raise RuntimeError(f"gathered {gathered}; {fell_back} calls fell back")
    return {
        "one process": None if alone is None else alone.spread.to_json(),
        "ranks": ranks.spread.to_json(),
        "losses": losses,
        "sent": sent,
        "predicted": predicted(layer, sharded, channels),
        "meanwhile": dict(fgd.COUNTS.halo),
        "nodes": sharded.x.local.shape[0],
        "edges": sharded.edge_index.local.shape[1],
    }


def turns_within(budget: float, seconds: float, rounds: tuple[int, int]) -> int:
    """How many turns of so many seconds fit into a budget; the same on all ranks."""
    least, most = rounds
    turns: int = transport.broadcast(max(least, min(most, int(budget / seconds))))
    return turns


def _step_alone(alone: Contestant | None) -> Any:
    torch.set_num_threads(WORLD.size)
    loss = None if alone is None else alone.step()
    torch.set_num_threads(1)
    transport.barrier()
    return loss


def predicted(layer: str, data: Data, channels: int) -> int:
    """Bytes that this rank sends in a step: rows of each layer, and gradients of those of others.

    By the plan for the sources of all edges, and the shapes of the model. In later steps than the
    second, a first layer that aggregates the features of the graph has kept the result.
    """
    found = plan(data.edge_index.local[0], data.x.rows)
    there, back = sum(found.sends), sum(found.receives)
    total = 0
    for number, (inputs, outputs) in enumerate(itertools.pairwise(_sizes(channels))):
        is_learnt = number > 0  # features of the graph have no gradient
        # GCN projects before it aggregates or after it, whichever sends less.
        is_last = layer == "SAGE" or (layer == "GCN" and inputs * (1 + is_learnt) < 2 * outputs)
        width, has_gradient = (inputs, is_learnt) if is_last else (outputs, True)
        total += width * data.x.element_size() * (there + has_gradient * back)
    return total


def measure_subclass(
    graph: str,
    layers: Sequence[str],
    channels: int,
    threads: int,
    rounds: tuple[int, int],
    budget: float,
) -> dict[str, Any]:
    """Steps with plain tensors, and with sharded ones of a single rank, which sends nothing."""
    torch.set_num_threads(threads)
    fastgraph.enable()
    data = features(graph, channels)
    sharded = fgd.shard(data, mode="halo")
    found = {}
    for layer in layers:
        contestants = [
            Contestant("plain", Training(layer, data, channels).step),
            Contestant("sharded", Training(layer, sharded, channels).step),
        ]
        for contestant in contestants:
            contestant.turn(2)
        interleave(contestants, rounds=rounds, budget=budget)
        found[layer] = {contestant.name: contestant.spread.to_json() for contestant in contestants}
    return found
