"""Programs do under ``compare`` what they do without it, in whatever way they train."""

from __future__ import annotations

import pickle
import re
import sys
from pathlib import Path

import pytest

from fastgraph.cli.programs.scripts import Plan, Side, run_once
from fastgraph.cli.runner import Target
from tests import forks
from tests.cli.commands import environment
from tests.interpreter import interpreter

pytest.importorskip("torch_geometric")

PROGRAMS = Path(__file__).parent / "programs"


def observe(program: Path, result: Path, python: Path) -> None:
    """Run it on both sides, and leave the runs in a file."""
    sys.executable = str(python)
    plan = Plan(Target("script", str(program), []))
    sides: tuple[Side, ...] = ("plain", "fastgraph")
    result.write_bytes(pickle.dumps([run_once(plan, side, 0, lambda _: None) for side in sides]))


@pytest.mark.parametrize("name", ["training", "compiled"])
def test_programs_do_what_they_do_unobserved(name: str, tmp_path: Path) -> None:
    program, result, log = PROGRAMS / f"{name}.py", tmp_path / "runs", tmp_path / "log"
    expected = forks.python(str(program), cwd=tmp_path)
    assert expected.returncode == 0, expected.stderr
    given = environment()
    with interpreter(given) as python:
        arguments = (program, result, python)
        code = forks.call(observe, *arguments, folder=tmp_path, variables=given, out=log)
    assert code == 0, log.read_text()
    plain, fast = pickle.loads(result.read_bytes())
    assert (plain.exit_code, fast.exit_code) == (0, 0), plain.output + fast.output
    assert without_log(plain.output) == without_log(expected.stdout)
    steps = int(re.search(r"^steps (\d+)$", expected.stdout, re.MULTILINE)[1])  # type: ignore[index]
    assert len(plain.steps) == len(fast.steps) == steps
    assert fast.losses == pytest.approx(plain.losses, rel=1e-4)


def without_log(output: str) -> str:
    """Without what torch logs, which is of no stable order."""
    return re.sub(r"^[A-Z]\d{4} .*\n", "", output, flags=re.MULTILINE)
