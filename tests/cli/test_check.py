"""``python -m fastgraph check``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fastgraph.verification.checking import operators
from tests.forks import fastgraph


def test_the_table(tmp_path: Path) -> None:
    shown = fastgraph("check", "--device", "cpu", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "cpu on cpu" in shown.stdout
    for operator in operators():
        (line,) = [row for row in shown.stdout.splitlines() if f" {operator} " in row]
        assert "FAILED" not in line


def test_json(tmp_path: Path) -> None:
    words = ("check", "--device", "cpu", "--backend", "reference", "--json")
    shown = fastgraph(*words, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    found = json.loads(shown.stdout)
    assert {finding["operator"] for finding in found} == set(operators())
    assert {finding["failure"] for finding in found} == {None}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--backend", "cdua"), "--backend must be one of"),
        (("--device", "gpu"), "--device: Expected one of"),
        (("--device", "meta"), "no backend has kernels for meta"),
    ],
)
def test_wrong_arguments(tmp_path: Path, words: tuple[str, ...], text: str) -> None:
    shown = fastgraph("check", *words, cwd=tmp_path)
    assert shown.returncode == 2
    assert text in shown.stderr
