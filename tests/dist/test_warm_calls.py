"""A layer whose plan is there already: what its call enters, reads and sends on each rank."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import GATConv, GCNConv, SAGEConv

import fastgraph
import fastgraph.dist as fgd
from fastgraph.dist.operators.halo import exchange
from fastgraph.dist.ranks import transport
from fastgraph.graphs import witness
from tests.dist.graphs import NUM_FEATURES, graph

LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "GCN": lambda: GCNConv(NUM_FEATURES, NUM_FEATURES),
    "SAGE": lambda: SAGEConv(NUM_FEATURES, NUM_FEATURES),
    "GAT": lambda: GATConv(NUM_FEATURES, NUM_FEATURES // 2, heads=2),
}

MOST_MODULES = {"GCN": 13, "SAGE": 14, "GAT": 17}
"""Of ``fastgraph.dist``, with the board, which counts collectives. A further one is a decision that
is made at each call."""

ROOMS = str(Path(fgd.__file__).parent)

NUM_STEPS = 4
"""After which comparisons have ended, and plans are there."""


def entered(call: Callable[[], object]) -> set[str]:
    """The modules of ``fastgraph.dist`` that a call enters."""
    found = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(ROOMS):
            found.add(name.removeprefix(ROOMS))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def counted(patch: pytest.MonkeyPatch, owner: Any, name: str) -> list[int]:
    """Counts the calls of a function from now on."""
    number, function = [0], getattr(owner, name)

    def call(*arguments: Any) -> Any:
        number[0] += 1
        return function(*arguments)

    patch.setattr(owner, name, call)
    return number


class Trained:
    """A layer that an optimizer trains, on rows that need a gradient."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self.layer, data = layer, fgd.shard(graph(), mode="halo")
        self.x, self.index = data.x.clone().requires_grad_(), data.edge_index
        self.optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def call(self) -> Tensor:
        out: Tensor = self.layer(self.x, self.index)
        return out

    def step(self) -> None:
        self.call().square().mean().backward()
        self.optimizer.step()


def call_on_this_rank() -> dict[str, Any]:
    found = {}
    for name, make in LAYERS.items():
        with fastgraph.enabled(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(exchange, "LEAST_BYTES", 0)  # the halo travels during the first half
            trained = Trained(make())
            for _ in range(NUM_STEPS):
                trained.step()
            modules = entered(trained.call)
            checksums = counted(patch, witness, "_checksums")
            comparisons = counted(patch, transport, "table_of")
            fgd.COUNTS.reset()
            trained.step()
            found[name] = {
                "modules": sorted(modules),
                "checksums": checksums[0],
                "comparisons": comparisons[0],
                "calls": dict(fgd.COUNTS.calls),
                "halo": sum(fgd.COUNTS.halo.values()),
                "gathers": dict(fgd.COUNTS.gathers),
            }
    return found


@pytest.fixture(scope="module")
def found(world_size: int, once_on_ranks: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = once_on_ranks(call_on_this_rank, world_size)
    return found


@pytest.mark.parametrize("name", LAYERS)
def test_a_warm_call_enters_few_modules(found: list[dict[str, Any]], name: str) -> None:
    for of_rank in found:
        modules = of_rank[name]["modules"]
        assert len(modules) <= MOST_MODULES[name], " ".join(modules)


@pytest.mark.parametrize("name", LAYERS)
def test_a_warm_step_reads_no_content_again(found: list[dict[str, Any]], name: str) -> None:
    """Every edit of rows and of what is derived from them is counted on all ranks."""
    for of_rank in found:
        assert of_rank[name]["checksums"] == 0


@pytest.mark.parametrize("name", LAYERS)
def test_a_warm_step_waits_for_rows_losses_and_gradients(
    found: list[dict[str, Any]], name: str
) -> None:
    for of_rank in found:
        one = of_rank[name]
        assert one["comparisons"] == 0
        assert one["calls"] == {"all_to_all": 2, "all_reduce": 2}
        assert one["halo"] == 1
        assert not one["gathers"]
