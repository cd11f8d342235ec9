"""DGL layers on the CPU, with and without fastgraph, in one process.

    FASTGRAPH_DATA=... PYTHONPATH=. .venv-dgl-2.1.0/bin/python benchmarks/dgl_cpu.py [--quick]

Contestants are timed in turns, after each has run once and agreed with upstream. Results go to
``benchmarks/results/<date>-dgl-cpu.json`` and ``.md``.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track

from measure.output import RESULTS, publish

_MEMORY = ("tolokers", "GATv2Conv")
_SAMPLED = ("tolokers", "kronecker-14")


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--graphs", help="Separated by commas. Default: all there are.")
@click.option("--layers", help="Separated by commas. Default: all.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--channels", type=click.IntRange(4), default=256, show_default=True)
@click.option("--quick", is_flag=True, help="Fewer repetitions.")
def main(
    graphs: str | None, layers: str | None, out: Path, threads: int, channels: int, quick: bool
) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # read when DGL is loaded
    os.environ.setdefault("DGLBACKEND", "pytorch")
    import fastgraph.dgl

    fastgraph.dgl.fix_import()
    import torch

    from measure.cell import Effort
    from measure.dgl_cell import measure_cell, measure_routed_call, measure_sampled
    from measure.dgl_layers import LAYERS, dgl_graph
    from measure.dgl_report import floors, markdown
    from measure.graphs import default_graphs, load
    from measure.machine import machine_facts
    from measure.memory import peak_in_child

    torch.set_num_threads(threads)
    names = graphs.split(",") if graphs else default_graphs()
    chosen = layers.split(",") if layers else list(LAYERS)
    effort = Effort((1, 10), 2.0) if quick else Effort((3, 40), 8.0)
    console = Console(stderr=True)
    results: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/dgl_cpu.py", *sys.argv[1:]]),
        "machine": machine_facts(threads),
        "channels": channels,
        "cells": {},
        "memory": {},
        "sampled": {},
        "routed_call": {},
    }
    for number, name in enumerate(names):
        data = load(name)
        graph = dgl_graph(data)
        if number == 0:  # the smallest
            calls = 200 if quick else 1000
            results["routed_call"] = measure_routed_call(graph, channels, calls)
        results["cells"][name] = {
            layer: measure_cell(graph, layer, channels, effort)
            for layer in track(chosen, name, console=console)
        }
        if name in _SAMPLED:
            results["sampled"][name] = measure_sampled(graph, channels, effort)
    graph_name, layer = _MEMORY
    if graph_name in names and layer in chosen:
        results["memory"] = {
            side: peak_in_child(
                graph_name,
                layer,
                ours=side == "ours",
                channels=channels,
                threads=threads,
                module="measure.dgl_memory",
            )
            for side in ("upstream", "ours")
        }
    listed = floors(results)
    results["floors"] = [floor.to_json() for floor in listed]
    title = "dgl-cpu-quick" if quick else "dgl-cpu"
    publish(console, out, title, results, markdown(results, listed))


if __name__ == "__main__":
    main()
