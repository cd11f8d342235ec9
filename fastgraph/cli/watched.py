"""Scripts that are watched in a process of their own, whose output goes to standard error."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click


def left_by(module: str, script: Path, arguments: Sequence[str], before: str) -> Any:
    """The object that a module pickles about a script: ``python -m module FILE SCRIPT [ARGS]...``.

    Args:
        module: runs the script and pickles what it saw into the file.
        script: a path.
        arguments: of the script.
        before: what has not happened where there is no file.

    Raises:
        click.ClickException: the script failed, or showed nothing.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "seen"
        command = [sys.executable, "-m", module, str(file), str(script), *arguments]
        done = subprocess.run(command, stdout=sys.stderr, check=False)
        if done.returncode or not file.exists():
            raise click.ClickException(f"{script} ended with {done.returncode} {before}")
        return pickle.loads(file.read_bytes())


def nothing_routed(script: Path) -> click.ClickException:
    """The error for a script in which no call of a fused operator was seen."""
    return click.ClickException(
        f"{script}: no layer of its models takes a route to a fused operator of a graph; "
        f"`{Path(sys.executable).name} -m fastgraph --report {script}` says why"
    )
