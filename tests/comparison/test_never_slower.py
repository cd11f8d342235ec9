"""``benchmarks/never_slower.py``: how often it samples, what it keeps, and what its report says."""

from __future__ import annotations

import contextlib
import itertools
import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from fastgraph.pyg.framework import PyG
from tests.cuda.benchmarks import FOLDER, measure


class Clock:
    """Processor time that passes only where a side says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.turns = measure("turns")
        self.now = 0.0
        monkeypatch.setattr(self.turns.time, "process_time", lambda: self.now)

    def side(self, *seconds: float) -> Any:
        """One whose steps take so long, the last of them from then on."""
        taken: Iterator[float] = iter(seconds)
        last = seconds[-1]

        def step() -> None:
            self.now += next(taken, last)

        return self.turns.Side(step)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.mark.parametrize(
    ("ratio", "rounds"), [(4.0, 1), (2.0, 2), (1.3, 3), (1.1, 4), (0.9, 8), (0.5, 3)]
)
def test_rounds_are_few_where_all_say_the_same(clock: Clock, ratio: float, rounds: int) -> None:
    plain, ours = clock.side(ratio), clock.side(1.0)
    found = clock.turns.measure(plain, ours, clock.turns.Effort(rounds=4))
    assert found.ratio == pytest.approx(ratio)
    assert (found.rounds, found.again) == (rounds, ratio < 0.95)
    assert len(plain.turns) == len(ours.turns) == rounds


def test_steps_that_were_disturbed_do_not_count(clock: Clock) -> None:
    # One step that is long warms up, two that are disturbed follow.
    plain, ours = clock.side(1.1), clock.side(1.0, 9.0, 9.0, 1.0)
    found = clock.turns.measure(plain, ours, clock.turns.Effort(rounds=4))
    assert found.ratio == pytest.approx(1.1) and found.rounds == 4 and not found.again


def test_a_loss_is_measured_again_and_only_that_counts(clock: Clock) -> None:
    # One step warms up; the four rounds after it look bad, those of the second time do not.
    plain, ours = clock.side(1.0), clock.side(*5 * [1.2], 1.0)
    found = clock.turns.measure(plain, ours, clock.turns.Effort(rounds=4))
    assert (found.rounds, found.again) == (8, True) and found.ratio == pytest.approx(1.0)


def test_the_lower_quartile_is_that_of_all_turns(clock: Clock) -> None:
    side = clock.side(1.0)
    side.turns = [[4.0, 3.0], [2.0, 5.0, 9.0, 1.0], [0.5]]
    assert side.seconds(2) == 2.0 and side.seconds(3) == 1.0


def test_several_sides_share_the_turns_of_one_until_each_is_settled(clock: Clock) -> None:
    plain, ahead, close = clock.side(4.0), clock.side(1.0), clock.side(3.9)
    found = clock.turns.measure_all(plain, [ahead, close], clock.turns.Effort(rounds=4))
    assert [(beside.rounds, beside.again) for beside in found] == [(1, False), (4, False)]
    assert len(plain.turns) == 4 and len(ahead.turns) == 1


def test_quick_steps_are_many_in_a_turn_and_what_comes_before_is_not_timed(clock: Clock) -> None:
    side = clock.side(0.5, 0.25)
    prepared = []

    def prepare() -> None:
        prepared.append(clock.now)
        clock.now += 100

    side.prepare = prepare
    assert side.turn(3, warm_up=True) == [0.25, 0.25, 0.25]
    assert len(prepared) == 4


def test_every_class_with_a_route_is_measured() -> None:
    classes = measure("pyg_classes")
    measured = {name.split()[0] for name in classes.LAYERS}
    assert measured | classes.ELSEWHERE == set(PyG().routed_layers())


def test_so_is_every_configuration_whose_message_is_traced() -> None:
    classes = measure("pyg_classes")
    names = classes.names()
    assert len(set(names)) == len(names) and "MeshCNNConv" not in names
    assert {"CGConv, edges", "GINEConv", "PNAConv", "HGTConv", "RGCNConv"} <= set(names)
    data = measure("shapes").at_random("some", 12, 40)
    for name in ("HGTConv", "RGCNConv", "CGConv, edges", "GCNConv weighted"):
        case = classes.Case(name, data, 8)
        first = case.forward(case.x, case.fresh())
        assert torch.equal(case.forward(case.x, case.fresh()), first)
        halved = torch.zeros_like(case.x, requires_grad=True)
        out = case.forward(halved, case.fresh())
        assert not torch.equal(out, first) and torch.autograd.grad(out.sum(), halved)


def test_shapes_are_what_they_are_called() -> None:
    shapes = measure("shapes").SHAPES
    sizes = {name: shapes[name]().num_nodes for name in shapes if name != "tolokers"}
    assert sizes == {
        "tiny": 10,
        "cora-size": 2708,
        "molecules": 3200,
        "mesh": 10_000,
        "dense": 5000,
    }
    assert (shapes["mesh"]().edge_index[1].bincount() == 6).all()
    for name in sizes:
        graph = shapes[name]()
        edges = graph.edge_index
        assert edges.min() >= 0 and edges.max() < graph.num_nodes
        assert torch.equal(edges[0].bincount(), edges[1].bincount())
    molecules = shapes["molecules"]().edge_index
    assert torch.equal(molecules[0] // 25, molecules[1] // 25)
    assert (molecules[0] != molecules[1]).all()


class Summed:
    """A case whose every gradient is known."""

    def __init__(self) -> None:
        self.module = nn.Linear(2, 2, bias=False)
        self.x = torch.ones(3, 2)
        self.graphs = 0

    def fresh(self) -> int:
        self.graphs += 1
        return self.graphs

    def forward(self, x: torch.Tensor, graph: int) -> torch.Tensor:
        self.seen = x.requires_grad, torch.is_grad_enabled()
        out: torch.Tensor = self.module(x)
        return out


@pytest.mark.parametrize(
    ("mode", "seen", "leaves"),
    [
        ("all", (True, True), (True, True)),
        ("x", (True, True), (False, False)),
        ("parameters", (True, True), (False, False)),
        ("first", (False, True), (False, True)),
        ("inference", (False, False), (False, False)),
    ],
)
def test_modes_ask_for_what_they_are_called(
    mode: str, seen: tuple[bool, bool], leaves: tuple[bool, bool]
) -> None:
    case = Summed()
    steps = measure("modes").Steps(case, mode, is_fresh=False)
    steps.prepare()
    steps.step()
    assert case.seen == seen and case.graphs == 1
    assert (steps._x.grad is not None, case.module.weight.grad is not None) == leaves


def test_each_step_has_a_graph_of_its_own_where_they_are_fresh() -> None:
    case = Summed()
    steps = measure("modes").Steps(case, "all", is_fresh=True)
    for _ in range(3):
        steps.prepare()
        steps.step()
    assert case.graphs == 4
    assert not steps.is_empty


def test_upstream_meets_the_same_kind_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    case, modes, turns = Summed(), measure("modes"), measure("turns")
    made = []

    def compared(plain: Any, ours: Any, effort: Any) -> Any:
        before = case.graphs
        plain.prepare()
        middle = case.graphs
        ours.prepare()
        made.append((middle - before, case.graphs - middle))
        return turns.Beside(1.0, 1.0, 1)

    monkeypatch.setattr(modes, "measure", compared)
    found = modes.beside(case, "all", ["reused", "fresh"], None, contextlib.nullcontext)
    assert list(found) == ["reused", "fresh"]
    assert made == [(0, 0), (1, 1)]


def test_rows_come_back_and_losses_are_reported(tmp_path: Path) -> None:
    ratios, output = measure("ratios"), measure("output")
    cell = ratios.Cell("pyg", "tiny", "GCNConv", 8, "fresh", "x")
    lost = ratios.Row(cell, 100.0, 200.0, 16, True, False)
    won = ratios.Row(cell._replace(mode="all", graph="mesh"), 300.0, 100.0, 1, False, True)
    record = output.Record(tmp_path / "record.jsonl")
    for row in (lost, won):
        record.add("row", row.to_json())
    rows = [ratios.Row.from_json(line) for line in record.lines("row")]
    assert rows == [lost, won]
    facts = {"command": "never_slower", "machine": {"CPU": "some"}}
    table = ratios.Table(
        facts,
        ("tiny", "mesh"),
        rows,
        empty=[cell._replace(layer="LGConv", mode="first")],
        failed=[(cell._replace(channels=256), "no memory")],
        left=[cell._replace(layer="GATConv"), cell._replace(layer="GATConv", mode="all")],
    )
    text = table.write(record.stem).read_text()
    assert "2 cells, 1 of them below 0.95; 3 were not measured, and 1 would be" in text
    assert "| pyg GCNConv | **0.50** (8, fresh, x) | 3.00 |" in text
    assert (
        "| pyg GCNConv (not routed) | tiny | 8 channels, fresh, x | 100 | 200 | 0.50 | 16" in text
    )
    assert "| pyg, fresh, x | 0.50 |  |" in text and "| pyg, fresh, all |  | 3.00 |" in text
    assert "| tiny | 8 | not begun | 2 | pyg GATConv |" in text
    assert "| tiny | 256 | no memory | 1 | pyg GCNConv |" in text
    assert "| again, as it seemed below 0.95 | 1 |" in text
    assert len(json.loads(record.stem.with_suffix(".json").read_text())["left"]) == 2


def test_what_the_newest_result_has_below_is_lost(tmp_path: Path) -> None:
    ratios = measure("ratios")
    cell = ratios.Cell("pyg", "tiny", "GCNConv", 8, "fresh", "x")
    mended, worse = cell, cell._replace(mode="all")
    times = {"late": [(mended, 50.0), (worse, 120.0)], "early": [(mended, 200.0), (worse, 50.0)]}
    for name, date in (("late", "2026-02-01"), ("early", "2026-01-01")):
        rows = [ratios.Row(c, 100.0, ours, 4, False, True) for c, ours in times[name]]
        facts = {"command": "never_slower", "machine": {"date": f"{date} 00:00 UTC"}}
        ratios.Table(facts, ("tiny",), rows).write(tmp_path / f"2026-never-slower-{name}")
    known = ratios.Known.in_results(tmp_path)
    assert known.lost == {worse}
    assert known.ratios == {mended: 2.0, worse: 100.0 / 120.0}


def test_what_no_result_has_is_counted_as_left(tmp_path: Path) -> None:
    ratios = measure("ratios")
    cell = ratios.Cell("pyg", "tiny", "LGConv", 8, "fresh", "x")
    empty, failed = cell._replace(mode="parameters"), cell._replace(channels=1)
    left = [cell._replace(graph="mesh", mode=mode) for mode in ("x", "all")]
    facts = {"command": "never_slower", "machine": {"date": "2026-01-01 00:00 UTC"}}
    rows = [ratios.Row(cell, 100.0, 200.0, 4, False, True)]
    table = ratios.Table(facts, ("tiny",), rows, empty=[empty], failed=[(failed, "no memory")])
    table.write(tmp_path / "2026-never-slower")
    known = ratios.Known.in_results(tmp_path)
    assert known.others == {empty, failed}
    lines = known.totals([cell, empty, failed, *left])
    assert "| tiny | 1 | 1 | 2 | 0 |" in lines and "| mesh | 0 | 0 | 0 | 2 |" in lines


def test_layers_are_named_one_by_one_as_names_have_commas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restore_threads: None
) -> None:
    machine: Any = ModuleType("measure.machine")  # which needs packages of benchmarks
    machine.limit_memory = lambda: None
    machine.machine_facts = lambda threads: {"commit": "some"}
    monkeypatch.setitem(sys.modules, "measure.machine", machine)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # so that it is what it was afterwards
    main = runpy.run_path(str(FOLDER / "never_slower.py"))["main"]
    record = tmp_path / "record.jsonl"
    options = ["--graphs", "tiny", "--channels", "8,64", "--modes", "x", "--budget", "1e-9"]
    names = ["GENConv, max", "GCNConv"]
    chosen = [part for name in names for part in ("--layers", name)]
    runner = CliRunner()
    result = runner.invoke(main, [*options, *chosen, "--record", str(record)])
    assert result.exit_code == 0, result.output
    left = json.loads(record.with_suffix(".json").read_text())["left"]
    assert {(cell[2], cell[3]) for cell in left} == set(itertools.product(names, (8, 64)))
    result = runner.invoke(main, [*options, "--layers", "GCNConv,GATConv"])
    assert result.exit_code == 2 and "got 'GCNConv,GATConv'" in result.output
