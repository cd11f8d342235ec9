"""Learning rates of each step, beside the formula of Graphormer's scheduler."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fastgraph.nn import polynomial_decay


def graphormers(
    step: int, rate: float, warm_up: int, steps: int, end: float, power: float
) -> float:
    if warm_up > 0 and step <= warm_up:
        return rate * step / warm_up
    if step >= steps:
        return end
    return (rate - end) * (1 - (step - warm_up) / (steps - warm_up)) ** power + end


@pytest.mark.parametrize("power", [1.0, 2.0])
@pytest.mark.parametrize("warm_up", [0, 4])
def test_rates_of_each_step(warm_up: int, power: float) -> None:
    groups = [{"params": [torch.zeros(1)], "lr": rate} for rate in (2e-4, 1e-2)]
    optimizer = torch.optim.AdamW(groups)
    scheduler = polynomial_decay(optimizer, warm_up, 12, power=power)
    for step in range(1, 16):
        if step == 7:  # a checkpoint
            state, optimizer_state = scheduler.state_dict(), optimizer.state_dict()
            optimizer = torch.optim.AdamW(groups)
            optimizer.load_state_dict(optimizer_state)
            scheduler = polynomial_decay(optimizer, warm_up, 12, power=power)
            scheduler.load_state_dict(state)
            optimizer.load_state_dict(optimizer_state)
        found = [group["lr"] for group in optimizer.param_groups]
        expected = [graphormers(step, rate, warm_up, 12, 1e-9, power) for rate in (2e-4, 1e-2)]
        assert found == pytest.approx(expected, rel=1e-12)
        optimizer.step()
        scheduler.step()


def test_a_rate_of_zero_stays() -> None:
    groups = [{"params": [torch.zeros(1)], "lr": rate} for rate in (0.0, 1e-2)]
    optimizer = torch.optim.SGD(groups)
    scheduler = polynomial_decay(optimizer, 1, 3)
    for step in range(1, 5):
        expected = [0.0, graphormers(step, 1e-2, 1, 3, 1e-9, 1.0)]
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(expected)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((-1, 5), {}, "warm_up: expected an integer of at least 0, got -1"),
        ((5, 5), {}, "steps: expected more than warm_up, 5, got 5"),
        ((5, math.nan), {}, "steps: expected an integer of at least 1, got nan"),
        ((0, 5), {"end": -1}, "end: expected a number of at least 0, got -1"),
        ((0, 5), {"power": 0}, "power: expected a number above 0, got 0"),
    ],
)
def test_numbers_out_of_range(arguments: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        polynomial_decay(torch.optim.SGD([torch.zeros(1)], 0.1), *arguments, **options)
