"""The gain of `shard(order="cluster")`: steps on ranks with the rows of each cluster by cluster.

    FASTGRAPH_DATA=... PYTHONPATH=. python benchmarks/dist_order.py [--graphs wordnet]

Both orders take turns, on the graph as it is and with its nodes numbered at random, and their first
losses must agree. Seconds are those of the processor, which other work on the machine changes
little. Results go to ``benchmarks/results/<date>-dist-order.json`` and ``.md``.
"""

from __future__ import annotations

import math
import shlex
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from measure.output import RESULTS, write

_TOLERANCE = 1e-5  # of float32 losses, which are sums in another order


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--graphs", default="wordnet", show_default=True, help="Separated by commas.")
@click.option("--layers", default="GCN,GAT", show_default=True, help="Separated by commas.")
@click.option("--ranks", type=click.IntRange(1), default=2, show_default=True)
@click.option("--channels", type=click.IntRange(4), default=256, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
def main(graphs: str, layers: str, ranks: int, channels: int, rounds: int, out: Path) -> None:
    from fastgraph.dist.ranks.spawning import run_on_ranks
    from measure.dist_order_steps import measure
    from measure.dist_steps import NUM_LAYERS
    from measure.machine import machine_facts

    console = Console(stderr=True)
    results: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/dist_order.py", *sys.argv[1:]]),
        "machine": machine_facts(1),
        "channels": channels,
        "layers": NUM_LAYERS,
        "ranks": ranks,
        "cells": {},
    }
    for graph in graphs.split(","):
        for numbering in ("as it is", "random"):
            given = (graph, numbering, layers.split(","), channels, rounds)
            found = run_on_ranks(measure, ranks, *given, timeout=3600)
            for layer in found[0]:
                of_ranks = [of_rank[layer] for of_rank in found]
                _check_losses(of_ranks[0])
                results["cells"][f"{graph}, {numbering}, {layer}"] = of_ranks
            write(out, "dist-order", results, markdown(results))
            console.print(markdown(results))


def _check_losses(of_rank: dict[str, Any]) -> None:
    own, clusters = (found["losses"][0] for found in of_rank.values())
    if not math.isclose(own, clusters, rel_tol=_TOLERANCE):
        raise RuntimeError(f"the first loss is {own}, and {clusters} in the order of clusters")


def markdown(results: dict[str, Any]) -> str:
    """The whole report."""
    from measure.report import machine_lines, table

    rows = []
    for name, of_ranks in results["cells"].items():
        times = [
            max(of_rank[order]["spread"]["median"] for of_rank in of_ranks) for order in of_ranks[0]
        ]
        gain = f"{times[0] / times[1]:.2f}x"
        rows.append([*name.split(", "), *(f"{one:.0f}" for one in times), gain])
    head = ["graph", "numbers of nodes", "layer", "its own order, ms", "clusters, ms", "gain"]
    return "\n".join(
        [
            "# The rows of a rank in the order of the graph, and cluster by cluster",
            "",
            f"`{results['command']}`",
            "",
            "Milliseconds of the processor for a training step of the slowest of "
            f"{results['ranks']} ranks, medians of turns;",
            f"{results['layers']} layers of {results['channels']} channels, by halo, one thread a "
            "rank. The machine did other things meanwhile.",
            "",
            *table(head, rows),
            "",
            *machine_lines(results["machine"]),
        ]
    )


if __name__ == "__main__":
    main()
