"""DGL's message passing by functions of users, with and without fastgraph, in one process.

    FASTGRAPH_DATA=... PYTHONPATH=. .venv-dgl-2.1.0/bin/python benchmarks/user_functions.py

Times are by the processor's clock on one thread, medians of both in turns; small graphs are called
several times in a turn. A function of users that reduces messages is called by DGL for each
in-degree: such cells are left out on tolokers, whose nodes have many. Results go to
``benchmarks/results/<date>-user-functions.json`` and ``.md``.
"""

from __future__ import annotations

import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from measure.output import RESULTS, machine_table, publish

_GRAPHS = ("tolokers", "dense", "molecules", "tiny")
_CHANNELS = 64


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--graphs", default=",".join(_GRAPHS), show_default=True)
@click.option("--cases", help="Separated by semicolons. Default: all.")
@click.option("--seconds", default=2.0, show_default=True, help="Of a cell, beyond two rounds.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
def main(graphs: str, cases: str | None, seconds: float, out: Path) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when DGL is loaded
    os.environ.setdefault("DGLBACKEND", "pytorch")
    import fastgraph.dgl

    fastgraph.dgl.fix_import()
    import torch

    from measure.machine import machine_facts
    from measure.user_cases import CASES, graph_of

    torch.set_num_threads(1)
    console = Console(stderr=True)
    cells = []
    for graph in graphs.split(","):
        torch.manual_seed(0)
        g = graph_of(graph)
        for name in cases.split(";") if cases else CASES:
            case = CASES[name]
            if case.reduces and graph == "tolokers":
                continue
            cell = {"graph": graph, "case": name, **_measured(g, case.build(_CHANNELS), seconds)}
            cells.append(cell)
            console.print(_row(cell))
    results = {
        "command": shlex.join(["python", "benchmarks/user_functions.py", *sys.argv[1:]]),
        "machine": machine_facts(1),
        "channels": _CHANNELS,
        "cells": cells,
    }
    publish(console, out, "user-functions", results, _markdown(results))


def _measured(g: Any, call: Callable[[Any], Any], seconds: float) -> dict[str, Any]:
    """Milliseconds of inference, forward and backward, by whether fastgraph is enabled."""
    import torch

    import fastgraph

    x = torch.randn(g.num_nodes(), _CHANNELS, requires_grad=True)
    cotangent = torch.randn(g.num_nodes(), _CHANNELS)
    calls = 10 if g.num_edges() < 100_000 else 1
    times: dict[tuple[str, bool], list[float]] = {}

    def once(training: bool, enabled: bool) -> None:
        with g.local_scope(), torch.set_grad_enabled(training):
            g.ndata["h"] = x
            start = time.process_time()
            out = call(g)
            middle = time.process_time()
            times.setdefault(("forward" if training else "inference", enabled), []).append(
                middle - start
            )
            if training:
                out.backward(cotangent)
                times.setdefault(("backward", enabled), []).append(time.process_time() - middle)

    routed, rounds = False, 0
    end = time.monotonic() + seconds
    while rounds < 2 or time.monotonic() < end:
        for enabled in (False, True):
            fastgraph.enable() if enabled else fastgraph.disable()
            fastgraph.status().reset()
            for training in (False, True):
                if calls > 1 or rounds == 0:  # a call that prepares or traces is not counted
                    kept = {key: len(found) for key, found in times.items()}
                    once(training, enabled)
                    for key, found in times.items():
                        del found[kept.get(key, 0) :]
                for _ in range(calls):
                    once(training, enabled)
            routed |= any(row.programs for row in fastgraph.status().rows)
        rounds += 1
    fastgraph.disable()
    medians = {
        f"{part} {'b' if enabled else 'a'}": 1000 * statistics.median(values)
        for (part, enabled), values in times.items()
    }
    return {**medians, "routed": routed}


def _row(cell: dict[str, Any]) -> str:
    shown = [cell["graph"], cell["case"]]
    for part in ("inference", "forward", "backward"):
        a, b = cell[f"{part} a"], cell[f"{part} b"]
        shown += [f"{a:.3g}", f"{b:.3g}", f"{a / b:.2f}x"]
    return f"| {' | '.join([*shown, 'program' if cell['routed'] else 'too small'])} |"


def _markdown(results: dict[str, Any]) -> str:
    lines = [
        "# Functions of users in DGL",
        "",
        f"`{results['command']}`",
        "",
        f"{results['channels']} channels, float32. Medians of processor time in milliseconds on",
        "one thread, DGL and fastgraph in turns, and how many times as fast. *too small*: DGL's",
        "code ran, with the decision before it.",
        "",
        "| graph | functions | inference, DGL | ours | | forward, DGL | ours | | backward, DGL "
        "| ours | | by |",
        "| --- | --- |" + " ---: |" * 9 + " --- |",
        *map(_row, results["cells"]),
        "",
        *machine_table(results["machine"]),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
