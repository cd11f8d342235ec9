"""Features of parts, regressors, and shares by which ranks are predicted to take equally long."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fastgraph.dist as fgd
from fastgraph.dist.balance.balance import Measurement
from fastgraph.dist.balance.features import describe, gini
from fastgraph.dist.balance.performance import Estimate, _same_random_states
from fastgraph.dist.balance.shares import capped, solve
from fastgraph.dist.graphs.partition import partition
from fastgraph.dist.graphs.relayout import Placement
from fastgraph.dist.ranks.phases import RECORDER, Phases, imbalance, separated
from tests import forks
from tests.dist import graphs

EDGES = torch.tensor([[0, 1, 2, 2, 3, 4, 4, 0], [1, 0, 2, 0, 0, 3, 0, 3]])
OWNER = torch.tensor([0, 0, 0, 1, 1])


def test_features_of_a_part() -> None:
    found = describe(EDGES, OWNER, 0)  # rows 0, 1, 2 with 4, 1, 1 entries; 3 and 4 are the halo
    assert (found["rows"], found["columns"], found["entries"]) == (3, 5, 6)
    assert (found["halo"], found["halo entries"], found["given"]) == (2, 2, 1)
    assert (found["row mean"], found["row max"], found["rows empty"]) == (2, 4, 0)
    assert found["self-loops"] == 1 and found["density"] == 6 / 15
    assert found["row deviation"] == pytest.approx(2**0.5)
    assert found["row Gini"] == pytest.approx(1 / 3)
    assert found["distance max"] == 4
    assert found["row quantile 0.5"] == 1
    assert len(found) >= 30


def test_parts_without_anything() -> None:
    names = list(describe(EDGES, OWNER, 0))
    for edges in (EDGES, EDGES[:, :0]):
        empty = describe(edges, OWNER, 2)
        assert list(empty) == names
        assert all(torch.tensor(value).isfinite() for value in empty.values())


@pytest.mark.parametrize(("values", "expected"), [([1, 1, 1], 0.0), ([0, 0, 3], 2 / 3), ([], 0.0)])
def test_gini(values: list[float], expected: float) -> None:
    assert gini(torch.tensor(values, dtype=torch.float64)) == pytest.approx(expected)


def test_phases() -> None:
    first, second = separated([10.0, 10.0], [[1.0, 5.0], [3.0, 1.0]])
    assert first == Phases(compute=4.0, exchange=2.0, wait=4.0)
    assert second == Phases(compute=6.0, exchange=2.0, wait=2.0)
    assert first.total == 10.0 and imbalance([first, second]) == 6 / 5
    with pytest.raises(ValueError, match="as many collectives"):
        separated([1.0, 1.0], [[1.0], []])


def _fail(placement: Placement) -> None:
    with _same_random_states(), Measurement(placement):
        assert RECORDER.collectives is not None
        torch.rand(3)
        raise ValueError("step")


def _left_by_an_error() -> tuple[bool, bool]:
    """That nothing is recorded after a failed step, and that random states are those before."""
    placement = Placement.of(fgd.shard(graphs.graph()))
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="step"):
        _fail(placement)
    return RECORDER.collectives is None, torch.equal(torch.get_rng_state(), state)


def test_a_step_that_fails_leaves_nothing_on() -> None:
    assert forks.on_ranks(_left_by_an_error, 1) == [(True, True)]


class TestRegressors:
    """Of times that are known."""

    names = ("rows", "columns", "entries", "noise")

    def data(self, sizes: Tensor) -> tuple[object, object]:
        generator = torch.Generator().manual_seed(0)
        noise = torch.rand(len(sizes), generator=generator).double()
        rows = 100 * sizes
        entries = rows * (2 + 6 * torch.rand(len(sizes), generator=generator).double())
        features = torch.stack([rows, rows * 1.1, entries, noise], 1)
        return features.numpy(), (1e-4 + 1e-6 * rows + 3e-6 * entries).numpy()

    def test_a_part_larger_than_all_samples(self) -> None:
        pytest.importorskip("sklearn")
        from fastgraph.dist.balance.estimators import choose

        features, seconds = self.data(torch.arange(1, 17).double())
        chosen = choose(self.names, features, seconds, torch.arange(16).numpy())
        assert chosen.error < 0.05
        assert set(chosen.errors) >= {"proportional", "ridge", "trees"}
        larger, expected = self.data(torch.tensor([60.0]).double())
        assert chosen.predict(larger)[0] == pytest.approx(expected[0], rel=0.05)

    def test_too_few_samples(self) -> None:
        pytest.importorskip("sklearn")
        from fastgraph.dist.balance.estimators import choose

        features, seconds = self.data(torch.arange(1, 4).double())
        with pytest.raises(ValueError, match="at least 4 samples, got 3"):
            choose(self.names, features, seconds, torch.arange(3).numpy())


class Devices:
    """A model of performance that knows the speeds of ranks: nodes and edges in a second."""

    def __init__(self, *speeds: float, memory: float = 0.0) -> None:
        self.speeds, self.memory = speeds, memory

    def estimate(self, edge_index: Tensor, owner: Tensor) -> Estimate:
        found = [describe(edge_index, owner, rank) for rank in range(len(self.speeds))]
        seconds = [
            (one["rows"] + one["entries"]) / speed
            for one, speed in zip(found, self.speeds, strict=True)
        ]
        phases = [Phases(one, 0.0, max(seconds) - one) for one in seconds]
        return Estimate(phases, [self.memory * one["rows"] for one in found])


def graph(nodes: int = 2000, edges: int = 8000) -> Tensor:
    return torch.randint(nodes, (2, edges), generator=torch.Generator().manual_seed(0))


def test_ranks_are_predicted_to_take_equally_long() -> None:
    parts, estimate = solve(graph(), 2000, Devices(3, 1, 1), [1 / 3] * 3, method="even")  # type: ignore[arg-type]
    assert imbalance(estimate.phases) < 1.03
    assert torch.equal(parts, partition(graph(), 2000, 3, weights=[3, 1, 1], method="even")) or (
        0.55 < float((parts == 0).double().mean()) < 0.65
    )


def test_no_rank_gets_more_than_its_memory_holds() -> None:
    model = Devices(9, 1, memory=1.0)  # a byte for each node

    def limits(needed: float) -> list[float]:
        return [600 / max(needed, 1.0), 1.0]

    parts, estimate = solve(graph(), 2000, model, [0.1, 0.9], method="even", memory=limits)  # type: ignore[arg-type]
    assert 500 < int((parts == 0).sum()) <= 620
    assert estimate.phases[1].compute > estimate.phases[0].compute


@pytest.mark.parametrize(
    ("shares", "limits", "expected"),
    [
        ([0.7, 0.3], [1, 1], [0.7, 0.3]),
        ([0.7, 0.3], [0.5, 1], [0.5, 0.5]),
        ([0.6, 0.2, 0.2], [0.3, 0.3, 1], [0.3, 0.3, 0.4]),
    ],
)
def test_shares_within_limits(
    shares: list[float], limits: list[float], expected: list[float]
) -> None:
    assert capped(shares, limits) == pytest.approx(expected)


def test_too_little_memory_for_the_graph() -> None:
    with pytest.raises(MemoryError, match="they can hold 50%, 40% of it"):
        capped([0.5, 0.5], [0.5, 0.4])
