"""The cost of attention for each edge, by the in-degree and the shape of heads.

    python benchmarks/low_degree.py [--name low-degree]

One thread, processor time, on random graphs with the same number of edges for each node. Results go
to ``benchmarks/results/<date>-<name>.json`` and ``.md``.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track

from measure.output import RESULTS, publish

DEGREES = (2, 4, 8, 32, 128)
SHAPES = ((8, 8), (4, 16), (8, 16), (1, 64), (4, 64))
EDGES = 1 << 14  # results that need no fresh pages

Call = Callable[[], Any]


def _calls(
    operator: str, degree: int, heads: int, channels: int, dropout: float = 0.0
) -> tuple[Call, Call]:
    """The forward pass, and the backward pass for all gradients; ``spmm`` has no dropout."""
    import torch

    from fastgraph import ops

    torch.manual_seed(0)
    nodes = EDGES // degree
    index = torch.stack([torch.randint(nodes, (EDGES,)), torch.arange(EDGES) // degree])
    node = (nodes, heads, channels)
    shapes = {
        "gat": (node, node[:2], node[:2]),
        "gatv2": (node, node, (1, heads, channels)),
        "attention": (node, node, node),
        "spmm": ((nodes, heads * channels),),
    }[operator]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]

    def forward() -> Any:
        if operator == "spmm":
            return ops.spmm(*inputs, index)
        return getattr(ops, operator)(*inputs, index, dropout=dropout)[0]

    out = forward()
    grad = torch.randn_like(out)

    def without_graph() -> None:
        with torch.no_grad():
            forward()

    def backward() -> None:
        torch.autograd.grad(out, inputs, grad, retain_graph=True)

    return without_graph, backward


def nanoseconds(call: Call, rounds: int) -> float:
    """Processor time for each edge in the fastest of some rounds."""
    call()
    found = []
    for _ in range(rounds):
        begin = time.process_time()
        call()
        found.append(time.process_time() - begin)
    return 1e9 * min(found) / EDGES


def markdown(results: dict[str, Any]) -> str:
    """The whole report."""
    from measure.report import machine_lines, table

    times = {
        (cell["operator"], tuple(cell["shape"]), cell["degree"]): cell for cell in results["cells"]
    }
    rows = []
    for operator, shape in dict.fromkeys(key[:2] for key in times):
        of = [times[operator, shape, degree] for degree in DEGREES]
        figures = [f"{cell['forward']:.0f} / {cell['backward']:.0f}" for cell in of]
        rows.append([operator, f"{shape[0]} x {shape[1]}", *figures])
    return "\n".join(
        [
            "# Attention by in-degree",
            "",
            f"`{results['command']}`; nanoseconds for each edge, forward / backward with all "
            "gradients, of one thread, by the number of edges that each node has.",
            "",
            *machine_lines(results["machine"]),
            *table(["operator", "heads x channels", *map(str, DEGREES)], rows),
        ]
    )


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
@click.option("--name", default="low-degree", show_default=True)
@click.option("--operators", default="gat,gatv2,attention,spmm", show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=25, show_default=True)
def main(out: Path, name: str, operators: str, rounds: int) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is loaded
    import torch

    from measure.machine import machine_facts

    torch.set_num_threads(1)
    results: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/low_degree.py", *sys.argv[1:]]),
        "machine": machine_facts(1),
        "cells": [],
    }
    kinds = [(o, s, d) for o in operators.split(",") for s in SHAPES for d in DEGREES]
    for operator, shape, degree in track(kinds, "kernels", console=Console(stderr=True)):
        forward, backward = _calls(operator, degree, *shape)
        results["cells"].append(
            {
                "operator": operator,
                "shape": shape,
                "degree": degree,
                "forward": nanoseconds(forward, rounds),
                "backward": nanoseconds(backward, rounds),
            }
        )
    publish(Console(stderr=True), out, name, results, markdown(results))


if __name__ == "__main__":
    main()
