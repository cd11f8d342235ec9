"""``benchmarks/gpu.py`` without a GPU: what it measures with, and a run on the CPU."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fastgraph import native
from fastgraph.backends.cpu import CpuBackend

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def measure(name: str) -> Any:
    """A module of the benchmarks, which are no package that could be installed."""
    path = str(ROOT / "benchmarks")
    if path not in sys.path:
        sys.path.append(path)
    return importlib.import_module(f"measure.{name}")


def test_one_turn_is_timed_where_the_budget_is_too_small_for_more() -> None:
    device = measure("device")
    slow = device.Contestant("slow", lambda _: time.sleep(0.02))
    device.interleave([slow], CPU, 0.001)
    assert len(slow.milliseconds) == 1 and slow.median > 19


def test_a_failure_is_recorded_and_the_others_go_on() -> None:
    device = measure("device")
    seen: list[int] = []
    broken = device.Contestant("broken", lambda _: 1 // 0)
    sound = device.Contestant("sound", seen.append, copies=3)
    device.interleave([broken, sound], CPU, 0.01)
    assert broken.failed == "ZeroDivisionError: integer division or modulo by zero"
    assert sound.failed is None and len(sound.milliseconds) > 2
    assert seen[:5] == [0, 1, 2, 0, 1]


def test_inputs_are_rotated_past_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    device = measure("device")
    monkeypatch.setattr(device, "cache_bytes", lambda _: 50 << 20)
    cora = 2708 * 64 * 4
    assert device.copies_beyond_cache(CPU, cora) * cora > 2 * (50 << 20)
    assert device.copies_beyond_cache(CPU, 1 << 30) == 2


def test_who_computed_is_proved() -> None:
    routing = measure("routing")
    counted = routing.Counted(CpuBackend())
    with pytest.raises(routing.ColumnError, match="should have run"), counted.running():
        pass
    with pytest.raises(routing.ColumnError, match="spmm"), counted.standing_by():
        counted.calls["spmm"] += 1


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    requirements = measure("requirements")
    monkeypatch.setattr(requirements, "find_program", lambda name: None)
    monkeypatch.setattr(requirements, "_is_there", lambda name: name != "tvm_ffi")
    assert requirements.missing(["measure"]) == ["the package apache-tvm-ffi"]
    assert "the program ninja" in requirements.missing(["build"])


def row(rival: str, forward: float, **more: Any) -> dict[str, Any]:
    times = {way: {"median": forward} for way in ("forward", "backward")}
    cell = {"graph": "tolokers", "layer": "GATv2", "width": 256, "dtype": "float32"}
    sizes = {"num_nodes": 10, "num_edges": 100, "peak_bytes": 10, "compiled": False}
    return {**cell, **sizes, "rival": rival, "repeats": True, **times, **more}


def test_floors_compare_rows_of_one_cell() -> None:
    report = measure("gpu_report")
    cells = [
        row("upstream", 30, peak_bytes=200),
        row("ours", 1),
        row("ours", 100, compiled=True),
        row("upstream", 30, compiled=True),
        row("ours", 0.5, dtype="bfloat16"),
        row("turbo-gnn", 0, failed="out of memory"),
    ]
    bandwidth = {"copy_gb_per_s": 1e9, "cached_gather_gb_per_s": 1e9}
    floors = report.floors({"cells": cells, "bandwidth": bandwidth, "cache_bytes": 0})
    met = {floor.what: floor.met for floor in floors}
    assert met["over PyG, tolokers GATv2 of 4 heads of 64, forward"] is True
    assert met["peak memory below PyG's, tolokers GATv2"] is False  # 20x
    assert met["over turbo-gnn, GATv2, Transformer, forward"] is None
    assert met["share of measured bandwidth, forward, width 256"] is False


def test_no_run_overwrites_another(tmp_path: Path) -> None:
    record = measure("output").Record
    first = record.fresh(tmp_path, "gpu")
    first.add("row", 1)
    second = record.fresh(tmp_path, "gpu")
    second.add("row", 2)
    assert second.path.name == f"{first.stem.name}-2.jsonl"
    assert (first.lines("row"), second.lines("row"), second.lines("left")) == ([1], [2], [])


def test_calls_share_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = measure("cells")
    record = measure("output").Record(tmp_path / "record.jsonl")
    first, *others = cells.plan(["tolokers", "like-ogbn-products"], ["GCN"], [64, 256])
    assert str(first) == "tolokers GCN 256 float32"
    assert [str(cell) for cell in others].count("like-ogbn-products GCN 256 float32") == 1
    assert sum(cell.graph == "like-ogbn-products" for cell in others) == 1
    monkeypatch.setattr(cells.Bench, "rows", lambda _, cell, budget: [cell.to_json()])
    bench = cells.Bench(CPU, None)
    told: list[str] = []
    for graphs in ([first], [first, *others]):
        bench.measure(graphs, record, time.monotonic() + 60, told.append)
    assert len(told) == len(record.lines("row")) == 1 + len(others)
    (cell,) = cells.plan(["wing"], ["GCN"], [64])[:1]
    bench.measure([cell], record, time.monotonic() - 1, told.append)
    assert record.lines("left") == [["wing GCN 64 float32"]]


def test_a_run_on_the_cpu(tmp_path: Path) -> None:
    choice = ["--device", "cpu", "--graphs", "kronecker-11,unknown", "--layers", "GCN"]
    choice += ["--widths", "16", "--stages", "measure", "--out", str(tmp_path)]
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *choice]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("FASTGRAPH")}
    process = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    (path,) = tmp_path.glob("*-gpu.json")
    rows = {(r["graph"], r["rival"]): r for r in json.loads(path.read_text())["cells"]}
    ours = rows["kronecker-11", "ours"]
    assert ours["repeats"] and ours["backward"]["median"] > 0
    assert "failed" not in rows["kronecker-11", "upstream"]
    assert "ValueError" in rows["unknown", "all"]["failed"]


def test_a_gpu_can_be_demanded() -> None:
    if native.why_cuda_unavailable() is None:
        pytest.skip("there is one")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--gpu"]
    command += ["tests/cuda/test_operators.py", "-k", "test_bits and spmm-sum"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 1 and "1 error" in process.stdout, process.stdout
