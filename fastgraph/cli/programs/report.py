"""Comparisons of programs as one self-contained page of HTML. Needs jinja2 and matplotlib."""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fastgraph.cli.programs.scripts import COMMANDS, ScriptComparison
from fastgraph.cli.programs.tables import costs, findings

_LAST_LINES = 5


def check_report(path: str | Path) -> None:
    """Find out at once whether a page can be written later.

    Raises:
        ImportError: jinja2 or matplotlib is missing; the message says how to install them.
        OSError: ``path`` is a directory, or cannot be written to.
    """
    for module in ("jinja2", "matplotlib"):
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise ImportError(
                f'the report needs {error.name}: pip install "fastgraph[compare]"'
            ) from error
    folder = Path(path).absolute().parent
    if Path(path).is_dir():
        raise IsADirectoryError(f"expected a file, got the directory {path}")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise OSError(f"expected a file in a writable directory, got {path}")


def write_report(path: str | Path, comparisons: Sequence[ScriptComparison]) -> None:
    """Write a page with the tables, plots and statuses of ``comparisons``.

    Raises:
        ImportError: see :func:`check_report`.
        OSError: see :func:`check_report`.
    """
    check_report(path)
    Path(path).write_text(render(comparisons), encoding="utf-8")


def render(comparisons: Sequence[ScriptComparison]) -> str:
    """The page; it asks for nothing from elsewhere."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("fastgraph.comparison"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template("report.html")
    return template.render(
        programs=[_program(found, f"p{i}") for i, found in enumerate(comparisons)],
        versions=[(name, _version(name)) for name in ("fastgraph", "torch", "torch-geometric")],
        python=platform.python_version(),
        machine=_machine(),
    )


def _program(found: ScriptComparison, name: str) -> dict[str, Any]:
    from markupsafe import Markup

    from fastgraph.cli.programs import plots

    plain, fast = found.step_seconds("plain"), found.step_seconds("fastgraph")
    drawn = [plots.step_time_plot, plots.memory_plot, plots.loss_plot]
    has_steps = any(run.steps for run in found.runs)
    sides = [
        {
            **costs(found, side)._asdict(),
            "lines": "\n".join(found.of(side)[0].last_lines(_LAST_LINES)),
        }
        for side in COMMANDS
    ]
    return {
        "id": name,
        "title": found.title,
        "sides": sides,
        "speed_up": f"{plain / fast:.2f}x" if plain and fast else "",
        "findings": findings(found),
        # matplotlib escapes what it draws.
        "plots": [Markup(draw(found, name)) for draw in drawn] if has_steps else [],
        "status": found.status,
    }


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def _machine() -> str:
    from fastgraph.machine.processor import cpu_model

    return f"{cpu_model()}, {os.cpu_count()} processors"
