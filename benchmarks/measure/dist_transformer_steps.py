"""Training steps of a graph transformer on ranks of one thread, by halo and by heads in turns."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch_geometric.data import Data

import fastgraph
import fastgraph.dist as fgd
from fastgraph.dist.operators.heads.exchange import layout_of_heads
from fastgraph.dist.ranks import transport
from fastgraph.dist.tensor.exchange import plan
from measure.graphs import GraphData, communities, load, mesh
from measure.timing import Contestant, no_garbage_collection

CLASSES = 16
HEADS = 8
NUM_LAYERS = 3
MODES = ("halo", "heads")

_LEARNING_RATE = 0.01


def graph(name: str) -> GraphData:
    """``random-N``: 16 neighbours of each of N nodes, anywhere; ``communities-N``, ``mesh-SIDE``.

    Others are those of :mod:`measure.graphs`.
    """
    kind, _, size = name.partition("-")
    if kind == "random":
        generator = torch.Generator().manual_seed(0)
        ends = torch.randint(int(size), (2, 8 * int(size)), generator=generator)
        return GraphData(name, torch.cat([ends, ends.flip(0)], 1), int(size))
    if kind == "communities":
        return communities(int(size), 8, 100)
    return mesh(int(size)) if kind == "mesh" else load(name)


def features(name: str, channels: int) -> Data:
    """A :func:`graph` with random features and classes."""
    found = graph(name)
    generator = torch.Generator().manual_seed(0)
    return Data(
        x=torch.randn(found.num_nodes, channels, generator=generator),
        y=torch.randint(CLASSES, (found.num_nodes,), generator=generator),
        edge_index=found.edge_index,
    )


class Model(nn.Module):
    """``TransformerConv`` with ReLU in between, or for ``"sums"`` ``GCNConv``."""

    def __init__(self, channels: int, kind: str) -> None:
        super().__init__()
        widths = itertools.pairwise([channels] * NUM_LAYERS + [CLASSES * HEADS])
        self.layers = nn.ModuleList(
            gnn.GCNConv(i, o) if kind == "sums" else gnn.TransformerConv(i, o // HEADS, HEADS)
            for i, o in widths
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = layer(x, edge_index).relu()
        return self.layers[-1](x, edge_index)


class Training:
    """A model and its optimizer on a graph."""

    def __init__(
        self,
        data: Data,
        channels: int,
        kind: str = "attention",
        optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
    ) -> None:
        torch.manual_seed(0)
        self.model = Model(channels, kind)
        self.optimizer = optimizer(self.model.parameters(), lr=_LEARNING_RATE)
        self.data = data

    def step(self) -> float:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(self.data.x, self.data.edge_index), self.data.y)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


def measure(name: str, channels: int, rounds: int) -> dict[str, Any]:
    """Steps in both modes, with one partition.

    Returns:
        Of this rank, for each mode: the times, the loss of the first step, the bytes that it sends
        in a step for rows of nodes, and what is predicted for these.
    """
    fastgraph.enable()
    data = features(name, channels)
    sharded = fgd.shard(data)
    owner = sharded.x.rows.owner
    trainings = {
        mode: Training(fgd.shard(data, parts=owner, mode=mode), channels) for mode in MODES
    }
    contestants = {mode: Contestant(mode, t.step) for mode, t in trainings.items()}
    facts: dict[str, Any] = {"nodes": sharded.x.rows.mine, "modes": {}}
    for mode, training in trainings.items():
        loss = training.step()
        fgd.COUNTS.reset()
        training.step()
        used = set(fgd.COUNTS.attention)
        if used != {mode} or fgd.COUNTS.gathers:
            raise RuntimeError(f"{mode} was computed as {used}, gathered {fgd.COUNTS.gathers}")
        facts["modes"][mode] = {
            "loss": loss,
            "sent": fgd.COUNTS.sent["all_to_all"],
            "predicted": PREDICTED[mode](training.data, channels),
        }
    with no_garbage_collection():
        for _ in range(rounds):
            for contestant in contestants.values():
                transport.barrier()
                contestant.seconds += contestant.turn()
    for mode, contestant in contestants.items():
        facts["modes"][mode]["spread"] = contestant.spread.to_json()
    facts["halo"] = sum(plan(sharded.edge_index.local[0], sharded.x.rows).receives)
    return facts


def widths_of(channels: int) -> list[int]:
    """Channels of all heads that each layer computes."""
    return [channels] * (NUM_LAYERS - 1) + [CLASSES * HEADS]


def _predicted_halo(data: Data, channels: int) -> int:
    """Keys and values of each layer, and their gradients; by the plan for the sources."""
    found = plan(data.edge_index.local[0], data.x.rows)
    rows = sum(found.sends) + sum(found.receives)
    return 2 * rows * sum(widths_of(channels)) * data.x.element_size()


def _predicted_heads(data: Data, channels: int) -> int:
    """Queries, keys, values and outputs of each layer, and their gradients."""
    rows, own = data.x.rows, layout_of_heads(HEADS).mine
    given, taken = rows.mine * (HEADS - own), (rows.n - rows.mine) * own
    return 4 * (given + taken) * sum(widths_of(channels)) // HEADS * data.x.element_size()


PREDICTED = {"halo": _predicted_halo, "heads": _predicted_heads}
