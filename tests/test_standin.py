"""The stand-in for a GPU refuses and records what a GPU would.

Tests are in processes of their own, as torch has the device to the end of one.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastgraph.graphs import memo
from tests import forks, standin

MIXED: dict[str, Callable[[Tensor], object]] = {
    "elements": lambda x: x + torch.ones(3),
    "rows": lambda x: x.index_select(0, torch.tensor([0])),
    "assignment by a mask": lambda x: torch.where(torch.tensor([True, False, True]), x, 0.0),
    "parts": lambda x: torch.cat([x, torch.ones(3)]),
    "a product": lambda x: x @ torch.ones(3),
}

APART: dict[str, Callable[[Tensor], object]] = {
    "numbers": lambda x: x * 2 + torch.tensor(1.0),
    "views": lambda x: x.view(3, 1)[1:].t(),
    "edits": lambda x: x.clone().add_(1)[:2].zero_(),
    "factories": lambda x: torch.arange(3, device=x.device) + x.new_zeros(3),
    "sums": lambda x: torch.cumsum(x, 0).max(),
    "a generator of the host": lambda x: x + int(torch.randint(5, ())),
}

WAITING: dict[str, Callable[[Tensor], object]] = {
    "a number": lambda x: float(x.sum()),
    "a truth": lambda x: bool((x > 1).any()),
    "a list": lambda x: x.tolist(),
    "a mask": lambda x: x[x > 1],
    "positions": lambda x: x.nonzero(),
    "a comparison": lambda x: torch.equal(x, x),
    "from the host": lambda x: torch.ones(3).to(x.device),
    "from a list": lambda x: torch.tensor([1.0], device=x.device),
    "to the host": lambda x: x.cpu(),
}


def _tried() -> dict[str, str]:
    """The outcome of each function, by a word."""
    standin.install()
    found = {}
    for name, function in {**MIXED, **APART, **WAITING}.items():
        x = torch.arange(3.0).to(standin.DEVICE)
        with standin.waits() as waits:
            try:
                function(x)
                found[name] = "waits" if waits else "goes on"
            except RuntimeError as error:
                found[name] = "refused" if "device" in str(error) else repr(error)
    return found


def test_it_refuses_other_devices_and_records_what_the_host_waits_for() -> None:
    (found,) = forks.on_ranks(_tried, 1)
    expected = {
        **dict.fromkeys(MIXED, "refused"),
        **dict.fromkeys(APART, "goes on"),
        **dict.fromkeys(WAITING, "waits"),
    }
    assert found == expected


def _quarter() -> int:
    standin.install()
    return memo.quarter_of_memory(0)


def test_graphs_have_a_quarter_of_its_memory() -> None:
    assert forks.on_ranks(_quarter, 1) == [2**30]


def _losses(device: str) -> list[float]:
    standin.install()
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 2)
    ).to(device)
    x, y = torch.randn(20, 3).to(device), torch.randint(2, (20,)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(F.dropout(x, 0.2)), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_it_computes_what_the_host_does() -> None:
    (expected,), (found,) = forks.on_ranks(_losses, 1, "cpu"), forks.on_ranks(_losses, 1, "standin")
    assert found == pytest.approx(expected, rel=1e-6)
