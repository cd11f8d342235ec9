"""Two checkouts of fastgraph in turns: times of PyG's layers on the CPU, and whether bits differ.

    FASTGRAPH_DATA=... python benchmarks/checkouts.py BEFORE AFTER

Each is a folder in which ``make install`` has run. Two processes of the same code differ by as much
as a tenth, as the system gives them other memory, and one that waits for another loses some of its
own; so both are started several times, one after the other, and the other one first each time.
Steps are forward and backward; on the first graph the forward of message passing alone is measured
as well, where what a call costs shows. Results go to ``benchmarks/results/<date>-checkouts.json``
and ``.md``.
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track

from measure.graphs import default_graphs
from measure.layers import LAYERS
from measure.machine import machine_facts
from measure.output import RESULTS, publish
from measure.report import geometric_mean, machine_lines, table
from measure.timing import Spread

_STEPS = Path(__file__).parent / "measure" / "checkout_steps.py"
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
        """The return value of a method of ``measure.checkout_steps.Layers``."""
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

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@dataclass
class Cell:
    """A layer on a graph, and what both checkouts needed for it."""

    graph: str
    layer: str
    bare: bool
    seconds: dict[str, list[list[float]]] = field(
        default_factory=lambda: {name: [] for name in _NAMES}, init=False
    )
    """Of the steps of each start."""
    bits: dict[str, dict[str, str]] = field(default_factory=dict, init=False)

    def measure(self, name: str, checkout: Checkout, channels: int, budget: float) -> None:
        """So many seconds of a process that has just been started."""
        self.bits[name] = checkout.ask("begin", self.graph, self.layer, channels, self.bare)
        (estimate,) = checkout.ask("turn", 1)
        self.seconds[name].append(checkout.ask("turn", max(5, int(budget / estimate))))

    def to_json(self) -> dict[str, Any]:
        before, after = ([statistics.median(s) for s in self.seconds[name]] for name in _NAMES)
        ratios = [a / b for a, b in zip(after, before, strict=True)]
        bits = self.bits
        return {
            "graph": self.graph,
            "layer": f"{self.layer}, message passing" if self.bare else self.layer,
            **{name: Spread.of([*chain(*self.seconds[name])]).to_json() for name in _NAMES},
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "differ": [
                what for what in bits["before"] if bits["before"][what] != bits["after"][what]
            ],
        }


def markdown(results: dict[str, Any]) -> str:
    """The whole report."""
    rows = [
        [
            cell["graph"],
            cell["layer"],
            *(f"{cell[name]['median']:.3f}" for name in _NAMES),
            f"{cell['ratio']:.3f}",
            f"{min(cell['ratios']):.3f} to {max(cell['ratios']):.3f}",
            ", ".join(cell["differ"]) or "none",
        ]
        for cell in results["cells"]
    ]
    head = [
        "graph",
        "layer",
        "ms before",
        "ms after",
        "after / before",
        "starts",
        "bits that differ",
    ]
    mean = geometric_mean([cell["ratio"] for cell in results["cells"]])
    return "\n".join(
        [
            "# Two checkouts of fastgraph",
            "",
            f"`{results['command']}`; commits {results['commits']['before']} (before) and "
            f"{results['commits']['after']} (after), float32, {results['channels']} channels, "
            f"{results['starts']} starts of each; medians of steps; the ratio is the median over "
            f"pairs of starts. Its geometric mean over all cells is {mean:.3f}.",
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
@click.option(
    "--seconds", type=float, default=2.0, show_default=True, help="For each cell and start."
)
@click.option("--starts", type=click.IntRange(1), default=5, show_default=True, help="Of both.")
def main(
    before: Path,
    after: Path,
    graphs: tuple[str, ...],
    layers: tuple[str, ...],
    out: Path,
    threads: int,
    channels: int,
    seconds: float,
    starts: int,
) -> None:
    folders = dict(zip(_NAMES, (before, after), strict=True))
    results: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/checkouts.py", *sys.argv[1:]]),
        "commits": {name: _commit(folder) for name, folder in folders.items()},
        "machine": machine_facts(threads),
        "channels": channels,
        "starts": starts,
    }
    cells = [Cell(graphs[0], layer, True) for layer in layers]
    cells += [Cell(graph, layer, False) for graph in graphs for layer in layers]
    console = Console(stderr=True)
    for start in range(starts):
        for name in _NAMES if start % 2 == 0 else _NAMES[::-1]:
            with closing(Checkout(folders[name], threads)) as checkout:
                for cell in track(cells, f"{name}, start {start + 1} of {starts}", console=console):
                    cell.measure(name, checkout, channels, seconds)
    results["cells"] = [cell.to_json() for cell in cells]
    publish(console, out, "checkouts", results, markdown(results))


if __name__ == "__main__":
    sys.exit(main())
