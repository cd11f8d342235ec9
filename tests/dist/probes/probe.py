"""How operations on an ordinary and on a sharded graph are declared, with what they may gather.

Each gives a tensor, which is compared, as are the gradients of all parameters for the sum of its
squares.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch_geometric.nn as gnn
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn.models import SGFormer

from tests.dist.graphs import NUM_CLASSES, NUM_FEATURES, NUM_NODES

N, D, C = NUM_NODES, NUM_FEATURES, NUM_CLASSES


class Probe(NamedTuple):
    """An operation, and the names under which something is gathered for it."""

    run: Callable[[Data], Tensor]
    gathers: frozenset[str] = frozenset()


class Modules:
    """Replicated parameters and indices, the same on every rank."""

    def make(self) -> None:
        """In the dtype that is the default now."""
        g = torch.Generator().manual_seed(2)
        torch.manual_seed(3)
        self.lin = torch.nn.Linear(D, D)
        self.weight = torch.randn(D, D, generator=g, requires_grad=True)
        self.index = torch.randperm(N, generator=g)[:20]
        self.order = torch.randperm(N, generator=g)
        self.batch = torch.arange(N) // 20
        self.ends = torch.randint(0, N, (2, 150), generator=g)
        self.values = torch.rand(150, generator=g)
        self.attention = torch.nn.MultiheadAttention(D, 2, batch_first=True)
        self.gru = torch.nn.GRU(D, D, batch_first=True)
        self.lstm = torch.nn.LSTM(D, 3, num_layers=2, bidirectional=True)
        self.rnn = torch.nn.RNN(D, 3, nonlinearity="relu")
        self.gru_cell, self.lstm_cell = torch.nn.GRUCell(D, D), torch.nn.LSTMCell(D, D)
        self.rnn_cell = torch.nn.RNNCell(D, D)
        self.reversible = gnn.GroupAddRev(gnn.SAGEConv(D // 2, D // 2), num_groups=2)
        self.norms = [
            gnn.GraphNorm(D), gnn.PairNorm(), gnn.InstanceNorm(D), gnn.DiffGroupNorm(D, 2),
            gnn.MeanSubtractionNorm(), gnn.LayerNorm(D),
        ]  # fmt: skip
        mlp = lambda *sizes: gnn.MLP(list(sizes), norm=None)  # noqa: E731
        degrees = torch.ones(20, dtype=torch.long)
        self.convs = {
            "PNAConv": gnn.PNAConv(D, D, ["mean", "max", "std"], ["identity"], degrees),
            "SAGEConv max": gnn.SAGEConv(D, D, "max"),
            "EdgeConv": gnn.EdgeConv(gnn.MLP([2 * D, D, D])),
            "ChebConv": gnn.ChebConv(D, D, 2),
            "FiLMConv": gnn.FiLMConv(D, D),
            "ResGatedGraphConv": gnn.ResGatedGraphConv(D, D),
            "GatedGraphConv": gnn.GatedGraphConv(D, 2),
            "SuperGATConv": gnn.SuperGATConv(D, D).eval(),
            "ARMAConv": gnn.ARMAConv(D, D),
            "GENConv": gnn.GENConv(D, D),
            "TAGConv": gnn.TAGConv(D, D),
            "SAGEConv to sources": gnn.SAGEConv(D, D, flow="target_to_source"),
        }
        self.edge_convs = {
            "GINEConv": gnn.GINEConv(mlp(D, D), edge_dim=3),
            "NNConv": gnn.NNConv(D, D, torch.nn.Linear(3, D * D)),
            "GATv2Conv": gnn.GATv2Conv(D, D, edge_dim=3),
            "TransformerConv": gnn.TransformerConv(D, D, edge_dim=3),
            "CGConv": gnn.CGConv(D, 3),
        }
        self.aggregations = {
            "softmax": gnn.SoftmaxAggregation(learn=True),
            "power mean": gnn.PowerMeanAggregation(),
            "std": gnn.StdAggregation(),
        }
        self.groups = {
            "median": gnn.MedianAggregation(),
            "lower quantiles": gnn.QuantileAggregation([0.2, 0.7], "lower", 3.0),
            "linear quantiles": gnn.QuantileAggregation(0.4, fill_value=1.0),
            "lstm": gnn.LSTMAggregation(D, 3),
            "gru": gnn.GRUAggregation(D, 3),
            "sorted": gnn.SortAggregation(2),
        }
        self.layers = {
            "FastRGCNConv": gnn.FastRGCNConv(D, D, 2, num_bases=2),
            "RGCNConv": gnn.RGCNConv(D, D, 2, num_blocks=2),
            "GPS performer": gnn.GPSConv(D, None, heads=2, attn_type="performer"),
            "SAGE median": gnn.SAGEConv(D, D, "median"),
            "SGFormer": SGFormer(D, D, C, trans_dropout=0.0, gnn_dropout=0.0),
        }
        self.pool = gnn.TopKPooling(D)
        self.jumping = gnn.JumpingKnowledge("lstm", D, 2)

    def parameters(self) -> list[Tensor]:
        found = [self.weight]
        for value in vars(self).values():
            modules = value.values() if isinstance(value, dict) else value
            for module in modules if isinstance(value, (dict, list)) else [value]:
                if isinstance(module, torch.nn.Module):
                    found.extend(module.parameters())
        return found

    def hidden(self, data: Data) -> Tensor:
        return self.lin(data.x).relu()


PROBES: dict[str, Probe] = {}


m = Modules()  # of each process, empty until they are made


def probe(name: str, *gathers: str) -> Callable[[Callable[[Data], Tensor]], None]:
    def add(run: Callable[[Data], Tensor]) -> None:
        PROBES[name] = Probe(run, frozenset(gathers))

    return add


def h(d: Data) -> Tensor:
    return m.hidden(d)


def simple(name: str, run: Callable[[Data], Tensor], *gathers: str) -> None:
    PROBES[name] = Probe(run, frozenset(gathers))
