"""The balance of ranks whose tensors are on a device, measured by its clock.

That of the stand-in goes by operations and elements, so that times are the same in every run.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch_geometric.nn import GCNConv

import fastgraph
import fastgraph.dist as fgd
from fastgraph.dist.balance import first_epochs, performance
from fastgraph.dist.balance.automatic import Automatic
from fastgraph.dist.balance.first_epochs import FirstEpochs
from fastgraph.dist.ranks.agreement import on_first_rank
from fastgraph.dist.ranks.world import WORLD
from fastgraph.registry import registry
from tests import forks, late_collectives, standin
from tests.dist.graphs import NUM_CLASSES, NUM_FEATURES, NUM_NODES, graph
from tests.dist.test_rebalance import larger

STEPS, WARM = 8, 3


def on_device() -> None:
    torch.set_default_dtype(torch.float64)
    late_collectives.install()
    registry.DEVICE_TYPES = (*registry.DEVICE_TYPES, standin.DEVICE)  # type: ignore[assignment]
    fastgraph.disable()
    fastgraph.enable(backend="reference")


class Training:
    """A layer on a graph of which the first rank has three quarters."""

    def __init__(self, data: Any) -> None:
        torch.manual_seed(0)
        self.data, self.model = data, GCNConv(NUM_FEATURES, NUM_CLASSES).to(standin.DEVICE)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        out = self.model(self.data.x, self.data.edge_index)
        loss = F.cross_entropy(out, self.data.y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def first_has_more(shares: tuple[float, float] = (3, 1)) -> Any:
    return fgd.shard(graph(), weights=list(shares), method="even").to(standin.DEVICE)


def _rebalanced(is_rebalanced: bool) -> tuple[list[float], list[str], Any, list[int]]:
    """Losses, what the host has waited for while it measured, the balance, and rows at the end."""
    on_device()
    training = Training(first_has_more())
    losses = [training.step() for _ in range(WARM)]
    with fgd.measured(training.data, epochs=2) as balance, standin.waits() as waits:
        losses += [training.step() for _ in range(2)]
    if is_rebalanced:
        fgd.rebalance(training.data, balance, method="even", threshold=1.0)
    losses += [training.step() for _ in range(STEPS - WARM - 2)]
    return [float(x) for x in losses], waits, balance, training.data.x.rows.counts


def test_a_device_is_measured_by_its_events_and_rows_move() -> None:
    expected, *_ = forks.on_ranks(_rebalanced, 2, False)[0]
    for losses, waits, balance, counts in forks.on_ranks(_rebalanced, 2, True):
        assert losses == pytest.approx(expected, rel=1e-12)
        assert not waits
        first, second = balance.measured
        assert first.compute > second.compute > 0 and first.exchange > 0
        assert balance.nodes[0] > counts[0] > NUM_NODES / 4


def _corrected(cache: str) -> tuple[list[float], list[int], list[str]]:
    """Shares by scores, and rows after the launcher has measured; and what it has waited for."""
    if WORLD.rank == 1:
        half_of_a_device()
    on_device()
    first_epochs._SECONDS = 0.0
    os.environ["XDG_CACHE_HOME"] = cache
    shares = Automatic("a script on a device", "even")
    training = Training(first_has_more((20, 1)))
    FirstEpochs([shares.correct]).watch(training.data)
    waited = []
    for step in range(13):
        with standin.waits() as waits:
            training.step()
        waited += waits if 5 <= step < 10 else []  # in the step after that they are read
    return shares.weights, training.data.x.rows.counts, waited


def test_a_script_begins_with_scores_of_devices_and_is_corrected_by_their_events(
    tmp_path: Path,
) -> None:
    for weights, counts, waits in forks.on_ranks(_corrected, 2, str(tmp_path)):
        assert weights == pytest.approx([2 / 3, 1 / 3])
        assert counts[0] < NUM_NODES * 20 / 21 - 1
        assert not waits


def _by_a_model() -> tuple[list[float], Any]:
    on_device()
    performance._SECONDS = 0.0
    model = GCNConv(8, 4).to(standin.DEVICE)
    found = fgd.measure_performance(model, larger(), ratios=[0.5, 1.0], reuse=False)
    return [one["seconds"] for one in found.samples[0]], found.samples[0][0]["peak"]


def test_a_model_of_performance_is_learnt_on_the_device_of_its_parameters() -> None:
    pytest.importorskip("sklearn")
    (first, peak), (second, _) = forks.on_ranks(_by_a_model, 2)
    assert first == second  # the device's clock is the same in every run
    assert first[-1] > first[0] > 0
    assert peak is None


def _calibrated() -> tuple[list[float], list[float], list[float]]:
    """Seconds of each rank that are predicted, before and after, and that are measured."""
    on_device()
    performance._SECONDS = 0.0
    data, parts = larger(), (torch.arange(400) >= 300).long()
    model = GCNConv(8, 4).to(standin.DEVICE)
    found = fgd.measure_performance(model, data, ratios=[0.1, 0.3], reuse=False)

    def estimate() -> performance.Estimate:
        return on_first_rank(lambda: found.estimate(data.edge_index, parts))

    before = estimate()
    state = torch.get_rng_state()
    found.calibrate(data, parts, before)
    assert torch.equal(torch.get_rng_state(), state)
    after = estimate()
    assert found.training is not None
    sharded = fgd.shard(data, parts=parts, mode="halo").to(standin.DEVICE)
    step = found.training.steps(sharded)
    for _ in range(2):
        step()
    with fgd.measured(sharded, epochs=2) as balance:
        for _ in range(2):
            step()
    seconds = [[one.compute for one in phases] for phases in (before.phases, after.phases)]
    return seconds[0], seconds[1], [one.compute for one in balance.measured]


def test_predictions_are_corrected_by_an_epoch_of_each_ranks_own_part() -> None:
    pytest.importorskip("sklearn")
    for before, after, measured in forks.on_ranks(_calibrated, 2):
        assert before != pytest.approx(measured, rel=1e-3)
        assert after == pytest.approx(measured, rel=1e-6)


def half_of_a_device() -> None:
    half = vars(standin.PROPERTIES) | {"multi_processor_count": 2, "memory_bus_width": 32}
    standin.PROPERTIES = SimpleNamespace(**half)
