"""Graph transformers on several ranks of one thread, by halo and by heads.

    FASTGRAPH_DATA=... PYTHONPATH=. python benchmarks/dist_transformer.py [--quick]

Both have the same partition and take turns; their first losses must agree, and each must send the
bytes that are predicted for it. Results go to ``benchmarks/results/<date>-dist-transformer.json``
and ``.md``.
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
    default="random-50000,communities-50000,mesh-220",
    show_default=True,
    help="Separated by commas; random-N, communities-N, mesh-SIDE, or the name of a real graph.",
)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
@click.option("--ranks", default="2,4", show_default=True, help="Separated by commas.")
@click.option("--channels", type=click.IntRange(8), default=128, show_default=True)
@click.option("--quick", is_flag=True, help="Fewer repetitions.")
def main(graphs: str, out: Path, ranks: str, channels: int, quick: bool) -> None:
    from fastgraph.dist.ranks.spawning import run_on_ranks
    from measure.dist_transformer_steps import HEADS, NUM_LAYERS, measure
    from measure.machine import machine_facts

    console = Console(stderr=True)
    sizes = [int(size) for size in ranks.split(",")]
    results: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/dist_transformer.py", *sys.argv[1:]]),
        "machine": machine_facts(1),
        "channels": channels,
        "layers": NUM_LAYERS,
        "heads": HEADS,
        "cells": {},
    }
    for name in graphs.split(","):
        for size in track(sizes, name, console=console):
            given = (name, channels, 5 if quick else 20)
            found = run_on_ranks(measure, size, *given, timeout=3600)
            _check(found)
            results["cells"][f"{name}, {size} ranks"] = found
    title = "dist-transformer-quick" if quick else "dist-transformer"
    publish(console, out, title, results, markdown(results))


def _check(ranks: list[dict[str, Any]]) -> None:
    halo, heads = (ranks[0]["modes"][mode]["loss"] for mode in ("halo", "heads"))
    if not math.isclose(halo, heads, rel_tol=_TOLERANCE):
        raise RuntimeError(f"the first loss by halo is {halo}, by heads {heads}")
    for rank in ranks:
        for mode, found in rank["modes"].items():
            if found["sent"] != found["predicted"]:
                raise RuntimeError(f"{mode} sent {found['sent']}, predicted {found['predicted']}")


def markdown(results: dict[str, Any]) -> str:
    """The whole report."""
    from measure.report import machine_lines, table

    rows = []
    for name, ranks in results["cells"].items():
        modes = ranks[0]["modes"]
        times = [modes[mode]["spread"]["median"] for mode in ("halo", "heads")]
        sent = [
            sum(rank["modes"][mode]["sent"] for rank in ranks) / 1e6 for mode in ("halo", "heads")
        ]
        nodes = sum(rank["nodes"] for rank in ranks)
        rows.append(
            [
                name,
                f"{sum(rank['halo'] for rank in ranks) / nodes:.2f}",
                *(f"{milliseconds:.0f}" for milliseconds in times),
                f"{times[0] / times[1]:.2f}x",
                *(f"{megabytes:.1f}" for megabytes in sent),
            ]
        )
    head = ["cell", "halo / nodes", "halo, ms", "heads, ms", "gain of heads"]
    head += ["halo, MB", "heads, MB"]
    return "\n".join(
        [
            "# Graph transformers on several ranks, by halo and by heads",
            "",
            f"`{results['command']}`",
            "",
            f"Milliseconds of a training step, medians, {results['layers']} layers of "
            f"`TransformerConv` with {results['channels']} channels and {results['heads']} heads,",
            "ranks of one thread with gloo. Megabytes are rows of nodes that all ranks send",
            "in a step, which are what is predicted by the plan and by 4 S d / P.",
            "",
            *table(head, rows),
            "",
            *machine_lines(results["machine"]),
        ]
    )


if __name__ == "__main__":
    main()
