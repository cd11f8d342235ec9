"""Facts of devices, and the shares that follow from them."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from fastgraph.dist.ranks import devices
from fastgraph.dist.ranks.devices import Device, scores


def device(**changes: object) -> Device:
    facts = {
        "kind": "cpu", "name": "a", "host": "here", "cores": 1.0, "threads": 1, "clock": 3e9,
        "bandwidth": 1e10, "memory": 2**34, "limit": math.inf,
    }  # fmt: skip
    return Device(**{**facts, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 0.5),
        ({"cores": 0.4}, 1 / 1.4),
        (
            {"cores": 4.0, "threads": 4},
            (2 / 5) / (2 / 5 + 2 / 2),
        ),  # half of the time waits for memory
        ({"clock": 0.0, "cores": 1.0}, 0.5),  # what is not known of one is left out
        (
            {"kind": "cuda", "cores": 132.0, "threads": 132, "bandwidth": 3e10},
            0.25,
        ),  # its cores are others
    ],
)
def test_scores(changes: dict[str, object], expected: float) -> None:
    found = scores([device(), device(**changes)])
    assert found[0] == pytest.approx(expected) and sum(found) == pytest.approx(1)


def test_this_cpu() -> None:
    found = devices.cpu()
    assert found.cores > 0 and found.bandwidth > 1e8 and found.memory > 2**28
    assert devices.identities([found, found]) == [found.identity(2)] * 2
    assert [one.cores for one in devices.devices()] == [found.cores]


def test_a_gpu() -> None:
    properties = SimpleNamespace(
        name="G", multi_processor_count=100, clock_rate=1_500_000, memory_clock_rate=1_000_000,
        memory_bus_width=4096, total_memory=2**36,
    )  # fmt: skip
    found = devices.cuda(properties, "here")
    assert (found.cores, found.clock, found.memory) == (100, 1.5e9, 2**36)
    assert found.bandwidth == 2 * 1e9 * 512


def mount(folder: Path, monkeypatch: pytest.MonkeyPatch, groups: str, kind: str) -> Path:
    """A mounted hierarchy of control groups, of which this process is said to be in ``/a/b``."""
    mounted, proc = folder / "cgroup", folder / "proc/self"
    (mounted / "a/b").mkdir(parents=True)
    proc.mkdir(parents=True)
    (proc / "cgroup").write_text(groups)
    (proc / "mountinfo").write_text(
        "30 23 0:26 / /proc rw - proc proc rw\n"
        f"31 23 0:27 / {mounted} rw,relatime - {kind} rw,cpu\n"
    )
    monkeypatch.setattr(devices, "_PROC", folder / "proc")
    return mounted


def test_the_lowest_quota_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted = mount(tmp_path, monkeypatch, "0::/a/b\n", "cgroup2 cgroup2")
    assert devices.cpu_quota() == devices.memory_limit() == math.inf
    (mounted / "a/b/cpu.max").write_text("max 100000\n")
    (mounted / "a/cpu.max").write_text("40000 100000\n")
    (mounted / "cpu.max").write_text("150000 100000\n")
    (mounted / "a/b/memory.max").write_text("1048576\n")
    assert devices.cpu_quota() == 0.4
    assert devices.memory_limit() == 2**20


def test_quotas_of_the_first_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted = mount(tmp_path, monkeypatch, "4:memory:/a\n1:cpu,cpuacct:/a/b\n", "cgroup cgroup")
    for folder, quota in (("", -1), ("a", 250_000), ("a/b", -1)):
        (mounted / folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (mounted / folder / "cpu.cfs_period_us").write_text("100000\n")
    assert devices.cpu_quota() == 2.5
