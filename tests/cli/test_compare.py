"""``python -m fastgraph compare``: programs that nobody changed, run both ways."""

from __future__ import annotations

import json
import random
import re
import subprocess
from pathlib import Path

import numpy
import pytest
import torch

from fastgraph.cli.programs.scripts import Plan, run_once
from fastgraph.cli.runner import Target
from tests import interpreter
from tests.cli.commands import fastgraph, python

pytest.importorskip("torch_geometric")

TRAIN = """\
import random, sys
import numpy, torch
from torch_geometric.nn import GATConv, GCNConv

x = torch.randn(30, 4)
edge_index = torch.randint(0, 30, (2, 120))
model = GCNConv(4, 2) if sys.argv[1] == "gcn" else GATConv(4, 2, dropout=0.5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(6):
    optimizer.zero_grad()
    loss = model(x, edge_index).square().mean()
    loss.backward()
    optimizer.step()
print("drawn", random.random(), numpy.random.rand(), float(x[0, 0]))
print("final", float(loss.detach()), "__main__" == __name__)
"""


def compare(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Without fresh interpreters, in which the first test below runs a program."""
    return interpreter.python("-m", "fastgraph", "compare", *words, cwd=cwd)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def cells(text: str, row: str) -> list[str]:
    line = next(line for line in text.splitlines() if re.match(rf"[^\w]*{row}\s+[│┃]", line))
    return [cell.strip() for cell in re.split("[│┃]", line)[1:-1]]


def test_script_is_run_both_ways(project: Path) -> None:
    done = fastgraph("compare", "train.py", "gcn", cwd=project)
    assert done.returncode == 0, done.stdout + done.stderr
    plain, fast = cells(done.stdout, "python"), cells(done.stdout, "python -m fastgraph")
    assert plain[2] == fast[2] == "6"
    for row in (plain, fast):
        assert re.fullmatch(r"[\d.]+ m?s", row[1])
        assert 100 < int(re.fullmatch(r"(\d+) MiB", row[3])[1]) < 2000  # type: ignore[index]
    assert abs(float(plain[4]) - float(fast[4])) <= 1e-6
    assert "Losses differ by at most" in done.stdout
    assert "GCNConv" in done.stdout
    assert_drawn(done.stdout, 0)
    assert len(re.findall(r"final .* True", done.stdout)) == 2  # the program is __main__


def test_repeats_show_what_chance_does(project: Path) -> None:
    done = compare("--repeats", "2", "train.py", "gcn", cwd=project)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Two plain runs differ by at most 0 among themselves" in done.stdout
    assert len(re.findall(r"final .* True", done.stdout)) == 2


def assert_drawn(output: str, seed: int) -> None:
    """Both runs had that seed for all three generators."""
    (drawn,) = set(re.findall(r"drawn (\S+) (\S+) (\S+)", output))
    numbers = torch.randn(30, 4, generator=torch.Generator().manual_seed(seed))
    expected = random.Random(seed).random(), numpy.random.RandomState(seed).rand(), numbers[0, 0]
    assert [float(number) for number in drawn] == [float(number) for number in expected]


def test_layers_that_fall_back_are_reported(project: Path) -> None:
    text = TRAIN.replace("GCNConv(4, 2)", "GCNConv(4, 2, aggr='median')")
    (project / "train.py").write_text(text)
    done = compare("--seed", "1", "-m", "train", "gcn", cwd=project)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "aggregation MedianAggregation" in done.stdout
    assert_drawn(done.stdout, 1)


def test_attention_dropout_compares_seeds(project: Path) -> None:
    done = compare("--seeds", "2", "train.py", "gat", cwd=project)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Attention dropout is active in GATConv" in done.stdout
    spreads = re.findall(r"Final loss under .*: ([\d.]+) \+/- ([\d.]+) .*2 seeds", done.stdout)
    assert len(spreads) == 2
    assert all(float(deviation) > 0 for _, deviation in spreads)
    assert "Losses differ" not in done.stdout


def test_seed_of_the_programs_own_is_shifted(project: Path) -> None:
    (project / "train.py").write_text(TRAIN.replace("x = ", "torch.manual_seed(3)\nx = ", 1))
    done = compare("--seeds", "2", "train.py", "gat", cwd=project)
    assert done.returncode == 0, done.stdout + done.stderr
    spreads = re.findall(r"Final loss under .*: ([\d.]+) \+/- ([\d.]+) .*2 seeds", done.stdout)
    assert all(float(deviation) > 0 for _, deviation in spreads)


def test_failing_program(tmp_path: Path) -> None:
    code = "print('before'); raise ValueError('the reason')"
    done = compare("-c", code, cwd=tmp_path)
    assert done.returncode == 1
    assert "before" in done.stdout
    assert "ValueError: the reason" in done.stdout
    assert "fastgraph/comparison" not in done.stdout
    assert "The run under python ended with exit code 1" in done.stdout
    code = "import os, sys; sys.exit(os.environ.get('FASTGRAPH') != '0' and 'only ours')"
    done = compare("-c", code, cwd=tmp_path)
    assert done.returncode == 1
    assert "only ours" in done.stdout
    assert "The run under python -m fastgraph ended with exit code 1" in done.stdout


def test_killed_program(tmp_path: Path) -> None:
    done = compare("-c", "import os; os.kill(os.getpid(), 9)", cwd=tmp_path)
    assert done.returncode == 1
    assert "exit code -9" in done.stdout


def test_program_without_steps(tmp_path: Path) -> None:
    done = compare("-c", "print('nothing')", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "No optimizer steps were seen" in done.stdout
    assert "No losses were seen" in done.stdout


def test_children_of_the_program_write_no_events(tmp_path: Path) -> None:
    (tmp_path / "forks.py").write_text(
        """\
import os, torch
weight = torch.ones(1, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(3):
    if os.fork() == 0:
        weight.sum().backward()
        optimizer.step()
        raise SystemExit
    os.wait()
    (2 * weight).sum().backward()
    optimizer.step()
"""
    )
    done = compare("forks.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert cells(done.stdout, "python")[2] == "3"


@pytest.mark.parametrize(
    ("words", "variables", "message"),
    [
        ((), {}, "Missing a script"),
        (("-",), {}, "cannot be run twice"),
        (("--repeats", "0", "a.py"), {}, "0 is not in the range"),
        (("--html", "missing/a.html", "-c", "1"), {}, "expected a file in a writable directory"),
        (("--html", ".", "-c", "1"), {}, "is a directory"),
        (("-c", "1"), {"FASTGRAPH": "0"}, "FASTGRAPH=0 switches fastgraph off"),
        (("-c", "1"), {"FASTGRAPH": "bad"}, "FASTGRAPH must be 1, 0 or compare, got 'bad'"),
        (("-c", "1"), {"FASTGRAPH_MIN_EDGES": "x"}, "MIN_EDGES must be an integer >= 0, got 'x'"),
    ],
)
def test_usage_errors(
    tmp_path: Path, words: tuple[str, ...], variables: dict[str, str], message: str
) -> None:
    done = fastgraph("compare", *words, cwd=tmp_path, **variables)
    assert message in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr
    assert done.returncode in (1, 2)


def test_report_without_its_packages(tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ModuleNotFoundError('x', name='matplotlib')")
    done = fastgraph(
        "compare", "--html", "a.html", "-c", "1", cwd=tmp_path, PYTHONPATH=str(tmp_path)
    )
    assert 'the report needs matplotlib: pip install "fastgraph[compare]"' in done.stderr
    assert done.returncode == 1


def test_memory_of_each_step(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        """\
import torch
weight = torch.ones(1, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
for large in (0, 1, 0, 0):
    torch.ones(large * 30_000_000)
    weight.sum().backward()
    optimizer.step()
"""
    )
    target = Target("script", str(tmp_path / "program.py"), [])
    run = run_once(Plan(target), "plain", 0, lambda text: None)
    before, during, after, last = (step.peak for step in run.steps)
    assert during - before > 100e6
    assert during - last > 100e6 or after == during  # where the count cannot be restarted
    assert run.peak_bytes >= during


def test_comparing_does_not_load_torch_before_the_program_does(tmp_path: Path) -> None:
    order = {
        "events": str(tmp_path / "events"),
        "seed": 0,
        "shift": 0,
        "target": {"kind": "code", "value": "import sys; print('torch' in sys.modules)"},
        "options": {"report": False, "backend": None, "strict": None, "min_edges": None},
    }
    order["target"]["arguments"] = []  # type: ignore[index]
    words = ("-m", "fastgraph.cli.programs.child", json.dumps(order))
    done = python(*words, cwd=tmp_path, FASTGRAPH="0")
    assert done.stdout == "False\n", done.stderr
