"""Starting python, plainly or under fastgraph, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def python(*words: str, cwd: Path, **variables: Any) -> subprocess.CompletedProcess[str]:
    """``python words...`` with the package importable; ``stdin`` is what it can read there."""
    return _start([sys.executable, *words], cwd, variables)


def fastgraph(*words: str, cwd: Path, **variables: Any) -> subprocess.CompletedProcess[str]:
    """``python -m fastgraph words...``, fully enabled."""
    return _start([sys.executable, "-m", "fastgraph", *words], cwd, variables)


def assert_same(cwd: Path, *words: str, **variables: Any) -> subprocess.CompletedProcess[str]:
    """Run both, compare all that a user sees, and return plain python's result."""
    plain = python(*words, cwd=cwd, **variables)
    ours = fastgraph(*words, cwd=cwd, **{"FASTGRAPH": "0", **variables})
    assert ours.stdout == plain.stdout
    assert ours.stderr == plain.stderr
    assert ours.returncode == plain.returncode
    return plain


def environment(**variables: str) -> dict[str, str]:
    """Our own environment without settings, with ``variables`` and the package importable.

    Graphs of tests are small, and are routed nevertheless.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("FASTGRAPH", "PYTHON"))}
    paths = [p for p in (variables.pop("PYTHONPATH", ""), str(ROOT)) if p]
    given = {"FASTGRAPH_MIN_EDGES": "0", "PYTHONPATH": os.pathsep.join(paths), **variables}
    return {**inherited, **given}


def _start(
    command: list[str], cwd: Path, variables: dict[str, Any]
) -> subprocess.CompletedProcess[str]:
    stdin: str | bytes = variables.pop("stdin", "")
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment(**variables),
        input=stdin.encode() if isinstance(stdin, str) else stdin,
        capture_output=True,
        timeout=120,
        check=False,
    )
    out, err = (text.decode(errors="backslashreplace") for text in (done.stdout, done.stderr))
    return subprocess.CompletedProcess(command, done.returncode, out, err)
