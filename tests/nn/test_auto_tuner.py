"""The Auto Tuner beside its formulas, alone and on ranks."""

from __future__ import annotations

import copy
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from fastgraph.nn import AutoTuner
from fastgraph.nn.auto_tuner import FACTORS, densities
from tests import forks

LOSSES = [4 * math.exp(-epoch / 7) + 0.3 * math.sin(1.7 * epoch) for epoch in range(40)]
SECONDS = [1 + 0.2 * math.cos(epoch) for epoch in range(40)]


def indices(delta: int, sign: str) -> list[int]:
    """By the formulas of the paper, over the whole history."""
    averages = [LOSSES[0]]
    for loss in LOSSES[1:]:
        averages.append(0.9 * averages[-1] + 0.1 * loss)
    rates = [
        (now - before if sign == "printed" else before - now) / seconds
        for before, now, seconds in zip(averages, averages[1:], SECONDS[1:], strict=False)
    ]
    index, found = 1, []
    for epoch in range(len(LOSSES)):
        last = epoch - 1  # of its rate
        if last >= delta:
            index += 1 if rates[last] >= rates[last - delta] else -1
            index = min(max(index, 0), 6)
        found.append(index)
    return found


@pytest.mark.parametrize("delta", [1, 3, 10])
@pytest.mark.parametrize("sign", ["text", "printed"])
def test_thresholds_follow_the_loss(sign: str, delta: int) -> None:
    tuner, found = AutoTuner(delta=delta, sign=sign), []
    assert tuner.factor == 1
    for loss, seconds in zip(LOSSES, SECONDS, strict=True):
        factor = tuner.step(torch.tensor(loss, dtype=torch.float64), seconds)
        assert factor == tuner.factor == FACTORS[tuner.index]
        found.append(tuner.index)
    assert found == indices(delta, sign) and len(set(found)) > 2
    assert tuner.seconds == SECONDS


def test_a_slowing_descent_brings_edges_back() -> None:
    """As the paper's text has it, and its printed formula has not."""
    tuners = {sign: AutoTuner(delta=2, sign=sign) for sign in ("text", "printed")}
    for epoch in range(12):
        for tuner in tuners.values():
            tuner.step(math.exp(-epoch), 1)
    assert tuners["text"].factor == 0 and tuners["printed"].factor == math.inf


def test_checkpoints() -> None:
    whole, first = AutoTuner(delta=3), AutoTuner(delta=3)
    for epoch in range(20):
        for tuner in (whole, first) if epoch < 9 else (whole,):
            tuner.step(LOSSES[epoch], SECONDS[epoch])
    second = AutoTuner(delta=3)
    second.load_state_dict(first.state_dict())
    copied = copy.deepcopy(first)
    for epoch in range(9, 20):
        second.step(LOSSES[epoch], SECONDS[epoch])
        copied.step(LOSSES[epoch], SECONDS[epoch])
    assert second.state_dict() == whole.state_dict() == copied.state_dict()
    assert len(first.seconds) == 9


def test_a_loss_with_a_gradient() -> None:
    """Which torch warns of where it becomes a number."""
    tuner = AutoTuner()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tuner.step(torch.tensor(2.0, requires_grad=True) * 3, 1.0)
    assert tuner.average == 6.0


@pytest.mark.parametrize(
    ("loss", "seconds", "message"),
    [
        (math.nan, 1.0, "loss: expected a finite number, got nan"),
        (math.inf, 1.0, "loss: expected a finite number, got inf"),
        (1.0, 0.0, r"seconds: expected the time of an epoch, above 0, got 0.0"),
        (1.0, -1.0, "seconds: expected .* got -1.0"),
        (1.0, math.nan, "seconds: expected .* got nan"),
    ],
)
def test_wrong_epochs(loss: float, seconds: float, message: str) -> None:
    """Of which nothing is remembered."""
    tuner = AutoTuner()
    tuner.step(1.0, 1.0)
    before = tuner.state_dict()
    with pytest.raises(ValueError, match=message):
        tuner.step(loss, seconds)
    assert tuner.state_dict() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [({"delta": 0}, "delta: expected"), ({"delta": 2.0}, "delta"), ({"sign": "+"}, "sign: expe")],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AutoTuner(**options)


@pytest.mark.parametrize("wrong", [{"index": 7}, {"index": -1}, {"average": math.nan}])
def test_wrong_states(wrong: dict[str, Any]) -> None:
    tuner = AutoTuner()
    with pytest.raises(ValueError, match="expected"):
        tuner.load_state_dict(tuner.state_dict() | wrong)
    with pytest.raises(ValueError, match=r"state: expected one .* none of \['average'\]"):
        tuner.load_state_dict({"index": 3, "rates": [], "seconds": []})
    assert tuner.index == 1


def test_thresholds_are_those_of_eight_clusters() -> None:
    assert densities(0.01, 8) == pytest.approx((0, 0.01, 0.015, 0.05, 0.07, 0.1, 1))
    assert densities(0.01, 16) == pytest.approx((0, 0.02, 0.03, 0.1, 0.14, 0.2, 1))
    assert densities(0.5, 32) == (0, 1, 1, 1, 1, 1, 1)


ON_RANKS = """
import math
import warnings
import torch.distributed as dist
from fastgraph.nn import AutoTuner

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
tuner = AutoTuner(delta=2)
for epoch in range(12):  # other ranks alone would go the other way
    tuner.step(math.exp(-epoch) if rank == 0 else math.exp(epoch), 1 + rank)
states = [None] * ranks
dist.all_gather_object(states, tuner.state_dict())
assert states == [states[0]] * ranks, states
assert tuner.index == 0 and tuner.seconds == [1.0] * 12
try:
    tuner.step(math.nan if rank == 0 else 1.0, 1.0)
except ValueError as error:
    assert "loss: expected a finite number" in str(error)
else:
    raise SystemExit("a loss of NaN on rank 0 is an error on all")
own = AutoTuner(delta=2, group=[dist.new_group([number]) for number in range(ranks)][rank])
for epoch in range(12):
    own.step(math.exp(-epoch) if rank == 0 else math.exp(epoch), 1 + rank)
assert own.seconds == [1.0 + rank] * 12, own.seconds
if rank == 0:
    print("agreed", flush=True)
dist.destroy_process_group()
"""


def test_rank_zero_decides(tmp_path: Path) -> None:
    assert forks.launched(2, "-c", ON_RANKS, cwd=tmp_path).count("agreed") == 1
