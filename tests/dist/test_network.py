"""The network of namespaces that benchmarks of several ranks run in."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.spawning import run_on_ranks
from fastgraph.dist.ranks.world import WORLD


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import measure.network

    yield measure.network
    for name in [name for name in sys.modules if name.partition(".")[0] == "measure"]:
        del sys.modules[name]


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


def summed() -> list[float]:
    return transport.all_reduce(torch.tensor([float(WORLD.rank)])).tolist()


def test_ranks_meet_and_nothing_is_left(measure: ModuleType) -> None:
    before = namespaces()
    try:
        with measure.network(2, megabits=100) as network:
            assert namespaces() != before
            assert run_on_ranks(summed, 2, timeout=60, prefixes=network.prefixes) == [[1.0]] * 2
    except measure.NetworkError as error:
        pytest.skip(str(error))
    with pytest.raises(KeyError), measure.network(3, None):
        raise KeyError
    assert namespaces() == before


def test_what_a_machine_cannot_do(measure: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure.os, "geteuid", lambda: 1000)
    with pytest.raises(measure.NetworkError, match="made by root"), measure.network(2, None):
        pass
    monkeypatch.setattr(measure.os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(measure.NetworkError, match="ip and tc of iproute2"), measure.network(2, 1):
        pass


def test_a_prefix_for_each_rank() -> None:
    with pytest.raises(ValueError, match="prefixes must be 2, one for each rank, got 1"):
        run_on_ranks(summed, 2, prefixes=[["env"]])
