"""Attention over neighbourhoods with a bias of its scores, beside the same without one.

    FASTGRAPH_DATA=DATA PYTHONPATH=. MALLOC_TRIM_THRESHOLD_=4000000000 \
        MALLOC_MMAP_THRESHOLD_=4000000000 python benchmarks/edge_bias.py

Freed memory is kept: otherwise which way of several gets new pages from the system depends on what
ran before it, and decides about small graphs.

``ops.attention`` with a table of a number for each type of edges and head, whose gradient is wanted
or not, and with a number for each edge and head. Besides ``looked up``: the table's rows of all
edges are stored by torch, and given as those. Times are the processor's, on one thread, lower
quartiles of all in turns. Results go to ``benchmarks/results/<date>-edge-bias.json`` and ``.md``.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from edge_features import interleave, lattice, molecules
from measure.output import RESULTS, machine_table, publish

TYPES = 16
"""Of edges, whose numbers are bytes."""

WAYS = ("none", "table", "table, fixed", "looked up", "edges")


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--graphs", default="molecules,lattice,tolokers", show_default=True)
@click.option("--shapes", default="8x16,4x64", show_default=True, help="heads x channels of each")
@click.option("--rounds", default=15, show_default=True)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
def main(graphs: str, shapes: str, rounds: int, out: Path) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    from measure.machine import machine_facts

    torch.set_num_threads(1)
    console = Console(stderr=True)
    cells = []
    for name in graphs.split(","):
        data = _graph(name)
        for heads, channels in (map(int, shape.split("x")) for shape in shapes.split(",")):
            for dropout in (0.0, 0.3):
                found = _measure(data, heads, channels, dropout, rounds)
                cell = {"graph": data.name, "nodes": data.num_nodes, "edges": data.num_edges}
                cell |= {"heads": heads, "channels": channels, "dropout": dropout}
                cells.append(cell | {"milliseconds": found})
                console.print(*_rows(cells[-1]), sep="\n")
    results = {
        "command": shlex.join(["python", "benchmarks/edge_bias.py", *sys.argv[1:]]),
        "machine": machine_facts(1),
        "cells": cells,
    }
    publish(console, out, "edge-bias", results, _markdown(results))


def _graph(name: str) -> Any:
    if name == "molecules":
        return molecules()
    if name == "lattice":
        return lattice()
    from measure.graphs import load

    return load(name)


def _measure(data: Any, heads: int, channels: int, dropout: float, rounds: int) -> dict[str, Any]:
    """Lower quartiles of the milliseconds of each way, forward alone and with the gradients."""
    import torch

    from fastgraph import ops

    torch.manual_seed(0)
    nodes, edges, index = data.num_nodes, data.num_edges, data.edge_index
    inputs = [torch.randn(nodes, heads, channels, requires_grad=True) for _ in range(3)]
    table = torch.randn(TYPES, heads, requires_grad=True)
    types = torch.randint(TYPES, (edges,), dtype=torch.uint8)
    wide = types.long()
    of_edges = torch.randn(edges, heads, requires_grad=True)
    grad = torch.randn(nodes, heads, channels)
    seed = torch.tensor([7])

    def steps(bias: Callable[[], dict[str, Any]], *learned: Any) -> dict[str, Callable[[], Any]]:
        def forward() -> Any:
            return ops.attention(*inputs, index, dropout=dropout, seed=seed, **bias())[0]

        def both() -> Any:
            return torch.autograd.grad(forward(), (*inputs, *learned), grad)

        def inference() -> Any:
            with torch.no_grad():
                return forward()

        return {"forward": inference, "training": both}

    ways = {
        "none": steps(dict),
        "table": steps(lambda: {"bias": table, "bias_index": types}, table),
        "table, fixed": steps(lambda: {"bias": table.detach(), "bias_index": types}),
        "looked up": steps(lambda: {"bias": table[wide]}, table),
        "edges": steps(lambda: {"bias": of_edges}, of_edges),
    }
    assert tuple(ways) == WAYS
    found: dict[str, Any] = {}
    for kind in ("forward", "training"):
        spreads = interleave({way: (by[kind], False) for way, by in ways.items()}, rounds)
        found[kind] = {way: spread["lower_quartile"] for way, spread in spreads.items()}
    return found


def _rows(cell: dict[str, Any]) -> list[str]:
    rows = []
    for kind, times in cell["milliseconds"].items():
        own = [f"{times['none']:.4g}", *(f"{times[way] / times['none']:.2f}x" for way in WAYS[1:])]
        shape = (cell["graph"], f"{cell['heads']} x {cell['channels']}", cell["dropout"], kind)
        rows.append("| " + " | ".join([*map(str, shape), *own]) + " |")
    return rows


def _markdown(results: dict[str, Any]) -> str:
    rows = [row for cell in results["cells"] for row in _rows(cell)]
    sizes = {c["graph"]: f"{c['nodes']:,} nodes and {c['edges']:,} edges" for c in results["cells"]}
    lines = [
        "# Attention with a bias of its scores",
        "",
        f"`{results['command']}`",
        "",
        "`ops.attention` in float32, lower quartiles of processor time on one thread of a machine",
        "that others used, too, in turns. `none` has no bias, in milliseconds; the others say how",
        f"many times as long they take. `table` has {TYPES} types of edges, and its gradient is",
        "computed but in `table, fixed`; `looked up` is what torch stores of it for edges, given",
        "as `edges` are: a learned number for each edge and head.",
        "",
        *(f"- {graph}: {size}" for graph, size in sizes.items()),
        "",
        "| graph | heads x channels | dropout | pass | none, ms | " + " | ".join(WAYS[1:]) + " |",
        "| --- | --- | ---: | --- | ---: |" + " ---: |" * len(WAYS[1:]),
        *rows,
        "",
        *machine_table(results["machine"]),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
