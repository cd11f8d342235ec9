"""Compares the unmodified training scripts with themselves under fastgraph.

Every run is a fresh process with the same seed; a page with plots is written on request::

    python examples/demo.py --dataset Planetoid:Cora --root data --html demo.html
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fastgraph.cli.programs.report import check_report, write_report
from fastgraph.cli.programs.scripts import (
    Plan,
    RunError,
    ScriptComparison,
    compare_script,
    status_of,
)
from fastgraph.cli.programs.tables import findings, print_failure, size
from fastgraph.cli.runner import Target

EXAMPLES = Path(__file__).resolve().parent
# Enough to see the loss fall, few enough for all runs together to end in two or three minutes.
SCRIPTS = {"gcn.py": 6, "sage.py": 4, "gatv2.py": 3, "gat.py": 3, "transformer.py": 3}
DGL_SCRIPTS = {
    "dgl_gcn.py": 3,
    "dgl_sage.py": 2,
    "dgl_gatv2.py": 2,
    "dgl_gat.py": 2,
    "dgl_transformer.py": 2,
    "dgl_rgcn.py": 2,
}
WITHOUT_DGL = "DGL is not installed (it has wheels up to Python 3.12): its examples are left out."

_ACCURACY = re.compile(r"Test accuracy: (\S+)")


def comparison(results: list[ScriptComparison]) -> Table:
    """The table of both sides of all scripts."""
    table = Table(
        title="Time per epoch, peak memory, final loss and test accuracy",
        box=None,
        padding=(0, 2, 0, 0),
    )
    for column in ("script", "run"):
        table.add_column(column, no_wrap=True)
    for column in ("epoch", "faster", "memory", "less", "loss", "acc."):
        table.add_column(column, justify="right", no_wrap=True)
    for found in results:
        plain, fast = found.step_seconds("plain"), found.step_seconds("fastgraph")
        faster = f"{plain / fast:.1f}x" if plain and fast else ""
        less = f"{found.peak_bytes('plain') / found.peak_bytes('fastgraph'):.1f}x"
        for side in ("plain", "fastgraph"):
            run, seconds = found.of(side)[0], found.step_seconds(side)
            accuracy = _ACCURACY.findall(run.output)
            table.add_row(
                found.title if side == "plain" else "",
                side,
                "" if seconds is None else f"{seconds:.3f} s",
                "" if side == "plain" else faster,
                size(found.peak_bytes(side)),
                "" if side == "plain" else less,
                f"{run.losses[-1]:.5f}",
                accuracy[-1] if accuracy else "",
            )
        table.add_section()
    return table


def main() -> int:
    """Runs the demo and returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="PythonCode", metavar="CLASS[:NAME]")
    parser.add_argument("--root", type=Path, help="dataset directory (default: the user's cache)")
    scripts = {**SCRIPTS, **(DGL_SCRIPTS if importlib.util.find_spec("dgl") else {})}
    chosen = ", ".join(f"{count} for {script}" for script, count in scripts.items())
    parser.add_argument("--epochs", type=int, help=f"epochs of every run (default: {chosen})")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots there")
    arguments = parser.parse_args()
    if arguments.epochs is not None and arguments.epochs < 1:
        parser.error(f"--epochs: expected at least 1, got {arguments.epochs}")
    if arguments.html is not None:
        arguments.html.absolute().parent.mkdir(parents=True, exist_ok=True)
        check_report(arguments.html)

    console = Console()
    if len(scripts) == len(SCRIPTS):
        console.print(WITHOUT_DGL, highlight=False)
    os.environ.setdefault("DGLBACKEND", "pytorch")  # or else DGL writes a file at home
    options = ["--dataset", arguments.dataset]
    if arguments.root is not None:
        options += ["--root", str(arguments.root)]
    # Prepared first, so that no run pays for building the graph.
    prepare = [sys.executable, str(EXAMPLES / "data_loading.py"), *options]
    code = subprocess.run(prepare, check=False).returncode
    if code != 0:
        console.print(f"Loading the dataset failed with exit code {code}.", style="bold red")
        return 1

    results: list[ScriptComparison] = []
    try:
        for script, default_epochs in scripts.items():
            words = [*options, "--epochs", str(arguments.epochs or default_epochs)]
            words += ["--seed", str(arguments.seed)]
            plan = Plan(Target("script", str(EXAMPLES / script), words), name=script)
            with console.status(script) as status:
                results.append(compare_script(plan, status.update))
            console.print(f"{script}:", style="bold")
            for sentence in findings(results[-1]):
                console.print(Text(f"  {sentence}"), soft_wrap=True)
            console.print(Text(str(status_of(results[-1].status)).rstrip()), soft_wrap=True)
    except RunError as error:
        print_failure(error.run, console)
        return 1
    console.print(comparison(results))
    if arguments.html is not None:
        write_report(arguments.html, results)
        console.print(f"Plots and details: {arguments.html}", highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
