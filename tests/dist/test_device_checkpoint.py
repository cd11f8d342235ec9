"""Checkpoints of ranks with a device: what it holds, and what it would draw next."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GCNConv

import fastgraph.dist as fgd
from fastgraph.dist.ranks.world import WORLD, share_random_states
from tests import forks, late_collectives, standin
from tests.dist.graphs import NUM_CLASSES, NUM_FEATURES, graph, uneven

STEPS = 2


class Noisy(nn.Module):
    """Draws on the device, and has a parameter with a row for each node."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(x.detach() * 0.5)
        self.conv = GCNConv(NUM_FEATURES, NUM_CLASSES)

    def forward(self, edge_index: Tensor) -> Tensor:
        noise = torch.rand(NUM_FEATURES, device=self.table.device, dtype=self.table.dtype)
        out: Tensor = self.conv(F.dropout(self.table, 0.3) + noise, edge_index)
        return out


class Training:
    def __init__(self, device: str) -> None:
        self.data = fgd.shard(graph(), parts=uneven(WORLD.size)).to(device)
        self.model = Noisy(self.data.x)
        self.model.conv.to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)

    def steps(self) -> list[float]:
        losses = []
        for _ in range(STEPS):
            self.optimizer.zero_grad()
            out = self.model(self.data.edge_index)
            loss = F.cross_entropy(out[self.data.train_mask], self.data.y[self.data.train_mask])
            loss.backward()
            self.optimizer.step()
            losses.append(float(loss.detach()))
        return losses


def _begin(folder: Path, seed: int) -> list[float]:
    torch.set_default_dtype(torch.float64)
    late_collectives.install()
    standin.RANDOM = torch.Generator().manual_seed(seed + WORLD.rank).get_state()
    share_random_states()
    run = Training(standin.DEVICE)
    run.steps()
    fgd.save(folder, run.model, run.optimizer)
    return run.steps()


def _carry_on(folder: Path, device: str) -> tuple[list[float], str]:
    torch.set_default_dtype(torch.float64)
    if device == standin.DEVICE:
        late_collectives.install()
        standin.RANDOM = torch.Generator().manual_seed(0).get_state()
    run = Training(device)
    fgd.load(folder, run.model, run.optimizer)
    return run.steps(), run.model.table.device.type


TOLERANCE = 1e-12
"""Other numbers of ranks take sums in another order."""


def test_a_training_goes_on_with_the_random_numbers_of_the_device(tmp_path: Path) -> None:
    """On fewer ranks, too; those of rank 0 are those of all."""
    first, *others = forks.on_ranks(_begin, 3, tmp_path, 5)
    assert others == [first, first]
    for losses, kind in forks.on_ranks(_carry_on, 2, tmp_path, standin.DEVICE):
        assert losses == pytest.approx(first, rel=TOLERANCE)
        assert kind == standin.DEVICE
    for losses, kind in forks.on_ranks(_carry_on, 1, tmp_path, "cpu"):  # which draws other numbers
        assert losses != pytest.approx(first, rel=TOLERANCE)
        assert kind == "cpu"
