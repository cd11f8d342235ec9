"""Training on several ranks of one thread, gradients summed one by one and together.

    FASTGRAPH_DATA=... PYTHONPATH=. python benchmarks/dist_gradients.py

Both take turns. Results go to ``benchmarks/results/<date>-dist-gradients.json`` and ``.md``.
"""

from __future__ import annotations

import math
import shlex
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track

from measure.output import RESULTS, publish

_TOLERANCE = 1e-5  # of float32 losses, which are sums in another order


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--graph", default="cora", show_default=True)
@click.option("--layers", default="GCN,GAT", show_default=True, help="Separated by commas.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
@click.option("--ranks", default="2,4,8", show_default=True, help="Separated by commas.")
@click.option("--channels", type=click.IntRange(4), default=64, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=60, show_default=True)
def main(graph: str, layers: str, out: Path, ranks: str, channels: int, rounds: int) -> None:
    from fastgraph.dist.ranks.spawning import run_on_ranks
    from measure.dist_gradients_steps import measure
    from measure.dist_steps import NUM_LAYERS
    from measure.machine import machine_facts

    console = Console(stderr=True)
    results: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/dist_gradients.py", *sys.argv[1:]]),
        "machine": machine_facts(1),
        "channels": channels,
        "layers": NUM_LAYERS,
        "cells": {},
    }
    for size in track([int(size) for size in ranks.split(",")], graph, console=console):
        first, *_ = run_on_ranks(measure, size, graph, layers.split(","), channels, rounds)
        for layer, found in first.items():
            _check(*(of_way["losses"] for of_way in found.values()))
            results["cells"][f"{graph}, {layer}, {size} ranks"] = found
    publish(console, out, "dist-gradients", results, markdown(results))


def _check(one_by_one: list[float], together: list[float]) -> None:
    for a, b in zip(one_by_one, together, strict=True):
        if not math.isclose(a, b, rel_tol=_TOLERANCE):
            raise RuntimeError(f"losses are {one_by_one} one by one, and {together} together")


def markdown(results: dict[str, Any]) -> str:
    """The whole report."""
    from measure.report import machine_lines, table

    rows = []
    for name, found in results["cells"].items():
        spreads = [of_way["spread"] for of_way in found.values()]
        medians = [spread["median"] for spread in spreads]
        rows.append(
            [
                name,
                *(str(of_way["sums"]) for of_way in found.values()),
                *(f"{milliseconds:.2f}" for milliseconds in medians),
                *(f"{s['lower_quartile']:.2f} to {s['upper_quartile']:.2f}" for s in spreads),
                f"{medians[0] / medians[1]:.2f}x",
            ]
        )
    head = ["cell", "sums, one by one", "sums, together", "one by one, ms", "together, ms"]
    head += ["one by one, quartiles", "together, quartiles", "gain"]
    return "\n".join(
        [
            "# Gradients of parameters, summed over ranks one by one and together",
            "",
            f"`{results['command']}`",
            "",
            f"Milliseconds of a training step, medians, {results['layers']} layers of "
            f"{results['channels']} channels, ranks of",
            "one thread with gloo. Sums are all-reduces in a step, that of the loss included.",
            "",
            *table(head, rows),
            "",
            *machine_lines(results["machine"]),
        ]
    )


if __name__ == "__main__":
    main()
