"""Functions of users in DGL's message passing, and the graphs on which they are measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import dgl
import dgl.function as fn
import torch
from dgl.nn import PNAConv
from torch import Tensor, nn
from torch.nn import functional as F

from measure.graphs import load


class _Layer(nn.Module):
    """A layer whose messages and reductions are functions of its own."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gate = nn.Linear(2 * channels, channels)
        self.att = nn.Linear(2 * channels, 1)

    def gated(self, edges: Any) -> dict[str, Tensor]:
        both = torch.cat([edges.src["h"], edges.dst["h"]], dim=-1)
        return {"m": torch.sigmoid(self.gate(both)) * edges.src["h"]}

    def added(self, edges: Any) -> dict[str, Tensor]:
        return {"m": F.relu(edges.src["h"] + edges.dst["h"])}

    def scored(self, edges: Any) -> dict[str, Tensor]:
        return {"e": F.leaky_relu(self.att(torch.cat([edges.src["h"], edges.dst["h"]], dim=1)))}

    def with_score(self, edges: Any) -> dict[str, Tensor]:
        return {"m": edges.src["h"], "e": edges.data["e"]}

    def attended(self, nodes: Any) -> dict[str, Tensor]:
        alpha = F.softmax(nodes.mailbox["e"], dim=1)
        return {"out": torch.sum(alpha * nodes.mailbox["m"], dim=1)}

    def summed(self, nodes: Any) -> dict[str, Tensor]:
        return {"out": nodes.mailbox["m"].sum(1)}


class Case(NamedTuple):
    """A call of message passing.

    Attributes:
        build: makes the call of a graph with features ``h``, for a number of channels.
        reduces: true if a function of users reduces messages.
    """

    build: Callable[[int], Callable[[Any], Tensor]]
    reduces: bool = False


def _updating(message: str, reduce: Any) -> Callable[[int], Callable[[Any], Tensor]]:
    def build(channels: int) -> Callable[[Any], Tensor]:
        layer = _Layer(channels)

        def call(g: Any) -> Tensor:
            own = getattr(layer, reduce) if isinstance(reduce, str) else reduce
            g.update_all(getattr(layer, message), own)
            out: Tensor = g.ndata["out"]
            return out

        return call

    return build


def _tutorial(channels: int) -> Callable[[Any], Tensor]:
    layer = _Layer(channels)

    def call(g: Any) -> Tensor:
        g.apply_edges(layer.scored)
        g.update_all(layer.with_score, layer.attended)
        out: Tensor = g.ndata["out"]
        return out

    return call


def _pna(channels: int) -> Callable[[Any], Tensor]:
    aggregators, scalers = ["mean", "max", "min", "std"], ["identity", "amplification"]
    layer = PNAConv(channels, channels, aggregators, scalers, 2.5)
    return lambda g: layer(g, g.ndata["h"])


CASES: dict[str, Case] = {
    "gated, sum": Case(_updating("gated", fn.sum("m", "out"))),
    "ReLU of both ends, mean": Case(_updating("added", fn.mean("m", "out"))),
    "ReLU of both ends, max": Case(_updating("added", fn.max("m", "out"))),
    "ReLU of both ends, user's sum": Case(_updating("added", "summed"), reduces=True),
    "GAT of DGL's tutorial": Case(_tutorial, reduces=True),
    "PNAConv": Case(_pna, reduces=True),
}


def graph_of(name: str) -> Any:
    """A graph of DGL's by its name."""
    if name == "dense":
        return dgl.graph(tuple(torch.randint(5_000, (2, 500_000))), num_nodes=5_000)
    if name == "molecules":  # 128 of 25 atoms, with 50 bonds each
        first = torch.arange(128 * 25)
        other = first.repeat(2) // 25 * 25 + torch.randint(25, (2 * len(first),))
        return dgl.graph((other, first.repeat(2)), num_nodes=len(first))
    if name == "tiny":
        return dgl.graph(tuple(torch.randint(30, (2, 90))), num_nodes=30)
    data = load(name)
    return dgl.graph(tuple(data.edge_index), num_nodes=data.num_nodes)
