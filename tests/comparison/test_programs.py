"""Programs do under ``compare`` what they do without it, in whatever way they train."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fastgraph.cli.programs.scripts import Plan, Run, Side, run_once
from fastgraph.cli.runner import Target
from tests.cli.commands import python

pytest.importorskip("torch_geometric")

PROGRAMS = Path(__file__).parent / "programs"


def observed(program: Path, side: Side) -> Run:
    return run_once(Plan(Target("script", str(program), [])), side, 0, lambda text: None)


@pytest.mark.parametrize("name", ["training", "compiled"])
def test_programs_do_what_they_do_unobserved(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    program = PROGRAMS / f"{name}.py"
    with ThreadPoolExecutor(3) as pool:
        unobserved = pool.submit(python, str(program), cwd=tmp_path, OMP_NUM_THREADS="1")
        runs = [pool.submit(observed, program, side) for side in ("plain", "fastgraph")]
        plain, fast = (run.result() for run in runs)
    expected = unobserved.result()
    assert expected.returncode == 0, expected.stderr
    assert (plain.exit_code, fast.exit_code) == (0, 0), plain.output + fast.output
    assert without_log(plain.output) == without_log(expected.stdout)
    steps = int(re.search(r"^steps (\d+)$", expected.stdout, re.MULTILINE)[1])  # type: ignore[index]
    assert len(plain.steps) == len(fast.steps) == steps
    assert fast.losses == pytest.approx(plain.losses, rel=1e-4)


def without_log(output: str) -> str:
    """Without what torch logs, which is of no stable order."""
    return re.sub(r"^[A-Z]\d{4} .*\n", "", output, flags=re.MULTILINE)
