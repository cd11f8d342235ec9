"""Training on two ranks of which one has 40 % of a core: equal shares, `auto`, and a search.

    FASTGRAPH_DATA=... PYTHONPATH=. .venv/bin/python benchmarks/dist_uneven.py [--quick]

The quota is one of a control group where one can be made, else the rank is stopped for the rest of
each 100 ms. Nothing that was measured before is used or changed. Results go to
``benchmarks/results/<date>-dist-uneven.json`` and ``.md``.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from measure.output import RESULTS, publish

_SEARCHED = "0.55,0.6,0.65,0.675,0.7,0.725,0.75,0.8"


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--graphs", default="wordnet,debian", show_default=True)
@click.option(
    "--unseen",
    default="wordnet,debian,wing,tolokers,mesh-300",
    show_default=True,
    help="Graphs whose times are predicted from each other; empty for none.",
)
@click.option("--layers", default="GCN", show_default=True)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
@click.option("--share", type=click.FloatRange(0.05, 1), default=0.4, show_default=True)
@click.option("--channels", type=click.IntRange(4), default=256, show_default=True)
@click.option("--searched", default=_SEARCHED, show_default=True, help="Shares of the first rank.")
@click.option(
    "--by-processor",
    is_flag=True,
    help="Predict and measure processor time, which a busy machine changes little.",
)
@click.option("--quick", is_flag=True, help="Fewer repetitions.")
def main(
    graphs: str,
    unseen: str,
    layers: str,
    out: Path,
    share: float,
    channels: int,
    searched: str,
    by_processor: bool,
    quick: bool,
) -> None:
    from fastgraph.dist.ranks.spawning import run_on_ranks
    from measure.dist_steps import NUM_LAYERS
    from measure.dist_uneven_report import floors, markdown
    from measure.dist_uneven_steps import PROCESSOR, measure_uneven, measure_unseen
    from measure.machine import machine_facts
    from measure.quota import quota_of

    console = Console(stderr=True)
    rounds = 3 if quick else 9
    shares = [float(one) for one in searched.split(",")]
    results: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/dist_uneven.py", *sys.argv[1:]]),
        "machine": machine_facts(1),
        "channels": channels,
        "layers": NUM_LAYERS,
        "share": share,
        "by processor": by_processor,
        "cells": {},
        "unseen": {},
    }
    with (
        quota_of(share) as quota,
        tempfile.TemporaryDirectory() as cache,
    ):
        os.environ["XDG_CACHE_HOME"] = cache  # of the ranks
        results["quota"] = quota[0]
        for graph in filter(None, graphs.split(",")):
            for layer in layers.split(","):
                console.print(f"{graph} {layer}")
                given = (quota, graph, layer, channels, rounds, shares)
                found = run_on_ranks(measure_uneven, 2, *given, timeout=3600)
                results["cells"][f"{graph} {layer}"] = found[0]
        if unseen:
            console.print("predictions for unseen graphs")
            if by_processor:
                quota = PROCESSOR, str(share)
            given = (quota, unseen.split(","), layers.split(",")[0], channels)
            results["unseen"] = run_on_ranks(measure_unseen, 2, *given, timeout=3600)[0]
    listed = floors(results)
    results["floors"] = [floor.to_json() for floor in listed]
    title = "dist-uneven-quick" if quick else "dist-uneven"
    publish(console, out, title, results, markdown(results, listed))


if __name__ == "__main__":
    main()
