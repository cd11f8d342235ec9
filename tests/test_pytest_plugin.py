"""The pytest plugin, in test runs of its own."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests import forks
from tests.cli.commands import python

pytest.importorskip("torch_geometric")

TESTS = """\
import fastgraph, torch
from torch_geometric.nn import GCNConv

def run():
    GCNConv(3, 2)(torch.randn(4, 3), torch.tensor([[0, 1], [1, 2]]))

at_import = fastgraph.is_enabled()

def test_single(fastgraph_enabled):
    run()
    assert fastgraph.is_enabled()
    assert fastgraph_enabled.row("GCNConv").routed >= 1

def test_other():
    run()
    assert fastgraph.is_enabled() is at_import
"""


def pytest_run(
    cwd: Path, *words: str, run: Any = forks.python, **variables: str
) -> subprocess.CompletedProcess[str]:
    # Not from the entry point, which an older installation of this tree may lack.
    words = ("-m", "pytest", "-p", "fastgraph.pytest_plugin", *words)
    return run(*words, cwd=cwd, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", **variables)


def routed(text: str) -> int:
    line = next(line for line in text.splitlines() if "GCNConv" in line)
    return int(line.split("│")[2])


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "test_it.py").write_text(TESTS)
    return tmp_path


def test_entry_point_names_the_plugin() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"fastgraph": "fastgraph.pytest_plugin"}


def test_fixture(project: Path) -> None:
    done = pytest_run(project, FASTGRAPH_MIN_EDGES="100")
    assert done.returncode == 0, done.stdout
    assert routed(done.stdout) == 1


def test_option(project: Path) -> None:
    done = pytest_run(project, "--fastgraph", FASTGRAPH_MIN_EDGES="100")
    assert done.returncode == 0, done.stdout
    assert routed(done.stdout) == 2


def test_unusable_settings_are_a_usage_error(project: Path) -> None:
    done = pytest_run(project, "--fastgraph", FASTGRAPH_BACKEND="foo")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "ERROR: --fastgraph: " in done.stderr
    assert "'foo'" in done.stderr
    assert "INTERNALERROR" not in done.stdout + done.stderr


def test_kill_switch_is_said(project: Path) -> None:
    done = pytest_run(project, "--fastgraph", "-k", "other", FASTGRAPH="0")
    assert done.returncode == 0, done.stdout
    assert "fastgraph was not enabled: FASTGRAPH=0" in done.stdout


def test_runs_that_do_not_use_it_see_nothing_of_it(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import sys\ndef test_it(): assert 'torch' not in sys.modules\n"
    )
    done = pytest_run(tmp_path, run=python)
    assert done.returncode == 0, done.stdout
    assert "fastgraph" not in done.stdout.partition("collected")[2]
