"""The model of kernels on GPUs: ``benchmarks/gpu_model.py``."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastgraph.tune import gpus
from tests.cuda.benchmarks import measure
from tests.cuda.registers import TABLE

KERNELS = {
    "spmm_rows<float, 4, 16>": {"sm_90": [64, 0, 0, 0, 100, 4, 1]},
    "spmm_rows<float, 4, 32>": {"sm_90": [64, 0, 0, 0, 120, 4, 1]},
    "spmm_rows<float, 1, 32>": {"sm_90": [48, 0, 0, 0, 90, 4, 1]},
    "spmm_rows<bfloat16, 8, 32>": {"sm_90": [64, 0, 0, 0]},
}


def rows(*lengths: int, order: str = "rows") -> Any:
    return measure("model_slots").Rows(np.array(lengths, np.int64), order)


def test_a_warp_works_as_long_as_its_longest_group() -> None:
    walk = rows(4, 1, 8, 0, 17, 5).walk(16, 4)
    # Rounds of 4 entries: 1 beside 1, 2 beside none, and 5, in two batches, beside 2.
    assert (walk.warps, walk.iterations, walk.batches) == (3, 1 + 2 + 5, 1 + 1 + 2)
    assert (walk.longest, walk.longest_batches) == (5, 2)
    assert walk.slots == 8 * 4 * 2 / 35
    assert rows(8, 1, 8, 1).walk(16, 4).iterations == 2 + 2
    assert rows(8, 1, 8, 1, order="tasks").walk(16, 4).iterations == 2 + 1
    assert rows(4, 1, 8, 0, 17, 5, order="uncut").walk(16, 4).iterations == 1 + 1 + 2 + 5 + 2


def test_long_rows_are_cut() -> None:
    # Entries 0-99, 100-699 and 700-1299: chunks end at 256, 512, 768, 1024 and 1280.
    lengths = rows(100, 600, 600)
    pieces, others = lengths._spans
    assert pieces.tolist() == [0, 156, 256, 0, 188, 68, 256, 0, 256, 0, 20, 0]
    assert others.tolist() == [100, 0, 0]
    assert lengths.num_pieces == 7
    assert lengths.walk(16, 4, pieces_only=True).longest == 256 // 4
    assert lengths.merged_in_series() == [4, 4]
    # A list has pieces of equal lengths, of 64 at most in a small graph.
    pieces, others = rows(30, 130, 200, order="tasks")._spans
    assert pieces.tolist() == [43, 43, 44, 50, 50, 50, 50] and others.tolist() == [30]
    assert rows(30, 130, 200, order="tasks").merged_in_series() == [4]
    assert rows(256, 3).num_pieces == 0 and rows().walk(16, 4).slots == 0


def test_kernels_are_found_by_what_their_names_say() -> None:
    kernels = measure("model_kernels")

    def find(width: int, dtype: str = "float32") -> str:
        return str(kernels.find(KERNELS, "spmm_rows", (), dtype, width, "sm_90").name)

    assert find(64) == "spmm_rows<float, 4, 16>"
    assert find(65) == find(512) == "spmm_rows<float, 4, 32>"
    with pytest.raises(kernels.MissingKernelError, match="no loop of spmm_rows<bfloat16"):
        find(256, "bfloat16")
    with pytest.raises(kernels.MissingKernelError, match=r"no other of float32 with a, b in"):
        kernels.find(KERNELS, "other", ("a", "b"), "float32", 64, "sm_90")
    twice = KERNELS | {"spmm_rows<float, 4, 16, 2>": KERNELS["spmm_rows<float, 4, 32>"]}
    assert kernels.find(twice, "spmm_rows", (), "float32", 64, "sm_90").packs == 1
    twice |= {"spmm_rows<float, 4, 16, true>": KERNELS["spmm_rows<float, 4, 32>"]}
    with pytest.raises(kernels.MissingKernelError, match="several kernels fit rows of 64"):
        kernels.find(twice, "spmm_rows", (), "float32", 64, "sm_90")


def test_the_longest_of_five_times_is_the_kernels() -> None:
    model, sheets = measure("model"), gpus

    def predicted(lengths: Any, instructions: int = 100, width: int = 128) -> Any:
        table = {"spmm_rows<float, 4, 32>": {"sm_90": [64, 0, 0, 0, instructions, 4, 1]}}
        graph = model.Graph(lengths, lengths)
        *_, last = model.predict(
            table, sheets.sheet_of("NVIDIA H200"), graph, "SAGE-mean", "forward", width, "float32"
        )
        return last

    many = rows(*[32] * 40_000)
    slow = predicted(many, 1000)
    assert slow.bound == "issue"
    # 8 rounds, a batch and a span of each warp, 4 instructions in a cycle of which 0.7 are used.
    issued = 40_000 * (8 * 1000 + 50 + 200) / (132 * 4 * 0.7 * 1.98e9)
    assert slow.milliseconds == pytest.approx(1e3 * issued + 0.002)
    assert predicted(many, 10).bound == "cache"
    assert predicted(rows(250, *[1] * 100)).bound == "longest warp"
    wide = predicted(rows(*[16] * 1_000_000), 10)
    assert wide.bound == "memory"
    assert wide.milliseconds > 0.8 * 16_000_000 * 128 * 4 / 4300e6  # as little stays in the cache


def test_heads_of_a_node_share_a_warp_where_the_cache_has_room() -> None:
    model, h200 = measure("model"), gpus.sheet_of("NVIDIA H200")
    # Each of four heads in 16 lanes, for 4 entries, or in 8 of one warp.
    apart = "softmax_rows<Layout<float, 4, 16, 1, true>, Gatv2Scores<float, false> >"
    together = "softmax_rows<HeadsOfNode<float, 4, 8, 2>, Gatv2Scores<float, false> >"
    table = {apart: {"sm_90": [64, 0, 0, 0, 400, 4, 1]}}
    both = table | {together: {"sm_90": [64, 0, 0, 0, 500, 8, 1]}}

    def predicted(nodes: int, table: Any, width: int = 256) -> float:
        lengths = rows(*[32] * nodes, order="tasks")
        graph = model.Graph(lengths, lengths)
        *_, last = model.predict(table, h200, graph, "GATv2", "forward", width, "float32")
        return float(last.milliseconds)

    # 8 rounds of 4 entries and 4 batches for a node, in place of 2 x 8 of them and 2 x 2.
    issued = 40_000 * (8 * 500 + 4 * 50 + 200) / (132 * 4 * 0.7 * 1.98e9)
    assert predicted(40_000, both) == pytest.approx(1e3 * issued + 0.002)
    issued = 40_000 * 2 * (8 * 400 + 2 * 50 + 200) / (132 * 4 * 0.7 * 1.98e9)
    assert predicted(40_000, table) == pytest.approx(1e3 * issued + 0.002)
    assert predicted(100_000, both) == predicted(100_000, table)
    assert predicted(40_000, both, 128) == predicted(40_000, table, 128)  # heads of 8 packs


def test_registers_bound_the_warps_at_work() -> None:
    h200 = gpus.sheet_of("NVIDIA H200")
    assert [h200.warps_at_work(n) for n in (32, 56, 79, 96, 165, 255)] == [64, 36, 24, 20, 12, 8]
    assert gpus.sheet_of("Tesla T4") is None


def test_all_kernels_that_the_model_asks_for_are_in_the_table() -> None:
    report = measure("model_report")
    degrees = {"hub": (np.array([300, 3, 0]), np.array([101, 101, 101]))}
    cells = report.predicted(json.loads(TABLE.read_text()), degrees, "rows", (64, 128, 256, 512))
    assert len(cells) == 6 * 3 * 4 * 2
    # Loops of attention are not in the table until it is written where there is a disassembler.
    assert all(re.match("no loop of", c["missing"]) for c in cells if "missing" in c)
    (cell,) = (
        c
        for c in cells
        if [c[k] for k in ("gpu", "layer", "width", "dtype")] == ["H200", "GCN", 256, "float32"]
    )
    names = [kernel.split()[0] for kernel in cell["kernels"]["forward"]]
    assert names[-2:] == ["spmm_rows", "merge"]


def test_predictions_are_compared_with_what_was_measured(tmp_path: Path) -> None:
    report = measure("model_report")
    place = {"graph": "tolokers", "layer": "GCN", "width": 256, "dtype": "float32"}
    cells = [{"gpu": gpu, **place, "forward": 0.8, "backward": 3.0} for gpu in ("H200", "A100")]
    cells += [{"gpu": "H200", **place, "width": 64, "missing": "no loop"}]
    cells += [{"gpu": "H200", **place, "dtype": "bfloat16", "forward": 1.0, "backward": 1.0}]

    def row(rival: str, milliseconds: float, **more: Any) -> dict[str, Any]:
        times = {way: {"median": milliseconds} for way in ("forward", "backward")}
        return {**place, "beside": "upstream", "rival": rival, **times, **more}

    measured = [
        row("ours", 1.0),
        row("upstream", 50.0),
        row("ours", 7.0, beside="turbo-gnn"),
        row("ours", 2.0, dtype="bfloat16"),
        row("ours", 9.0, width=64),
        row("ours", 9.0, width=512, failed="out of memory"),
    ]
    machine = {"GPU": "NVIDIA H200"}
    for name, record in {
        "2026-12-01-gpu.json": {"machine": machine, "cells": measured},
        "2026-12-01-gpu-2.json": {"machine": {"GPU": "Tesla T4"}, "cells": measured},
        "2026-12-01-gpu-model.json": {"cells": []},
    }.items():
        (tmp_path / name).write_text(json.dumps(record))
    forward, backward = report.compared(cells, sorted(tmp_path.glob("*-gpu*.json")))
    assert (forward["file"], forward["gpu"], forward["cells"]) == ("2026-12-01-gpu.json", "H200", 2)
    assert forward["mean_absolute_percent"] == pytest.approx((20 + 50) / 2)
    assert forward["worst"] == "tolokers GCN 256 bfloat16: -50 %"
    assert backward["mean_absolute_percent"] == pytest.approx((200 + 50) / 2)
    launches = {"GCN": {"forward": [1, 31], "backward": [1, 4]}}
    results = {"command": "", "table": "", "order": "rows", "cells": [], "launches": launches}
    text = report.markdown({**results, "compared": [forward]}, {}, {})
    assert "| 2026-12-01-gpu.json | H200 | forward | 2 | 35 |" in text
    assert "There are none yet" in report.markdown({**results, "compared": []}, {}, {})


def test_the_page_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import gpu_model

    given = ["--graphs", "kronecker-11", "--out", str(tmp_path), "--order", "rows"]
    monkeypatch.setattr(sys, "argv", ["gpu_model.py", *given])
    gpu_model.main()
    (path,) = tmp_path.glob("*-gpu-model.json")
    results = json.loads(path.read_text())
    assert results["label"] == "predicted, never measured" and results["order"] == "rows"
    counts = results["launches"]["SAGE-max"]
    assert all(0 < ours <= upstream for ours, upstream in counts.values())
    assert "predicted, never measured" in path.with_suffix(".md").read_text().lower()
