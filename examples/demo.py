"""Runs the unmodified training scripts plain and under fastgraph and compares them.

Every run is a fresh process with the same seed::

    python examples/demo.py --dataset Planetoid:Cora --root data
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

EXAMPLES = Path(__file__).resolve().parent
# Enough to see the loss fall, few enough for the plain runs to end in a minute or two.
SCRIPTS = {"gcn.py": 12, "sage.py": 12}
STDERR_LINES = 20

_EPOCH = re.compile(r"Epoch: (\d+),")
_SUMMARY = re.compile(r"Median epoch time: (\S+)s, Final loss: (\S+), Test accuracy: (\S+)")


class RunError(Exception):
    """A child process ended with an error, or without the summary line."""


@dataclass(frozen=True)
class Result:
    """What one training run reported."""

    seconds: float
    peak_bytes: int
    loss: float
    accuracy: float
    report: str


def run_script(command: list[str], progress: Progress, description: str, epochs: int) -> Result:
    """Runs one training script and follows its epochs.

    Raises:
        RunError: it ended with another exit code than 0, or printed no summary; the message holds
            the command, the exit code and the end of its stderr.
    """
    task = progress.add_task(description, total=epochs)
    summary = None
    report: list[str] = []
    # stderr goes to a file: a pipe that is not read while stdout is could fill up and block.
    with tempfile.TemporaryFile("w+", errors="replace") as stderr:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, errors="replace"
        )
        assert process.stdout is not None
        try:
            with process.stdout:
                for line in process.stdout:
                    if found := _EPOCH.match(line):
                        progress.update(task, completed=int(found[1]))
                    elif found := _SUMMARY.match(line):
                        summary = found
                    else:
                        report.append(line)
            # wait4 gives the peak memory of this child alone.
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        finally:
            if process.returncode is None:
                process.kill()
                process.wait()
        stderr.seek(0)
        errors = "".join(deque(stderr, STDERR_LINES))
    if process.returncode != 0 or summary is None:
        ending = f"exit code {process.returncode}"
        if process.returncode == 0:
            ending += ", no line with the median epoch time"
        raise RunError(f"{' '.join(command)}\n{ending}; the end of its stderr:\n{errors}")
    unit = 1 if sys.platform == "darwin" else 1024
    seconds, loss, accuracy = map(float, summary.groups())
    # The report may be written to either stream.
    text = "".join(report) or errors
    return Result(seconds, usage.ru_maxrss * unit, loss, accuracy, text)


def comparison(results: dict[str, tuple[Result, Result]]) -> Table:
    """The table of (plain, fastgraph) results by script."""
    table = Table(
        title="Time per epoch, peak memory, final loss and test accuracy",
        box=box.SIMPLE,
        pad_edge=False,
    )
    for column in ("script", "run"):
        table.add_column(column, no_wrap=True)
    for column in ("epoch", "faster", "memory", "less", "loss", "acc."):
        table.add_column(column, justify="right", no_wrap=True)
    for script, (plain, fast) in results.items():
        for name, result in (("plain", plain), ("fastgraph", fast)):
            speed_up = f"{plain.seconds / max(result.seconds, 1e-9):.1f}x"
            ratio = f"{plain.peak_bytes / result.peak_bytes:.1f}x"
            table.add_row(
                script if result is plain else "",
                name,
                f"{result.seconds:.3f} s",
                "" if result is plain else speed_up,
                f"{result.peak_bytes / 2**30:.2f} GiB",
                "" if result is plain else ratio,
                f"{result.loss:.5f}",
                f"{result.accuracy:.4f}",
            )
        table.add_section()
    return table


def main() -> int:
    """Runs the demo and returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="PythonCode", metavar="CLASS[:NAME]")
    parser.add_argument("--root", type=Path, help="dataset directory (default: the user's cache)")
    chosen = ", ".join(f"{count} for {script}" for script, count in SCRIPTS.items())
    parser.add_argument("--epochs", type=int, help=f"epochs of every run (default: {chosen})")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.epochs is not None and arguments.epochs < 1:
        parser.error(f"--epochs: expected at least 1, got {arguments.epochs}")

    console = Console()
    options = ["--dataset", arguments.dataset]
    if arguments.root is not None:
        options += ["--root", str(arguments.root)]
    # Prepared first, so that no run pays for building the graph.
    prepare = [sys.executable, str(EXAMPLES / "data_loading.py"), *options]
    code = subprocess.run(prepare, check=False).returncode
    if code != 0:
        console.print(f"Loading the dataset failed with exit code {code}.", style="bold red")
        return 1

    results: dict[str, tuple[Result, Result]] = {}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    try:
        with Progress(*columns, console=console) as progress:
            for script, default_epochs in SCRIPTS.items():
                epochs = arguments.epochs or default_epochs
                call = [str(EXAMPLES / script), *options]
                call += ["--epochs", str(epochs), "--seed", str(arguments.seed)]
                fast_call = ["-m", "fastgraph", "--report", *call]
                plain = run_script([sys.executable, *call], progress, f"python {script}", epochs)
                fast = run_script(
                    [sys.executable, *fast_call], progress, f"python -m fastgraph {script}", epochs
                )
                results[script] = plain, fast
    except RunError as error:
        console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    for script, (_, fast) in results.items():
        if fast.report.strip():
            console.print(f"fastgraph's report on {script}:", style="bold")
            console.print(fast.report.rstrip(), markup=False, highlight=False)
    console.print(comparison(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
