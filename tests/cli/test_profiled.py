"""``python -m fastgraph --profile`` and ``-v``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from fastgraph.cli.main import cli
from tests import forks

SCRIPT = """\
import sys
import torch
from torch_geometric.nn import GATConv, GCNConv

x, edges = torch.randn(20, 8), torch.randint(20, (2, 90))
conv = GCNConv(8, 8)
for _ in range(3):
    conv(x, edges).sum().backward()
GATConv(8, 8, flow="target_to_source", add_self_loops=False)(x, edges)
print(sys.argv[1:])
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_tables_are_shown_at_the_end(script: Path) -> None:
    words = ("--profile", "--profile-html", "p.html", "--profile-trace=t.json", "train.py", "-v")
    done = forks.fastgraph(*words, cwd=script.parent)
    assert (done.returncode, done.stdout) == (0, "['-v']\n")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stderr.splitlines()]
    layers = {row[0]: row[1:4] for row in rows if len(row) == 9}
    assert layers == {
        "GCNConv": ["train.py:8", "operator", "3"],
        "GATConv": ["train.py:9", "flow target_to_source", "1"],
    }
    parts = {row[0]: float(row[1]) for row in rows if len(row) == 3}
    total = parts.pop("total")
    assert sum(parts.values()) == pytest.approx(total, abs=0.01)
    events = json.loads((script.parent / "t.json").read_text())["traceEvents"]
    assert [e["name"] for e in events if e["cat"] == "forward"] == ["GCNConv"] * 3 + ["GATConv"]
    assert "GCNConv" in (script.parent / "p.html").read_text()
    assert f"Wrote {script.parent / 'p.html'}" in done.stderr


def test_a_file_alone_prints_no_table(script: Path) -> None:
    done = forks.fastgraph("--profile-trace", "t.json", "train.py", cwd=script.parent)
    assert "profile" not in done.stderr.replace("Wrote", "")
    assert json.loads((script.parent / "t.json").read_text())["traceEvents"]


def test_a_program_that_fails_is_profiled_and_fails(script: Path) -> None:
    script.write_text(SCRIPT + "raise SystemExit(3)\n")
    done = forks.fastgraph("--profile", "train.py", cwd=script.parent)
    assert done.returncode == 3
    assert "fastgraph profile: time" in done.stderr


@pytest.mark.parametrize("option", ["--profile-html", "--profile-trace"])
def test_a_file_that_cannot_be_written_is_said_before_the_program_runs(
    option: str, script: Path
) -> None:
    done = CliRunner().invoke(cli, ["run", option, "missing/out", str(script)])
    assert done.exit_code == 2
    assert f"{option}: expected a file in a writable directory, got missing/out" in done.output


def test_decisions_are_said_once(script: Path) -> None:
    done = forks.fastgraph("-v", "train.py", cwd=script.parent)
    assert done.stderr.splitlines() == [
        "fastgraph: GCNConv runs by an operator",
        "fastgraph: GATConv runs upstream's own code: flow target_to_source",
    ]
    assert forks.fastgraph("train.py", cwd=script.parent, FASTGRAPH_VERBOSE="1").stderr == (
        done.stderr
    )


def test_without_fastgraph_there_is_no_profile(script: Path) -> None:
    done = forks.fastgraph("-v", "--profile", "train.py", cwd=script.parent, FASTGRAPH="0")
    assert done.stderr == "fastgraph was not enabled: FASTGRAPH=0\n"
