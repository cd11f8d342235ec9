"""Comparisons between ranks: all that rows meet in the first steps, and nothing in later ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import GATConv

import fastgraph
import fastgraph.dist as fgd
from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.world import WORLD, RanksDivergedError
from fastgraph.dist.tensor.digests import DIGESTS
from tests.dist.graphs import NUM_FEATURES, graph

NUM_STEPS = 5


class Trained:
    """A model, which an optimizer trains."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = GATConv(NUM_FEATURES, 4, heads=2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, data: Any) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.model(data.x, data.edge_index).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def of_steps(act: Callable[[], object]) -> list[int]:
    """The comparisons of this rank in each of some steps."""
    asked, found = transport.table_of, []

    def counted(row: Tensor) -> Tensor:
        found[-1] += 1
        return asked(row)

    DIGESTS.begin()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "table_of", counted)
        for _ in range(NUM_STEPS):
            found.append(0)
            act()
    return found


def train_on_this_rank() -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    with fastgraph.enabled():
        data, whole = fgd.shard(graph()), graph()
        found: dict[str, Any] = {}
        trained = Trained()
        found["together"] = of_steps(lambda: trained.step(data))
        trained, other = Trained(), Trained()

        def beside_one_process() -> None:
            for _ in range(3 * (WORLD.rank == 0)):  # which one rank trains
                other.step(whole)
            trained.step(data)

        found["beside one process"] = of_steps(beside_one_process)
        trained = Trained()
        found["without steps"] = of_steps(lambda: trained.model(data.x, data.edge_index))
        trained = Trained()
        DIGESTS.begin()
        trained.step(data)
        if WORLD.rank == 1:
            with torch.no_grad():
                trained.model.lin.weight[0, 0] += 1
        found["error"] = None
        try:
            trained.step(data)
        except RanksDivergedError as error:
            found["error"] = str(error)
    return found


@pytest.fixture(scope="module")
def found(world_size: int, once_on_ranks: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = once_on_ranks(train_on_this_rank, world_size)
    return found


@pytest.mark.parametrize("name", ["together", "beside one process"])
def test_steps_after_the_second_compare_nothing(found: list[dict[str, Any]], name: str) -> None:
    """But for one comparison, in which all ranks learn that none has a step left."""
    for of_rank in found:
        first, second, third, *later = of_rank[name]
        assert first >= second > 1
        assert third <= 1
        assert later == [0] * (NUM_STEPS - 3)


def test_programs_without_steps_compare_on(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert min(of_rank["without steps"]) > 1


def test_what_differs_in_the_second_step_is_an_error(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert "not the same on all ranks" in of_rank["error"]
