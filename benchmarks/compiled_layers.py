"""Routed layers under ``torch.compile`` beside the same layers without it.

    FASTGRAPH_DATA=... python benchmarks/compiled_layers.py [--graphs cora-size] [--channels 64]

Both are ours and take turns in one process, on one thread; processor time counts.
"""

from __future__ import annotations

import copy
import shlex
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track

from measure.output import RESULTS, publish

LAYERS = ("GCNConv", "SAGEConv", "SAGEConv max", "GATConv", "GATv2Conv", "TransformerConv")
GRAPHS = ("cora-size", "tolokers")


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--layers", default=",".join(LAYERS), show_default=True)
@click.option("--graphs", default=",".join(GRAPHS), show_default=True)
@click.option("--channels", default="64", show_default=True, help="Separated by commas.")
@click.option("--modes", default="all,inference", show_default=True, help="As never_slower.py's.")
@click.option("--rounds", type=click.IntRange(1), default=8, show_default=True)
@click.option("--name", default="compiled-layers", show_default=True, help="Of the results.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
def main(
    layers: str, graphs: str, channels: str, modes: str, rounds: int, name: str, out: Path
) -> None:
    import torch

    import fastgraph
    from measure.machine import machine_facts
    from measure.shapes import SHAPES

    torch.set_num_threads(1)
    # By its caches torch would take what it has compiled of other versions of the same layers.
    torch.compiler.config.force_disable_caches = True
    console = Console(stderr=True)
    cells = []
    with fastgraph.enabled():
        for graph in graphs.split(","):
            data = SHAPES[graph]()
            kinds = [
                (layer, int(width)) for layer in layers.split(",") for width in channels.split(",")
            ]
            for layer, width in track(kinds, graph, console=console):
                cells += measured(layer, data, width, modes.split(","), rounds)
    results = {
        "command": shlex.join(["python", "benchmarks/compiled_layers.py", *sys.argv[1:]]),
        "machine": machine_facts(1),
        "cells": cells,
    }
    publish(console, out, name, results, markdown(results))


def measured(
    layer: str, data: Any, channels: int, modes: list[str], rounds: int
) -> list[dict[str, Any]]:
    """A cell for each mode: milliseconds of a step, without ``torch.compile`` and with it."""
    import torch

    from measure.modes import Steps
    from measure.pyg_classes import Case
    from measure.turns import Effort, Side
    from measure.turns import measure as in_turns

    plain = Case(layer, data, channels)
    compiled = copy.copy(plain)
    compiled.module = torch.compile(plain.module)
    found = []
    for mode in modes:
        sides = [Steps(case, mode, is_fresh=False) for case in (plain, compiled)]
        for steps in sides:
            for _ in range(3):  # compiles, and remembers what is remembered of a graph
                steps.prepare()
                steps.step()
        beside = in_turns(*(Side(s.step, s.prepare) for s in sides), Effort(rounds=rounds))
        times = {"uncompiled": 1e3 * beside.plain, "compiled": 1e3 * beside.ours}
        cell = {"graph": data.name, "layer": layer, "channels": channels, "mode": mode}
        found.append({**cell, **times, "rounds": beside.rounds})
    torch.compiler.reset()
    return found


def markdown(results: dict[str, Any]) -> str:
    """The whole report."""
    from measure.report import machine_lines, table

    rows = (
        [
            *(str(cell[key]) for key in ("graph", "layer", "channels", "mode")),
            *(f"{cell[key]:.3g}" for key in ("uncompiled", "compiled")),
            f"{cell['uncompiled'] / cell['compiled']:.2f}",
        ]
        for cell in results["cells"]
    )
    head = ["graph", "layer", "channels", "mode", "uncompiled, ms", "compiled, ms", "ratio"]
    return "\n".join(
        [
            "# Compiled layers",
            "",
            f"`{results['command']}`; processor time of a step, the lower quartile of those of "
            "each side in turns. A ratio above 1 says that the compiled layer is faster.",
            "",
            *machine_lines(results["machine"]),
            *table(head, rows),
        ]
    )


if __name__ == "__main__":
    main()
