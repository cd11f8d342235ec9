"""``python -m fastgraph info`` in whole and in broken installations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastgraph.cli.info import Problem, attempt, kernel_level
from fastgraph.machine import native
from tests import forks
from tests.cli.commands import fastgraph


def info(cwd: Path, run: Any = forks.fastgraph, **variables: str) -> str:
    ours = run("info", cwd=cwd, **variables)
    assert ours.returncode == 0, ours.stderr
    assert "Traceback" not in ours.stderr
    return ours.stdout


def line(text: str, word: str) -> str:
    return next(row for row in text.splitlines() if f" {word} " in row)


def broken(tmp_path: Path, package: str, statement: str) -> str:
    (tmp_path / "fakes").mkdir(exist_ok=True)
    (tmp_path / "fakes" / f"{package}.py").write_text(statement + "\n")
    return str(tmp_path / "fakes")


def test_whole_installation(tmp_path: Path) -> None:
    pytest.importorskip("torch_geometric")
    text = info(tmp_path, FASTGRAPH_MIN_EDGES="12")
    for word in ("fastgraph", "python", "torch", "tvm_ffi", "numpy", "processor", "reference"):
        assert line(text, word)
    assert "12" in line(text, "min_edges")
    assert "GCNConv" in text
    assert "SAGEConv" in text


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("raise OSError('libtorch.so: not found')", "is broken: OSError: libtorch.so: not found"),
        ("raise SystemExit(3)", "is broken: SystemExit: 3"),
        ("class Odd(Exception): pass\nraise Odd('why')", "is broken: Odd: why"),
        ("raise ModuleNotFoundError('No', name='torch')", "not installed"),
    ],
)
def test_broken_torch(tmp_path: Path, statement: str, expected: str) -> None:
    text = info(tmp_path, fastgraph, PYTHONPATH=broken(tmp_path, "torch", statement))
    assert expected in line(text, "torch")
    assert "layers: unknown" in text
    assert "processor" in text
    assert "cache_bytes" in text


def test_torch_that_imports_but_is_empty(tmp_path: Path) -> None:
    text = info(tmp_path, fastgraph, PYTHONPATH=broken(tmp_path, "torch", ""))
    assert "AttributeError" in line(text, "kernels")
    assert "layers: unknown" in text


def test_missing_native_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_LIBRARY_DIR", tmp_path)
    found = attempt(kernel_level)
    assert isinstance(found, Problem)
    assert "compiled kernels are missing" in str(found)


def test_broken_pyg(tmp_path: Path) -> None:
    fakes = broken(tmp_path, "torch_geometric", "raise AttributeError('no such thing')")
    text = info(tmp_path, fastgraph, PYTHONPATH=fakes)
    assert "AttributeError: no such thing" in line(text, "torch_geometric")
    assert "layers: unknown" in text
    assert "reference" in text


@pytest.mark.parametrize(
    ("variable", "value"), [("FASTGRAPH_MIN_EDGES", "many"), ("FASTGRAPH_STRCT", "1")]
)
def test_invalid_variable(tmp_path: Path, variable: str, value: str) -> None:
    text = info(tmp_path, **{variable: value})
    assert "Not usable" in text
    assert variable in text


def test_command_line_does_not_import_torch(tmp_path: Path) -> None:
    fakes = broken(tmp_path, "torch", "raise SystemExit('imported')")
    assert fastgraph("--help", cwd=tmp_path, PYTHONPATH=fakes).returncode == 0
