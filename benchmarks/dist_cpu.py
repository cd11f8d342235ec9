"""Training on several ranks of one thread, beside one process with as many threads.

    FASTGRAPH_DATA=... PYTHONPATH=. .venv/bin/python benchmarks/dist_cpu.py [--quick]

The first rank is the one process as well, and they take turns, so that a slower minute of the
machine hits both; their first losses must agree. Results go to
``benchmarks/results/<date>-dist-cpu.json`` and ``.md``.

With ``--megabits``, what is gained by computing while the halo travels, over links of that
bandwidth between network namespaces, which takes root: ``<date>-dist-overlap.json`` and ``.md``.

SAR (IntelLabs) is not beside them, as the Python package index has no release of it to install:
what is called ``sar`` there reads the files of sysstat.
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
@click.option(
    "--graphs",
    default="wordnet,mesh-1000",
    show_default=True,
    help="Separated by commas; mesh-SIDE has SIDE squared nodes.",
)
@click.option("--layers", help="Separated by commas. Default: all.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
@click.option("--ranks", type=click.IntRange(1), default=2, show_default=True)
@click.option("--channels", type=click.IntRange(4), default=64, show_default=True)
@click.option("--seconds", default=15.0, show_default=True, help="For the turns of a cell.")
@click.option("--megabits", help="Of links, separated by commas: measure what overlap gains.")
@click.option("--quick", is_flag=True, help="Fewer repetitions.")
def main(
    graphs: str,
    layers: str | None,
    out: Path,
    ranks: int,
    channels: int,
    seconds: float,
    megabits: str | None,
    quick: bool,
) -> None:
    from fastgraph.dist.ranks.spawning import run_on_ranks
    from measure import dist_overlap
    from measure.dist_report import floors, markdown
    from measure.dist_steps import LAYERS, NUM_LAYERS, measure_ranks, measure_subclass
    from measure.machine import machine_facts
    from measure.network import network

    chosen = layers.split(",") if layers else list(LAYERS)
    rounds = (3, 5) if quick else (5, 30)
    console = Console(stderr=True)
    results: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/dist_cpu.py", *sys.argv[1:]]),
        "machine": machine_facts(ranks),
        "channels": channels,
        "layers": NUM_LAYERS,
        "ranks": ranks,
        "cells": {},
    }
    named = track(graphs.split(","), console=console)
    title = "dist-cpu"
    for name in named:
        given = (name, chosen, channels)
        if megabits:
            title, floors, markdown = "dist-overlap", dist_overlap.floors, dist_overlap.markdown
            for rate in megabits.split(","):
                with network(ranks, float(rate)) as links:
                    options = {"timeout": 3600, "prefixes": links.prefixes}
                    arguments = (*given, rounds, seconds)
                    found = run_on_ranks(dist_overlap.measure, ranks, *arguments, **options)
                for layer in chosen:
                    cell = {"ranks": [of_rank[layer] for of_rank in found]}
                    results["cells"][f"{name}, {layer}, {rate} Mbit/s"] = cell
            continue
        found = run_on_ranks(measure_ranks, ranks, *given, rounds, seconds, timeout=3600)
        alone = run_on_ranks(measure_subclass, 1, *given, ranks, rounds, seconds, timeout=3600)
        cells = results["cells"][name] = {}
        for layer in chosen:
            _check_losses(*found[0][layer]["losses"])
            of_ranks = [of_rank[layer] for of_rank in found]
            cells[layer] = {"ranks": of_ranks, "subclass": alone[0][layer]}
    listed = floors(results)
    results["floors"] = [floor.to_json() for floor in listed]
    title = f"{title}-quick" if quick else title
    publish(console, out, title, results, markdown(results, listed))


def _check_losses(one: float, ranks: float) -> None:
    if not math.isclose(one, ranks, rel_tol=_TOLERANCE):
        raise RuntimeError(f"the first loss of the ranks is {ranks}, that of one process {one}")


if __name__ == "__main__":
    main()
