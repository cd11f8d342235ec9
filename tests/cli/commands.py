"""Starting python, plainly or under fastgraph, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def python(*words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """``python words...`` with the package importable."""
    return _start([sys.executable, *words], cwd, variables)


def fastgraph(*words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """``python -m fastgraph words...``, fully enabled."""
    return _start([sys.executable, "-m", "fastgraph", *words], cwd, variables)


def environment(**variables: str) -> dict[str, str]:
    """Our own environment without settings, with ``variables`` and the package importable."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("FASTGRAPH", "PYTHON"))}
    paths = [p for p in (variables.pop("PYTHONPATH", ""), str(ROOT)) if p]
    return {**inherited, "PYTHONPATH": os.pathsep.join(paths), **variables}


def _start(
    command: list[str], cwd: Path, variables: dict[str, str], **options: Any
) -> subprocess.CompletedProcess[str]:
    stdin = variables.pop("stdin", "")
    return subprocess.run(
        command,
        cwd=cwd,
        env=environment(**variables),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )
