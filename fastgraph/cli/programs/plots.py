"""Plots of a comparison of a program as SVG. Needs matplotlib."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fastgraph.cli.programs.scripts import COMMANDS, Run, ScriptComparison, Side

_STYLES: dict[Side, tuple[str, str]] = {
    "plain": ("#8c8c8c", "-"),
    "fastgraph": ("#1f77b4", "--"),
}

# Left out of the file, so that equal comparisons give equal pages.
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


def step_time_plot(found: ScriptComparison, salt: str) -> str:
    """Milliseconds from step to step over the steps.

    Args:
        found: what to plot.
        salt: distinguishes the element names of this plot from those of others on the page.
    """

    def seconds(run: Run) -> list[float]:
        times = [step.time for step in run.steps]
        return [1e3 * (b - a) for a, b in itertools.pairwise(times)]

    return _plot(found, seconds, "time per step (ms)", salt, first=2)


def memory_plot(found: ScriptComparison, salt: str) -> str:
    """The most MiB in memory in each step; arguments as for :func:`step_time_plot`."""

    def mebibytes(run: Run) -> list[float]:
        return [step.peak / 2**20 for step in run.steps]

    return _plot(found, mebibytes, "peak memory (MiB)", salt)


def loss_plot(found: ScriptComparison, salt: str) -> str:
    """Both loss curves; arguments as for :func:`step_time_plot`."""
    return _plot(found, lambda run: run.losses, "loss", salt, from_zero=False)


def _plot(
    found: ScriptComparison,
    values: Callable[[Run], Sequence[float]],
    label: str,
    salt: str,
    *,
    first: int = 1,
    from_zero: bool = True,
) -> str:
    figure = Figure(figsize=(4.6, 3.0), layout="constrained")
    axes: Axes = figure.add_subplot()
    for side, (color, line) in _STYLES.items():
        for position, run in enumerate(found.of(side)):
            heights = values(run)
            axes.plot(
                range(first, first + len(heights)),
                heights,
                line,
                color=color,
                label=COMMANDS[side] if position == 0 else None,
                marker="o" if len(heights) < 30 else None,
                markersize=3,
            )
    if from_zero:
        axes.set_ylim(0, 1.15 * axes.get_ylim()[1])
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return _svg(figure, label, salt)


def _svg(figure: Figure, label: str, salt: str) -> str:
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": f"{salt} {label}", "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata=_NO_METADATA)
    text = buffer.getvalue()
    # What comes before is the prologue of a file of its own.
    return text[text.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
