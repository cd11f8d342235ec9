"""Two checkouts of fastgraph in turns: times of PyG's layers on the CPU, and whether bits differ.

    FASTGRAPH_DATA=... python benchmarks/checkouts.py BEFORE AFTER

Each is a folder in which ``make install`` has run. Each gets one process; while one runs a layer,
the other waits. Steps are forward and backward; on the first graph the forward of message passing
alone is measured as well, where what a call costs shows. Results go to
``benchmarks/results/<date>-checkouts.json`` and ``.md``.
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track

from measure.graphs import default_graphs
from measure.layers import LAYERS
from measure.machine import machine_facts
from measure.output import RESULTS, publish
from measure.report import machine_lines, table
from measure.timing import Spread

_STEPS = Path(__file__).parent / "measure" / "checkout_steps.py"
_TURN_SECONDS = 0.1
_NAMES = ("before", "after")


class Checkout:
    """The process of one checkout."""

    def __init__(self, folder: Path, threads: int) -> None:
        self._process = subprocess.Popen(
            [folder / ".venv" / "bin" / "python", _STEPS, str(threads)],
            env={
                **os.environ,
                "OMP_NUM_THREADS": str(threads),
                "OMP_WAIT_POLICY": "passive",
                "PYTHONPATH": str(folder),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        package = Path(self._answer()["package"]).parent.parent
        if package.resolve() != folder.resolve():
            raise click.UsageError(f"the python of {folder} imports fastgraph from {package}")

    def ask(self, method: str, *arguments: Any) -> Any:
        """What a method of ``measure.checkout_steps.Layers`` returns."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([method, *arguments]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise click.ClickException("the process of a checkout ended; see above")
        return json.loads(line)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def compare(
    checkouts: dict[str, Checkout], graph: str, layer: str, channels: int, bare: bool, budget: float
) -> dict[str, Any]:
    """Both in turns, for so many seconds."""
    bits = {name: c.ask("begin", graph, layer, channels, bare) for name, c in checkouts.items()}
    estimate = max(min(c.ask("turn", 1)) for c in checkouts.values())
    steps = max(1, min(200, int(_TURN_SECONDS / estimate)))
    rounds = max(5, int(budget / (2 * estimate * (steps + 1))))
    seconds: dict[str, list[float]] = {name: [] for name in checkouts}
    for _ in range(rounds):
        for name, checkout in checkouts.items():
            seconds[name].append(statistics.median(checkout.ask("turn", steps)))
    before, after = (seconds[name] for name in _NAMES)
    return {
        "graph": graph,
        "layer": f"{layer}, message passing" if bare else layer,
        **{name: Spread.of(seconds[name]).to_json() for name in _NAMES},
        "ratio": statistics.median(a / b for a, b in zip(after, before, strict=True)),
        "differ": [name for name in bits["before"] if bits["before"][name] != bits["after"][name]],
    }


def markdown(results: dict[str, Any]) -> str:
    """The whole report."""
    rows = []
    for cell in results["cells"]:
        before, after = (cell[name] for name in _NAMES)
        noise = max(
            (s["upper_quartile"] - s["lower_quartile"]) / s["median"] for s in (before, after)
        )
        rows.append(
            [
                cell["graph"],
                cell["layer"],
                f"{before['median']:.3f}",
                f"{after['median']:.3f}",
                f"{cell['ratio']:.3f}",
                f"{noise:.0%}",
                ", ".join(cell["differ"]) or "none",
            ]
        )
    head = [
        "graph",
        "layer",
        "ms before",
        "ms after",
        "after / before",
        "quartiles",
        "bits that differ",
    ]
    return "\n".join(
        [
            "# Two checkouts of fastgraph",
            "",
            f"`{results['command']}`; commits {results['commits']['before']} (before) and "
            f"{results['commits']['after']} (after), float32, {results['channels']} channels, "
            "medians of turns; the ratio is the median over pairs of turns.",
            "",
            *table(head, rows),
            "",
            *machine_lines(results["machine"]),
        ]
    )


def _commit(folder: Path) -> str:
    command = ["git", "-C", str(folder), "describe", "--always"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@click.command(help=__doc__.split("\n\n")[0])
@click.argument("before", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("after", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--graph", "graphs", multiple=True, default=default_graphs(), show_default=True)
@click.option("--layer", "layers", multiple=True, default=tuple(LAYERS), show_default=True)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--channels", type=click.IntRange(1), default=256, show_default=True)
@click.option("--seconds", type=float, default=8.0, show_default=True, help="For each cell.")
def main(
    before: Path,
    after: Path,
    graphs: tuple[str, ...],
    layers: tuple[str, ...],
    out: Path,
    threads: int,
    channels: int,
    seconds: float,
) -> None:
    folders = dict(zip(_NAMES, (before, after), strict=True))
    results: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/checkouts.py", *sys.argv[1:]]),
        "commits": {name: _commit(folder) for name, folder in folders.items()},
        "machine": machine_facts(threads),
        "channels": channels,
        "cells": [],
    }
    cells = [(graphs[0], layer, True) for layer in layers]
    cells += [(graph, layer, False) for graph in graphs for layer in layers]
    console = Console(stderr=True)
    with ExitStack() as stack:
        checkouts = {name: Checkout(folder, threads) for name, folder in folders.items()}
        for checkout in checkouts.values():
            stack.callback(checkout.end)
        for graph, layer, bare in track(cells, "cells", console=console):
            results["cells"].append(compare(checkouts, graph, layer, channels, bare, seconds))
    publish(console, out, "checkouts", results, markdown(results))


if __name__ == "__main__":
    sys.exit(main())
