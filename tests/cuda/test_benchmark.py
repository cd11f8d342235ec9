"""``benchmarks/gpu.py`` without a GPU: what it measures with, and a run on the CPU."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastgraph import settings
from fastgraph.backends.cpu import CpuBackend
from fastgraph.machine import native
from fastgraph.plugins.hookspecs import plugin_manager
from fastgraph.registry.registry import REGISTRY
from fastgraph.tune.fastest import FastestAttention, FastestSpmm
from tests.cuda.benchmarks import measure
from tests.graphs import random_edges

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


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
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    depended = {line.partition(">=")[0] for line in project["dependencies"]}
    assert depended <= set(requirements._PACKAGES.values())
    monkeypatch.setattr(requirements, "find_program", lambda name: None)
    monkeypatch.setattr(requirements, "_is_there", lambda name: name != "tvm_ffi")
    assert requirements.missing(["measure"]) == ["the package apache-tvm-ffi"]
    assert "the program ninja" in requirements.missing(["build"])


def test_a_torch_that_cannot_hand_over_its_streams_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requirements, preflight = measure("requirements"), measure("preflight")
    assert requirements.missing(["measure"]) == []
    (is_right, line), *others = preflight.findings(CPU)
    assert is_right and line.startswith("ok    tensors: torch ") and not others
    for module in (requirements, preflight):
        monkeypatch.setattr(module, "EXCHANGE", "__not_there__")
    (lacking,) = requirements.missing(["measure"])
    assert "a torch whose tensors have __not_there__" in lacking
    assert not requirements.missing([])  # a report needs none
    assert next(preflight.findings(CPU))[1].startswith("WRONG tensors: torch ")


def test_one_point_that_fails_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    preflight = measure("preflight")
    checks = {"broken": lambda _: 1 // 0, "alignment": preflight.alignment}
    monkeypatch.setattr(preflight, "EVERYWHERE", checks)
    broken, sound = (line for _, line in preflight.findings(CPU))
    assert broken.startswith("WRONG broken: ZeroDivisionError")
    assert sound.startswith("ok    alignment: allocations to ")


def row(rival: str, forward: float, **more: Any) -> dict[str, Any]:
    times = {way: {"median": forward} for way in ("forward", "backward")}
    cell = {"graph": "tolokers", "layer": "GATv2", "width": 256, "dtype": "float32"}
    peaks = {"forward": 5, "backward": 10}
    sizes = {"num_nodes": 10, "num_edges": 100, "peak_bytes": peaks, "beside": "upstream"}
    return {**cell, **sizes, "rival": rival, "repeats": True, **times, **more}


def errors(largest: float, allowed: float | None = 2e-4) -> dict[str, Any]:
    return {"output": largest, "gradient": 0.0, "of": "upstream", "allowed": allowed}


def test_floors_compare_rows_of_one_cell() -> None:
    report = measure("gpu_report")
    cells = [
        row("upstream", 30, peak_bytes={"forward": 200, "backward": 100}, errors=errors(1, None)),
        row("ours", 1, errors=errors(1e-4)),
        row("ours", 2, layer="GCN"),
        row("ours-measured", 1, layer="GCN"),
        row("turbo-gnn", 1.5, layer="GCN"),
        row("ours", 100, beside="compile"),
        row("compile", 30, beside="compile"),
        row("ours", 0.5, dtype="bfloat16"),
        row("turbo-gnn", 0, failed="ColumnError: differs", errors=errors(3e-4)),
    ]
    bandwidth = {"copy_gb_per_s": 1e9, "cached_gather_gb_per_s": 1e9}
    floors = report.floors({"cells": cells, "bandwidth": bandwidth, "cache_bytes": 0})
    met = {floor.what: floor.met for floor in floors}
    assert met["over PyG, tolokers GATv2 of 4 heads of 64, forward"] is True
    assert met["peak memory below PyG's, tolokers GATv2"] is False  # 20x
    assert met["over turbo-gnn, GATv2, Transformer, forward"] is None
    assert met["over turbo-gnn, GCN, SAGE-mean, backward"] is False
    assert met["ours-measured over turbo-gnn, GCN, SAGE-mean, backward"] is True
    assert met["share of measured bandwidth, forward, width 256"] is False
    assert met["error of any column over what is allowed"] is False
    assert "ColumnError: differs" in report.markdown(
        {
            **{"cells": cells, "bandwidth": bandwidth, "cache_bytes": 0, "machine": {}},
            **{"commands": [], "stages": [], "left": []},
        }
    )


def test_bytes_of_the_gradient_are_those_of_all_walks() -> None:
    report = measure("gpu_report")
    results = {"bandwidth": {"copy_gb_per_s": 1.0, "cached_gather_gb_per_s": 8.0}}
    gatv2 = row("ours", 100 * 256 * 4 / 1e6)  # a GB/s for a row of each edge
    assert report.gathered_gb_per_s(gatv2, "forward") == pytest.approx(1)
    assert report.gathered_gb_per_s(gatv2, "backward") == pytest.approx(3)
    held = 10 * 256 * 4
    for cache, forward, backward in (
        (0, 100, 300),
        (held, 12.5, 300),  # the gradient is gathered, too, and both do not fit
        (2 * held, 12.5, 37.5),
    ):
        found = [
            report.bandwidth_share(gatv2, {**results, "cache_bytes": cache}, way)
            for way in report.DIRECTIONS
        ]
        assert found == pytest.approx([forward, backward])


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
    told, running = with_answers(record, monkeypatch)
    for graphs in ([first], [first, *others]):
        running.measure(graphs, time.monotonic() + 60, 3, 60)
    assert len(told) == len(record.lines("row")) == 1 + len(others)
    assert record.lines("machine") == ["this", "this"]
    in_clusters = cells.plan(["wing", "wing-clusters"], ["GCN", "GAT"], [64])
    assert [str(c) for c in in_clusters if "clusters" in str(c)] == [
        "wing-clusters GCN 64 bfloat16"
    ]
    between = [cell for cell in cells.plan(["wing"], ["GCN"], [256, 128]) if cell.width == 128]
    assert [str(cell) for cell in between] == ["wing GCN 128 float32"]
    (cell,) = cells.plan(["wing"], ["GCN"], [64])[:1]
    running.measure([cell], time.monotonic() - 1, 3, 60)
    assert record.lines("left") == [[], [], ["wing GCN 64 float32"]]


def with_answers(record: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], Any]:
    """The messages so far, and a stand-in that answers at once, without a process."""

    class Answering:
        def ask(self, method: str, arguments: tuple[Any, ...], _: float) -> Any:
            return {"machine": "this"} if method == "facts" else [arguments[0].to_json()]

    apart = measure("apart")
    monkeypatch.setattr(apart, "Apart", lambda _: Answering())
    monkeypatch.setattr(apart.Running, "end", lambda _: None)
    told: list[str] = []
    return told, apart.Running(CPU, record, told.append)


def test_cells_that_may_hang_come_last() -> None:
    cells = measure("cells")
    graphs, layers = ["tolokers", "wing"], ["GCN", "GAT", "Transformer"]
    planned = cells.plan(graphs, layers, [256, 64], measure("rivals").OTHERS)
    beside = [cell.beside for cell in planned]
    assert beside[-6:] == ["compile"] * 4 + ["flex_attention"] * 2
    assert set(beside[:-6]) == {"upstream", "turbo-gnn"}
    assert {cell.layer for cell in planned if cell.beside == "turbo-gnn"} == {"GCN", "Transformer"}
    assert {cell.beside for cell in cells.plan(graphs, layers, [256, 64])} == {"upstream"}


@pytest.mark.usefixtures("forking_interpreter")
def test_a_gpu_can_be_demanded() -> None:
    if native.why_cuda_unavailable() is None:
        pytest.skip("there is one")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--gpu"]
    command += ["tests/cuda/test_operators.py", "-k", "test_bits and spmm-sum"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 1 and "1 error" in process.stdout, process.stdout


Computed = Callable[..., dict[str, dict[str, Any]]]


class Watched(CpuBackend):
    """Remembers in which calls of its kernels the setting ``measure`` was in force."""

    def __init__(self) -> None:
        self.measured: list[bool] = []

    def kernel(self, *arguments: Any) -> Any:
        kernel = super().kernel(*arguments)
        if kernel is None:
            return None

        def watched(*inputs: Any, **options: Any) -> Any:
            self.measured.append(settings.current().measure)
            return kernel(*inputs, **options)

        return watched


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> CpuBackend:
    """A backend that watches, or of the kind that a test asks for."""
    return getattr(request, "param", Watched)()  # type: ignore[no-any-return]


@pytest.fixture
def computed(backend: CpuBackend, monkeypatch: pytest.MonkeyPatch) -> Iterator[Computed]:
    """The rows of a cell by their column, of a graph that is generated, timed once on the CPU."""
    cells = measure("cells")
    counted = measure("routing").Counted(backend)
    monkeypatch.setattr(REGISTRY, "_backends", None)  # to be asked for once more
    with counted.enabled(1 << 30):
        bench = cells.Bench(CPU, counted)

        def rows(
            layer: str,
            dtype: torch.dtype = torch.float32,
            width: int = 8,
            graph: str = "kronecker-11",
            beside: str = "upstream",
        ) -> Any:
            found = bench.rows(cells.Cell(graph, layer, width, dtype, beside), 0)
            return {row["rival"]: row for row in found}

        yield rows
    plugin_manager().unregister(counted)


LAYERS = ("GCN", "SAGE-max", "SAGE-mean", "GATv2", "GAT", "Transformer")
PROGRAMS = ("ResGated", "GINE", "CG", "GEN-max", "EdgeConv", "PointNet")


@pytest.mark.parametrize("layer", PROGRAMS)
def test_edge_programs_agree(computed: Computed, layer: str) -> None:
    found = computed(layer)
    assert list(found) == ["upstream", "ours"]
    assert all("failed" not in row for row in found.values()), found
    report = measure("gpu_report")
    results = {"bandwidth": {}, "cache_bytes": 0, "cells": list(found.values())}
    assert report.pairs(results["cells"])
    assert all(layer in " ".join(report._cells(row, results)) for row in found.values())


def test_edge_programs_are_planned_behind_other_layers_of_their_width() -> None:
    cells = measure("cells")
    planned = cells.plan(["wing", "like-ogbn-products"], ["GINE", "GCN"], [256, 64, 128])
    assert [str(cell) for cell in planned] == [
        "wing GCN 256 float32",
        "like-ogbn-products GCN 256 float32",
        "wing GINE 256 float32",
        "wing GCN 256 bfloat16",
        "wing GCN 64 float32",
        "wing GINE 64 float32",
        "wing GCN 128 float32",
        "wing GCN 64 bfloat16",
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_columns_agree(computed: Computed, layer: str, dtype: torch.dtype) -> None:
    for name, found in computed(layer, dtype).items():
        assert "failed" not in found, found
        assert (found["errors"]["allowed"] is None) == (name == "upstream")


def test_a_graph_that_is_not_there_fails_alone(computed: Computed) -> None:
    assert "ValueError" in computed("GCN", graph="unknown")["all"]["failed"]


@pytest.mark.parametrize("fault", ["output", "gradient", "not a number"])
def test_what_computes_something_else_is_no_rival(
    computed: Computed, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    cells, rivals = measure("cells"), measure("rivals")

    def make(upstream: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        if fault == "output":
            return lambda x: 1.001 * upstream(x)
        if fault == "gradient":
            return lambda x: upstream(0.999 * x + 0.001 * x.detach())
        return lambda x: upstream(x).index_fill(0, torch.tensor([3]), math.nan)

    def with_impostor(*arguments: Any) -> Any:
        upstream, *others = rivals.rivals(*arguments)
        impostor = rivals.Rival("impostor", lambda: make(upstream.make()))
        return [upstream, *others, impostor]

    monkeypatch.setattr(cells, "rivals", with_impostor)
    rows = computed("SAGE-mean")
    assert "ColumnError: differs from upstream" in rows["impostor"]["failed"]
    assert "forward" not in rows["impostor"] and "failed" not in rows["ours"]
    report = measure("gpu_report")
    results = {"cells": list(rows.values()), "bandwidth": {}, "cache_bytes": 0}
    (floor,) = (f for f in report.floors(results) if f.what.startswith("error of any column"))
    assert floor.met is False and "impostor" in floor.measured
    assert all(row["rival"] != "impostor" for row, _ in report.pairs(rows.values()))


@pytest.mark.parametrize("wrong", [3.0, math.nan])
def test_a_wrong_upstream_allows_no_errors(wrong: float) -> None:
    agreement = measure("agreement")
    values = torch.ones(4, 2)
    reference = agreement.Reference("upstream", values, values, values)
    own = reference.errors("upstream", wrong * values, values)
    ours = reference.errors("ours", 2 * values, values)
    with pytest.raises(measure("routing").ColumnError, match=r"2\.0e-04 is allowed"):
        agreement.require(ours)
    if math.isnan(wrong):
        with pytest.raises(measure("routing").ColumnError):
            agreement.require(own)


def test_where_upstream_runs_out_of_memory_columns_are_compared_with_ours(
    computed: Computed, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells, rivals = measure("cells"), measure("rivals")

    def exhausted() -> Any:
        raise torch.OutOfMemoryError("too large")

    def without_upstream(*arguments: Any) -> Any:
        return [rivals.Rival("upstream", exhausted), *rivals.rivals(*arguments)[1:]]

    monkeypatch.setattr(cells, "rivals", without_upstream)
    rows = computed("GCN")
    assert "OutOfMemoryError" in rows["upstream"]["failed"]
    assert rows["torch.sparse"]["errors"]["of"] == "ours" and "forward" in rows["torch.sparse"]


def test_upstreams_own_error_in_a_short_dtype_is_allowed_to_others() -> None:
    agreement = measure("agreement")
    ones = torch.ones(4, 2)
    short = agreement.Reference("upstream", ones, ones, ones.bfloat16())
    short.errors("upstream", 1.1 * ones, ones)
    agreement.require(short.errors("ours", 1.19 * ones, ones))
    with pytest.raises(measure("routing").ColumnError, match=r"upstream by 2\.1e-01 in the output"):
        agreement.require(short.errors("ours", 1.21 * ones, ones))


def test_no_two_features_tie() -> None:
    cells = measure("cells")
    graph = SimpleNamespace(num_nodes=2_500_001)
    inputs = cells.Bench(CPU, None)._inputs(graph, cells.Cell("", "SAGE-max", 2, torch.float32))
    for x in inputs:
        assert all(x[:, i].unique().numel() == graph.num_nodes for i in range(2))
        assert x.abs().min() > 0 and x.abs().max() < 1


def test_one_column_measures_which_product_is_faster(computed: Computed, backend: Watched) -> None:
    rows = computed("SAGE-mean")
    assert "failed" not in rows["ours-measured"] and set(backend.measured) == {True, False}
    backend.measured.clear()
    assert "ours-measured" not in computed("SAGE-max") and set(backend.measured) == {False}
    assert set(computed("SAGE-mean", width=128)) == {"upstream", "ours"}


class Rival:
    """A kernel that may make any call of another one."""

    def __init__(self, kernel: Callable[..., Any]) -> None:
        self._kernel = kernel

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._kernel(*arguments, **keywords)

    def fits(self, *arguments: Any, **keywords: Any) -> bool:
        return True

    def forget(self, graph: Any, x: Tensor, transpose: bool) -> None:
        pass


class Competing(CpuBackend):
    """Kernels that compete with themselves, by a clock that finds the second one twice as fast."""

    def kernel(self, operator: str, *arguments: Any) -> Any:
        kernel = super().kernel(operator, *arguments)
        fastest = {"spmm": FastestSpmm, "attention": FastestAttention}.get(operator)
        if kernel is None or fastest is None:
            return kernel
        clock = itertools.cycle([0.002, 0.001])

        def seconds(call: Callable[[], Any]) -> float:
            call()
            return next(clock)

        return fastest(kernel, {"tiles": Rival(kernel)}, seconds, lambda _: "cpu").__call__


@pytest.mark.parametrize("backend", [Competing], indirect=True)
@pytest.mark.parametrize(
    ("layer", "dtype", "calls"),
    [
        ("SAGE-mean", torch.float32, ["mean False", "mean_adjoint True"]),
        ("GCN", torch.bfloat16, ["sum False", "sum True"]),
        ("Transformer", torch.bfloat16, ["False False"]),
    ],
)
def test_kernels_that_compete_are_in_the_row(
    computed: Computed, layer: str, dtype: torch.dtype, calls: list[str]
) -> None:
    rows = computed(layer, dtype, width=16)
    assert "kernels" not in rows["ours"]
    kernels = rows["ours-measured"]["kernels"]
    assert len(kernels) == len(calls) and all(map(str.endswith, kernels, calls))
    assert all(found == {"rows": 2.0, "tiles": 1.0} for found in kernels.values())
    results = {"cells": list(rows.values()), "bandwidth": {}, "cache_bytes": 0, "machine": {}}
    page = measure("gpu_report").markdown({**results, "commands": [], "stages": [], "left": []})
    assert page.count("| tiles 1.000, rows 2.000 |") == len(calls)


def test_memory_of_a_pass_is_its_peak_above_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    device = measure("device")
    memory = SimpleNamespace(now=1000, peak=5000)

    def allocate(num_bytes: int) -> None:
        memory.now += num_bytes
        memory.peak = max(memory.peak, memory.now)

    monkeypatch.setattr(device, "_is_gpu", lambda _: True)
    for name, call in {
        "synchronize": lambda _: None,
        "memory_allocated": lambda _: memory.now,
        "max_memory_allocated": lambda _: memory.peak,
        "reset_peak_memory_stats": lambda _: setattr(memory, "peak", memory.now),
    }.items():
        monkeypatch.setattr(torch.cuda, name, call)

    def forward() -> Tensor:
        allocate(300)
        allocate(-100)  # 200 are kept for the backward pass
        return torch.ones(1)

    def backward(out: Tensor) -> None:
        allocate(40)
        allocate(-240)

    assert device.peak_bytes(forward, backward, CPU) == {"forward": 300, "backward": 240}


@pytest.fixture
def with_turbo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).with_name("turbo_gnn")))
    monkeypatch.delitem(sys.modules, "turbo_gnn", raising=False)
    rivals = measure("rivals")
    for name in ("_adjacencies", "_csrs"):
        monkeypatch.setattr(rivals, name, {})


@pytest.mark.usefixtures("with_turbo")
@pytest.mark.parametrize("layer", [layer for layer in LAYERS if layer != "GAT"])
def test_turbo_gnn_is_given_what_layers_compute(computed: Computed, layer: str) -> None:
    row = computed(layer, beside="turbo-gnn")["turbo-gnn"]
    assert "failed" not in row, row
    assert row["errors"]["allowed"] is not None and row["forward"]["samples"] > 0


@pytest.mark.usefixtures("with_turbo")
@pytest.mark.parametrize("layer", ["GCN", "GATv2"])
def test_without_the_self_loops_of_a_layer_turbo_gnn_is_refused(
    computed: Computed, monkeypatch: pytest.MonkeyPatch, layer: str
) -> None:
    monkeypatch.setattr(measure("rivals"), "_with_self_loops", lambda graph: graph)
    assert "ColumnError" in computed(layer, beside="turbo-gnn")["turbo-gnn"]["failed"]


def test_a_block_mask_holds_the_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    rivals = measure("rivals")
    # The unfused one computes the same, and on a CPU.
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    index = random_edges(300, 300, 2000).unique(dim=1)  # blocks of 128, the last not full
    graph = measure("graphs").GraphData("random", index, 300)
    x = torch.randn(300, 64)
    upstream, *_ = rivals.rivals("Transformer", graph, 64, torch.float32)
    torch.testing.assert_close(rivals._flex(graph)(x), upstream.make()(x))
    mask = rivals._block_mask(graph)
    assert mask.kv_num_blocks.tolist() == [[[3, 3, 3]]]
    path = torch.stack([torch.arange(299), torch.arange(1, 300)])
    mask = rivals._block_mask(measure("graphs").GraphData("path", path, 300))
    assert mask.kv_num_blocks.tolist() == [[[1, 2, 2]]]
    assert sorted(mask.kv_indices[0, 0, 2, :2].tolist()) == [1, 2]


def test_a_mask_is_measured_where_the_plan_says() -> None:
    cells, rivals = measure("cells"), measure("rivals")
    largest = {"tolokers": 11_758, "wing": 62_032}
    assert set(cells._COMPILED["flex_attention"]) == set(largest)
    # The bytes of a mask have to be addressed by 32 bits.
    assert max(largest.values()) <= rivals._MAX_FLEX_NODES
    assert rivals._MAX_FLEX_NODES**2 // 8 <= 2**31
