"""Functions of users for DGL's message passing, and what a call with them must be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fastgraph
from tests.dgl.graphs import dgl

import dgl.function as fn  # isort: skip

UPDATE, APPLY = "dgl.update_all", "dgl.apply_edges"
CHANNELS = 6


class Functions(nn.Module):
    """A layer whose methods are the functions of its message passing.

    Args:
        message: the name of a method.
        reduce: of another, or a function of DGL's; ``None`` for features of edges.
    """

    def __init__(self, message: str, reduce: Any) -> None:
        super().__init__()
        self.names = message, reduce
        self.gate = nn.Linear(2 * CHANNELS, CHANNELS)
        self.att = nn.Linear(2 * CHANNELS, 1)
        self.after = nn.Linear(CHANNELS, 3)
        self.weight = nn.Parameter(torch.randn(CHANNELS))
        self.slope = 0.2

    def forward(self, g: Any, x: Tensor, y: Tensor, w: Tensor) -> list[Tensor]:
        message, reduce = self.names
        reduce = getattr(self, reduce) if isinstance(reduce, str) else reduce
        with g.local_scope():
            g.srcdata["h"], g.edata["w"] = x, w
            if g.is_homogeneous:
                g.dstdata["k"] = y
            else:
                g.dstdata.update({"h": y, "k": y})
            if reduce is None:
                g.apply_edges(getattr(self, message))
                return [g.edata[name] for name in ("a", "m") if name in g.edata]
            g.update_all(getattr(self, message), reduce)
            return [g.dstdata[name] for name in ("out", "more") if name in g.dstdata]

    def gated(self, edges: Any) -> dict[str, Tensor]:
        both = torch.cat([edges.src["h"], edges.dst["k"]], dim=-1)
        gate = torch.sigmoid(self.gate(both)) * self.weight
        return {"m": gate * edges.src["h"] * edges.data["w"]}

    def tied(self, edges: Any) -> dict[str, Tensor]:
        return {"m": F.relu(edges.src["h"] - edges.dst["k"])}

    def scored(self, edges: Any) -> dict[str, Tensor]:
        score = self.att(torch.cat([edges.src["h"], edges.dst["k"]], dim=1))
        return {"m": edges.src["h"] * 1, "a": F.leaky_relu(score, self.slope)}

    def one_number(self, edges: Any) -> dict[str, Tensor]:
        return {"m": (edges.src["h"] * edges.dst["k"]).sum(-1)}

    def summed(self, nodes: Any) -> dict[str, Tensor]:
        return {"out": torch.sum(nodes.mailbox["m"], dim=1)}

    def attended(self, nodes: Any) -> dict[str, Tensor]:
        alpha = F.softmax(nodes.mailbox["a"], dim=1)
        return {"out": torch.sum(alpha * nodes.mailbox["m"], dim=1)}

    def extrema(self, nodes: Any) -> dict[str, Tensor]:
        m = nodes.mailbox["m"]
        return {"out": m.max(1)[0], "more": torch.min(m, dim=1).values}

    def combined(self, nodes: Any) -> dict[str, Tensor]:
        m = nodes.mailbox["m"]
        mean, square = m.mean(dim=1), (m * m).mean(dim=1)
        spread = torch.sqrt(torch.relu(square - mean * mean) + 1e-5)
        several = torch.cat([mean, spread, 2 - m.sum(1)], dim=1)
        several = several * (np.log(m.size(1) + 1) / 2.5)
        mapped = F.relu(self.after(torch.tanh(m).sum(1)) + 1)
        return {"out": several, "more": mapped}

    def with_data(self, nodes: Any) -> dict[str, Tensor]:
        return {"out": nodes.data["k"] + 0.5 * nodes.mailbox["m"].mean(1, keepdim=True).squeeze(1)}


def summed(field: str = "out") -> Any:
    """DGL's own sum."""
    return fn.sum("m", field)


def both(call: Callable[[], Any], name: str = UPDATE) -> tuple[Any, Any, Any]:
    """The results of a call without and with fastgraph, and its counts under a name."""
    expected = call()
    fastgraph.status().reset()
    with fastgraph.enabled(min_edges=0):
        found = call()
    return expected, found, fastgraph.status().row(name)


def reason_of(call: Callable[[], Any], name: str = UPDATE) -> str:
    """The reason why a call is left to upstream, whose very results are ours."""
    expected, found, row = both(call, name)
    assert (row.routed, row.fell_back) == (0, 1), dict(row.reasons)
    assert torch.equal(found, expected)
    (reason,) = row.reasons
    return reason


def square_graph(num_edges: int = 120) -> Any:
    """A graph with duplicates, and nodes without edges."""
    generator = torch.Generator().manual_seed(3)
    src = torch.randint(20, (num_edges,), generator=generator)
    dst = torch.randint(17, (num_edges,), generator=generator)
    return dgl.graph((src, dst), num_nodes=20)
