"""PyG layers on the CPU, with and without fastgraph, in one process.

    FASTGRAPH_DATA=... python benchmarks/pyg_cpu.py [--quick]

Contestants are timed in turns, after each has run once and agreed with upstream. Results go to
``benchmarks/results/<date>-pyg-cpu.json`` and ``.md``.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from measure.graphs import GENERATED, REAL, default_graphs
from measure.layers import LAYERS
from measure.output import RESULTS, write

COLUMNS = (
    "upstream",
    "compile",
    "upstream-csr",
    "ours",
    "ours-fresh",
    "ours-csr",
    "ceiling",
    "message-passing",
    "bfloat16",
    "memory",
    "bandwidth",
    "routed-call",
    "import",
)
_NOT_IN_QUICK = {"compile"}
_QUICK_GRAPHS = {"cora", "tolokers", "wing", "kronecker-11", "kronecker-14"}
_QUICK_MEMORY = {("tolokers", "SAGE-max"), ("kronecker-14", "SAGE-max")}


class _Names(click.ParamType):
    """Names from a list, separated by commas."""

    name = "names"

    def __init__(self, known: tuple[str, ...]) -> None:
        self.known = known

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        names = tuple(name.strip() for name in value.split(","))
        for name in names:
            if name not in self.known:
                self.fail(f"expected some of {', '.join(self.known)}, got {name!r}", param, ctx)
        return names


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--graphs", type=_Names((*REAL, *GENERATED)), help="Default: all there are.")
@click.option("--layers", type=_Names(tuple(LAYERS)), default=tuple(LAYERS), show_default=True)
@click.option("--columns", type=_Names(COLUMNS), help=f"Default: {','.join(COLUMNS)}.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--channels", type=click.IntRange(1), default=256, show_default=True)
@click.option("--quick", is_flag=True, help="Fewer graphs and repetitions, no torch.compile.")
def main(
    graphs: tuple[str, ...] | None,
    layers: tuple[str, ...],
    columns: tuple[str, ...] | None,
    out: Path,
    threads: int,
    channels: int,
    quick: bool,
) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # read by child processes
    import torch

    from measure.cell import Effort, measure_cell
    from measure.gather import CHANNELS, MinimalLoops
    from measure.graphs import load
    from measure.kernels import measure_bandwidth, measure_import, measure_routed_call
    from measure.machine import machine_facts
    from measure.memory import peak_in_child
    from measure.report import floor_lines, floors, markdown

    torch.set_num_threads(threads)
    warnings.filterwarnings("ignore", message="Sparse (CSR tensor support|invariant checks)")
    chosen = set(columns or (set(COLUMNS) - _NOT_IN_QUICK if quick else COLUMNS))
    names = graphs or tuple(g for g in default_graphs() if not quick or g in _QUICK_GRAPHS)
    effort = Effort((1, 10), 2.0) if quick else Effort((3, 40), 8.0)
    if "bandwidth" in chosen and channels != CHANNELS:
        raise click.UsageError(f"column bandwidth needs --channels {CHANNELS}, got {channels}")

    console = Console(stderr=True)
    start = time.perf_counter()
    results: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/pyg_cpu.py", *sys.argv[1:]]),
        "machine": machine_facts(threads),
        "channels": channels,
        "cells": {},
        "num_edges": {},
        "bandwidth": {},
        "routed_call": {},
        "import": {},
        "small_graph": names[0],
    }
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    ) as progress:
        task = progress.add_task("", total=len(names) * len(layers) + 2)

        def at(description: str) -> None:
            progress.update(task, description=description)

        at("import and small graph")
        if "import" in chosen:
            results["import"] = measure_import(3 if quick else 9)
        if "routed-call" in chosen:
            small = load(names[0])
            results["routed_call"] = measure_routed_call(small, channels, 200 if quick else 1000)
        progress.advance(task)
        loops = MinimalLoops() if "bandwidth" in chosen else None
        for name in names:
            graph = load(name)
            results["num_edges"][name] = graph.num_edges
            at(f"{name}: {graph.num_nodes:,} nodes, {graph.num_edges:,} edges")
            if loops is not None:
                results["bandwidth"][name] = measure_bandwidth(graph, loops, effort)
            for layer in layers:
                at(f"{name} {layer}")
                cell = measure_cell(graph, LAYERS[layer], chosen, channels, effort)
                if "memory" in chosen and (not quick or (name, layer) in _QUICK_MEMORY):
                    cell["memory"] = {
                        column: peak_in_child(
                            name, layer, ours=column == "ours", channels=channels, threads=threads
                        )
                        for column in ("upstream", "ours")
                    }
                results["cells"][f"{name} {layer}"] = cell
                progress.advance(task)
        progress.advance(task)
    listed = floors(results)
    results["floors"] = [floor.to_json() for floor in listed]
    results["seconds"] = round(time.perf_counter() - start, 1)
    text = markdown(results, listed)
    path = write(out, "pyg-cpu-quick" if quick else "pyg-cpu", results, text)
    console.print(Markdown("\n".join(floor_lines(listed))))
    console.print(f"{results['seconds']:.0f} s, written to {path}")


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"{shlex.join(error.cmd)} failed with exit status {error.returncode}")
