"""The tables and sentences that report the comparison of a program in a terminal."""

from __future__ import annotations

from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fastgraph.cli.programs.scripts import COMMANDS, Run, ScriptComparison, Side, status_of
from fastgraph.cli.runner import HUGE_PAGES
from fastgraph.routing.status import NOT_COUNTED

_LAST_LINES = 3


def print_comparison(found: ScriptComparison, console: Console) -> None:
    """Print the table of both sides, what follows from it, the end of each output, the status."""
    console.print(Text(found.title, style="bold"))
    console.print(cost_table(found))
    for line in findings(found):
        console.print(Text(line), soft_wrap=True)
    for side, name in COMMANDS.items():
        console.print(Text(f"Last lines of {name}:", style="bold"))
        for line in found.of(side)[0].last_lines(_LAST_LINES):
            console.print(Text(f"  {line}"), soft_wrap=True)
    console.print(Text(str(status_of(found.status)).rstrip()), soft_wrap=True)


def print_failure(run: Run, console: Console) -> None:
    """Print a failed run's output and how it ended."""
    console.print(Text(run.output.rstrip()), soft_wrap=True)
    name = COMMANDS[run.side]
    message = f"The run under {name} ended with exit code {run.exit_code}; its output is above."
    console.print(Text(message, style="bold red"), soft_wrap=True)


def cost_table(found: ScriptComparison) -> Table:
    """Time, memory and final loss of both sides."""
    table = Table()
    table.add_column("run")
    memory = "peak GPU memory" if found.of("plain")[0].on_gpu else "peak memory"
    for heading in ("time per step", "steps", memory, "final loss", "whole run"):
        table.add_column(heading, justify="right")
    for side in COMMANDS:
        table.add_row(*costs(found, side))
    return table


class Costs(NamedTuple):
    """The times and memory of one side, as text."""

    command: str
    step: str
    steps: str
    peak: str
    loss: str
    seconds: str


def costs(found: ScriptComparison, side: Side) -> Costs:
    """Time, memory and final loss of one side."""
    run = found.of(side)[0]
    return Costs(
        command=COMMANDS[side],
        step=duration(found.step_seconds(side)),
        steps=str(len(run.steps)),
        peak=size(found.peak_bytes(side)),
        loss=f"{run.losses[-1]:.6f}" if run.losses else "not seen",
        seconds=f"{run.seconds:.1f} s",
    )


def findings(found: ScriptComparison) -> list[str]:
    """The conclusions from the numbers, in sentences."""
    lines = []
    plain, fast = found.step_seconds("plain"), found.step_seconds("fastgraph")
    if plain is not None and fast is not None:
        lines.append(f"Steps are {plain / fast:.2f} times as fast.")
    else:
        lines.append("No optimizer steps were seen, so there is no time per step.")
    share = found.peak_bytes("fastgraph") / found.peak_bytes("plain")
    lines.append(f"Peak memory is {100 * share:.0f} % of plain python's.")
    lines += _loss_findings(found)
    if found.of("fastgraph")[0].compiled:
        lines.append(f"In the status, {NOT_COUNTED}.")
    if found.huge_pages:
        lines.append(
            f"{COMMANDS['fastgraph']} also sets {HUGE_PAGES}=1; set it yourself to give it to both."
        )
    return lines


def _loss_findings(found: ScriptComparison) -> list[str]:
    first = [len(found.of(side)[0].steps) for side in COMMANDS]
    lines = []
    if first[0] != first[1]:
        lines.append(f"The runs took {first[0]} and {first[1]} steps.")
    if found.dropping:
        lines.append(
            f"Attention dropout is active in {', '.join(found.dropping)}: the random streams "
            "differ by design, so final losses over several seeds are compared, not steps."
        )
        for side, name in COMMANDS.items():
            spread = found.final_losses(side)
            if spread is not None:
                lines.append(
                    f"Final loss under {name}: {spread.mean:.6f} +/- {spread.deviation:.6f} "
                    f"(mean and standard deviation of {spread.seeds} seeds)."
                )
        return lines
    gap = found.loss_difference
    if gap is None:
        return [*lines, "No losses were seen."]
    lines.append(
        f"Losses differ by at most {gap.absolute:.3g} ({gap.relative:.2g} of the loss), at step "
        f"{gap.step} of {gap.steps}."
    )
    own = found.plain_difference
    if own is not None:
        lines.append(f"Two plain runs differ by at most {own.absolute:.3g} among themselves.")
    return lines


def duration(seconds: float | None) -> str:
    """A time with a fitting unit."""
    if seconds is None:
        return "not seen"
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


def size(num_bytes: int) -> str:
    """A number of bytes with a fitting unit."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"
