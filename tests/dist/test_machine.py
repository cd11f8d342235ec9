"""The speed of ranks is measured once, cached, and trusted if its figures are of such ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fastgraph
from fastgraph.dist.operators import links
from fastgraph.dist.operators.cost import Cluster
from fastgraph.dist.ranks.devices import devices, memory_of_a_rank
from fastgraph.machine import cache
from tests.dist.test_devices import device

FIGURES = {"latency": 1e-4, "bandwidth": 1e9, "work": 1e-9, "sums": 1e-10, "paces": [1.0]}
OTHERS = Cluster(1.0, 2.0, 3.0, 4.0, paces=(1.0,))


@pytest.fixture(autouse=True)
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Cluster]:
    """The machines that were measured, one for each measurement."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(links, "KNOWN", {})
    times: list[Cluster] = []

    def measure() -> Cluster:
        times.append(OTHERS)
        return OTHERS

    monkeypatch.setattr(links, "measure", measure)
    return times


def identity() -> str:
    return links._identity(devices(bandwidth=False))


def again() -> Cluster:
    """The machine that a new process would read from the cache."""
    links.KNOWN.clear()
    return links.of_ranks()


def test_a_further_run_has_the_figures_of_the_first(measured: list[Cluster]) -> None:
    first = links.of_ranks()
    assert first.memory == memory_of_a_rank(devices(bandwidth=False)) > 2**28
    assert first._replace(memory=math.inf) == OTHERS
    assert again() == first == links.of_ranks()
    assert len(measured) == 1


def test_figures_are_above_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    found = links.measure()
    assert all(0 < figure < math.inf for figure in (*found[:5], *found.paces))
    assert found.paces == (1.0,)


@pytest.mark.parametrize(
    "changes",
    [
        {"latency": 0.0},
        {"bandwidth": math.inf},
        {"work": math.nan},
        {"sums": -1e-9},
        {"sums": "1e-9"},
        {"paces": []},
        {"paces": [1.0, 1.0]},
        {"paces": [0.0]},
        {"paces": 1.0},
        {"more": 1.0},
    ],
)
def test_what_are_no_figures_is_measured_again(
    measured: list[Cluster], changes: dict[str, Any]
) -> None:
    cache.write(links.KIND, identity(), FIGURES)
    assert again().latency == 1e-4 and not measured
    cache.write(links.KIND, identity(), FIGURES | changes)
    assert again().latency == OTHERS.latency and len(measured) == 1
    assert again().latency == OTHERS.latency and len(measured) == 1


def test_a_damaged_file_is_measured_again(measured: list[Cluster]) -> None:
    links.of_ranks()
    path = cache.path_of(links.KIND, identity())
    path.write_text(path.read_text().replace("2.0", "9.0"))
    assert again().bandwidth == 2.0 and len(measured) == 2


def test_of_runs_at_the_same_time_all_take_the_figures_of_one(measured: list[Cluster]) -> None:
    found = devices(bandwidth=False)
    cache.write(links.KIND, identity(), FIGURES)
    assert links._keep(found, OTHERS).latency == 1e-4


def test_it_is_said_where_nothing_can_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert links.of_ranks().latency == OTHERS.latency
    assert "cannot be written: other runs will measure" in capsys.readouterr().err


def test_figures_are_of_such_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    one = device()
    names = {
        links._identity(found)
        for found in (
            [one],
            [one, one],
            [one, device(host="there")],
            [one, device(name="b")],
            [one, device(threads=2)],
            [one, device(cores=0.4)],
        )
    }
    assert len(names) == 6
    assert links._identity([replace(one, bandwidth=1.0, memory=1, clock=1.0)]) in names
    with fastgraph.enabled(backend="reference"):
        names.add(links._identity([one]))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    names.add(links._identity([one]))
    monkeypatch.setattr(torch, "__version__", "another")
    names.add(links._identity([one]))
    assert len(names) == 9


def test_memory_is_that_of_the_smallest_rank() -> None:
    large, small = device(memory=2**36), device(host="there", memory=2**34)
    assert memory_of_a_rank([large, large, small]) == 2**34
    assert memory_of_a_rank([large, small, small]) == 2**33
    assert memory_of_a_rank([large, device(limit=2.0**30)]) == 2**30
