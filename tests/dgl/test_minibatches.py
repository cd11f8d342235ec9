"""Blocks of DGL's sampler, made in this process and in workers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastgraph
from tests.dgl.graphs import dgl, graph
from tests.graphs import random_edges

from dgl.dataloading import DataLoader, NeighborSampler  # isort: skip
from dgl.nn import GATConv, SAGEConv  # isort: skip


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = GATConv(8, 4, 2)
        self.second = SAGEConv(8, 3, "pool")

    def forward(self, blocks: list[Any]) -> Tensor:
        hidden = self.first(blocks[0], blocks[0].srcdata["x"]).flatten(1)
        out: Tensor = self.second(blocks[1], hidden)
        return out


@pytest.mark.filterwarnings("ignore:Dataloader CPU affinity")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_minibatches(num_workers: int) -> None:
    g = dgl.add_self_loop(graph(random_edges(200, 200, 1500), 200))
    g.ndata["x"] = torch.randn(200, 8)
    batches = DataLoader(
        g, torch.arange(200), NeighborSampler([4, 4]), batch_size=50, num_workers=num_workers
    )
    model = Model()
    for _, _, blocks in batches:
        results = []
        for active in (False, True):
            (fastgraph.enable if active else fastgraph.disable)()
            model.zero_grad()
            out = model(blocks)
            out.square().sum().backward()
            results.append([out.detach(), *(p.grad.clone() for p in model.parameters())])
        torch.testing.assert_close(results[1], results[0], atol=1e-4, rtol=1e-4)
    assert {row.layer: row.fell_back for row in fastgraph.status().rows} == {
        "dgl.GATConv": 0,
        "dgl.SAGEConv": 0,
    }


@pytest.mark.filterwarnings("ignore:Dataloader CPU affinity")
def test_comparing_blocks_whose_features_are_gathered_when_asked_for() -> None:
    """Every look at them makes a tensor, maybe where the last one was."""
    g = dgl.add_self_loop(graph(random_edges(100, 100, 100), 100))
    g.ndata["x"], g.edata["kind"] = torch.randn(100, 8), torch.zeros(g.num_edges())
    batches = DataLoader(g, torch.arange(100), NeighborSampler([-1]), batch_size=8)
    for source, _, (block,) in batches:
        assert fastgraph.compare(SAGEConv(8, 3, "mean"), block, torch.randn(len(source), 8)).ok
