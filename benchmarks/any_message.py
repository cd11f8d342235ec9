"""Layers in their usual configurations, with and without fastgraph: both passes, and memory.

    FASTGRAPH_DATA=... PYTHONPATH=. python benchmarks/any_message.py [--graphs ...] [--layers ...]

Whole layers, and of those whose messages are edge programs ``propagate`` alone as well. Times are
by the processor's clock on one thread, upstream and ours in turns, those of short passes behind
another forward pass on the same side. What upstream has no memory for is left out. Cells go to the
record, a line each, as soon as they are known, and a run leaves out those that are there. What the
record holds is written beside it as ``.json`` and ``.md``.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import psutil
from rich.console import Console

from measure.output import RESULTS, Record, write_to

GRAPHS = ("molecules", "sparse", "wordnet", "tolokers")
PARTS = ("layer", "propagate")


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--graphs", default=",".join(GRAPHS), show_default=True)
@click.option("--channels", default="64,128", show_default=True)
@click.option("--library", type=click.Choice(["pyg", "dgl"]), default="pyg", show_default=True)
@click.option("--layers", help="Separated by commas and semicolons. Default: edge programs.")
@click.option("--every", is_flag=True, help="Also layers that are computed by other operators.")
@click.option("--parts", default=",".join(PARTS), show_default=True)
@click.option("--seconds", default=4.0, show_default=True, help="Of a cell, beyond two rounds.")
@click.option("--budget", type=float, help="Seconds after which no cell is begun.")
@click.option("--record", type=click.Path(path_type=Path), help="Default: of today, in results.")
def main(
    graphs: str,
    channels: str,
    library: str,
    layers: str | None,
    every: bool,
    parts: str,
    seconds: float,
    budget: float | None,
    record: Path | None,
) -> None:
    import torch

    if library == "dgl":
        import fastgraph.dgl

        fastgraph.dgl.fix_import()

    from measure.machine import machine_facts
    from measure.message_cells import Bench, configurations
    from measure.message_report import markdown

    torch.set_num_threads(1)
    console = Console(stderr=True)
    names = layers.split(";") if layers else list(configurations(library))
    kept = Record(record or RESULTS / f"{datetime.now(UTC):%Y-%m-%d}-any-message-graphs.jsonl")
    kept.mend()
    cells = {_place(cell): cell for cell in kept.lines("cell")}
    left_out: dict[str, None] = {}
    end = time.monotonic() + (float("inf") if budget is None else budget)
    for graph in graphs.split(","):
        for width in map(int, channels.split(",")):
            bench = Bench(graph, width, seconds, library)
            for name in names:
                for part in parts.split(","):
                    if (graph, width, name, part) in cells or time.monotonic() > end:
                        continue
                    if bench.least_memory(name) > 0.8 * psutil.virtual_memory().available:
                        left_out[f"{name} on {graph} with {width} channels"] = None
                        continue
                    cell = bench.cell(name, part, of_programs=not every)
                    if cell is not None:
                        cells[_place(cell)] = cell
                        kept.add("cell", cell)
                        console.print(*_place(cell), *_shown(cell))
    results = {
        "command": shlex.join(["python", "benchmarks/any_message.py", *sys.argv[1:]]),
        "machine": machine_facts(1),
        "cells": list(cells.values()),
        "left_out": list(left_out),
    }
    console.print(f"written to {write_to(kept.stem, results, markdown(results))}")


def _place(cell: dict[str, Any]) -> tuple[str, int, str, str]:
    return cell["graph"], cell["channels"], cell["configuration"], cell["part"]


def _shown(cell: dict[str, Any]) -> list[str]:
    from measure.message_report import times_as_fast, times_below

    ratios: list[tuple[str, Callable[[dict[str, Any]], float]]] = [
        ("forward", lambda c: times_as_fast(c, "forward")),
        ("backward", lambda c: times_as_fast(c, "backward")),
        ("memory", times_below),
    ]
    return [f"{name} {value(cell):.2f}" for name, value in ratios]


if __name__ == "__main__":
    main()
