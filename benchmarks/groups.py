"""Reductions of groups of rows outside message passing: PyG's functions beside the operators.

    FASTGRAPH_DATA=... PYTHONPATH=. python benchmarks/groups.py [--name NAME]

Sums, means, maxima and softmaxes of batches and of the edges of nodes, for an index that is new at
each call and for one that is used again, whatever size fastgraph leaves to PyG. Processor time on
one thread, in turns. Results go to ``benchmarks/results/<date>-<name>.json`` and ``.md``.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track

from measure.output import RESULTS, publish

OPERATIONS = ("sum", "mean", "max", "softmax")
CHANNELS = (1, 8, 64)


def indices() -> Iterator[tuple[str, Any, int]]:
    """The name of each index, the groups of its rows, and how many groups there are."""
    import torch

    generator = torch.Generator().manual_seed(0)

    def batch(graphs: int, least: int, most: int) -> Any:
        return torch.arange(graphs).repeat_interleave(
            torch.randint(least, most, (graphs,), generator=generator)
        )

    yield "128 molecules", batch(128, 18, 33), 128
    yield "100 graphs of 380 nodes", batch(100, 200, 560), 100
    rows = 1 << 17
    mixed = torch.randint(rows // 16, (rows,), generator=generator)
    yield "131,072 rows in 8,192 groups, sorted", mixed.sort()[0], rows // 16
    yield "131,072 rows in 8,192 groups", mixed, rows // 16
    if os.environ.get("FASTGRAPH_DATA"):
        from measure.graphs import load

        graph = load("tolokers")
        yield "destinations of tolokers", graph.edge_index[1], graph.num_nodes


def measure(operation: str, index: Any, groups: int, channels: int, training: bool) -> Any:
    """Milliseconds of PyG's code, and how much faster operators are: new index, known index."""
    import torch
    from torch_geometric import utils

    import fastgraph
    from fastgraph.graphs.repeats import REPEATS
    from fastgraph.routing.sizes import is_too_little_of_groups
    from measure.turns import Effort, Side
    from measure.turns import measure as beside

    x = torch.randn(len(index), channels, requires_grad=training)

    def compute(index: Any) -> Any:
        if operation == "softmax":
            return utils.softmax(x, index, num_nodes=groups)
        return utils.scatter(x, index, dim_size=groups, reduce=operation)

    grad = torch.randn_like(compute(index))
    given = [index]

    def step() -> None:
        out = compute(given[0])
        if training:
            torch.autograd.grad(out, x, grad)

    def renew() -> None:
        REPEATS.clear()
        given[0] = index.clone()

    def enabled() -> Any:
        return fastgraph.enabled(min_edges=0)

    found = []
    prepare: Callable[[], None]
    for prepare in (renew, lambda: None):
        given[0] = index
        sides = Side(step, prepare), Side(step, prepare, enabled)
        found.append(beside(*sides, Effort()))
    new, known = found
    kind = {"mean": "sum", "max": "extremum"}.get(operation, operation)
    return {
        "plain_ms": 1e3 * new.plain,
        "new": new.ratio,
        "known": known.ratio,
        "routed": not is_too_little_of_groups(kind, x),
    }


def markdown(results: dict[str, Any]) -> str:
    """The whole report."""
    from measure.report import machine_lines, table

    rows = [
        [
            f"{cell['index']}",
            f"{cell['operation']}",
            f"{cell['channels']}",
            "training" if cell["training"] else "inference",
            f"{cell['plain_ms']:.3f}",
            f"{cell['new']:.2f}x",
            f"{cell['known']:.2f}x",
            "yes" if cell["routed"] else "",
        ]
        for cell in results["cells"]
    ]
    return "\n".join(
        [
            "# Reductions of groups of rows",
            "",
            f"`{results['command']}`; milliseconds of PyG's code, forward, with the gradient where "
            "training, and how much faster operators are. *Routed* are those that are large enough "
            "to be, by default.",
            "",
            *machine_lines(results["machine"]),
            *table(
                ["index", "reduction", "channels", "", "PyG, ms", "new", "known", "routed"], rows
            ),
        ]
    )


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
@click.option("--name", default="groups", show_default=True, help="Of the results.")
def main(out: Path, name: str) -> None:
    import torch

    from measure.machine import machine_facts

    torch.set_num_threads(1)
    torch.manual_seed(0)
    cells = [
        (label, index, groups, operation, channels, training)
        for label, index, groups in indices()
        for operation in OPERATIONS
        for channels in CHANNELS
        for training in (False, True)
    ]
    results: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/groups.py", *sys.argv[1:]]),
        "machine": machine_facts(1),
        "cells": [],
    }
    console = Console(stderr=True)
    for label, index, groups, operation, channels, training in track(cells, console=console):
        facts = {
            "index": label,
            "rows": len(index),
            "groups": groups,
            "operation": operation,
            "channels": channels,
            "training": training,
        }
        figures = measure(operation, index, groups, channels, training)
        results["cells"].append({**facts, **figures})
    publish(console, out, name, results, markdown(results))


if __name__ == "__main__":
    main()
