"""Reversible layers whose blocks drop elements, with the random numbers of one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch_geometric.data import Data

import fastgraph.dist as fgd
from fastgraph.dist.ranks.world import WORLD
from tests import forks
from tests.dist.comparing import deviation
from tests.dist.graphs import NUM_CLASSES as C
from tests.dist.graphs import NUM_FEATURES as D
from tests.dist.graphs import graph, one_has_a_single_node, one_is_empty, uneven

# Of the largest value: sums are taken in another order.
TOLERANCE = 1e-11


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.LayerNorm(D // 2), gnn.SAGEConv(D // 2, D // 2)

    def forward(self, x: Tensor, edge_index: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.norm(x).relu() if mask is None else self.norm(x).relu() * mask
        return self.conv(F.dropout(x, 0.3, self.training), edge_index)


class Model(nn.Module):
    """Layers one after the other: the second frees and restores what the first has given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, C)
        self.layers = nn.ModuleList(gnn.GroupAddRev(Block(), num_groups=2) for _ in range(2))

    def forward(self, data: Data, masks: bool) -> Tensor:
        x = self.first(data.x)
        given = [torch.zeros_like(x).bernoulli_(0.8)] if masks else []
        for layer in self.layers:
            x = layer(x, data.edge_index, *given)
        return self.last(F.dropout(x.relu(), 0.2, self.training))


def trained(data: Data, masks: bool) -> list[Tensor]:
    """Losses, gradients and a number that is drawn afterwards."""
    torch.manual_seed(4)
    model, found = Model(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data, masks)[data.train_mask], data.y[data.train_mask])
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters()), torch.rand(3)]
        optimizer.step()
    return found


def compare_on_this_rank() -> dict[str, str]:
    torch.set_default_dtype(torch.float64)
    WORLD.random = "exact"
    found = {}
    for layout in (uneven, one_is_empty, one_has_a_single_node):
        sharded = fgd.shard(graph(), parts=layout(WORLD.size))
        for masks in (False, True):
            fgd.COUNTS.reset()
            pairs = zip(trained(graph(), masks), trained(sharded, masks), strict=True)
            texts = [deviation(a, b, TOLERANCE) for a, b in pairs]
            wrong = [f"{i} {text}" for i, text in enumerate(texts) if text]
            gathered = set(fgd.COUNTS.gathers) - {"bernoulli_"}
            found[f"{layout.__name__}, masks: {masks}"] = "; ".join([*wrong, *gathered])
    return found


def test_dropout_in_reversible_layers_draws_what_one_process_does(world_size: int) -> None:
    results: list[dict[str, Any]] = forks.on_ranks(compare_on_this_rank, world_size)
    for of_rank in results:
        assert len(of_rank) == 6
        assert not any(of_rank.values()), of_rank
