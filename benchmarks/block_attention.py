"""Attention by sub-blocks of 16 rows beside attention by rows.

    PYTHONPATH=. .venv/bin/python benchmarks/block_attention.py

``fastgraph.ops.block_attention`` and ``ops.attention`` on 8,192 nodes of cliques of several sizes,
on random graphs, and on a graph of clusters before and after ``fastgraph.nn.Reformation``. Times
are by the processor's clock on one thread, lower quartiles of all in turns. Results go to
``benchmarks/results/<date>-block-attention.json`` and ``.md``.
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

from measure.output import RESULTS, machine_table, publish

NODES = 8192


@click.command(help=__doc__.split("\n\n")[0])
@click.option(
    "--shapes", default="64x8,64x2,64x1,128x8", show_default=True, help="channels x heads"
)
@click.option("--rounds", default=6, show_default=True)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
def main(shapes: str, rounds: int, out: Path) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    from measure.machine import machine_facts
    from measure.turns import Effort, Side, measure

    torch.set_num_threads(1)
    console, cells = Console(stderr=True), []
    for shape in shapes.split(","):
        channels, heads = map(int, shape.split("x"))
        for name, sources, ptr in _graphs():
            for biased in (False, True):
                for training in (False, True):
                    rows, blocks = _ways(sources, ptr, channels, heads, biased, training)
                    found = measure(Side(rows), Side(blocks), Effort(0.03, rounds, 20))
                    cell = {"graph": name, "channels": channels, "heads": heads, "biased": biased}
                    cell |= {"training": training, "fill": _fill(sources, ptr)}
                    cell |= {"rows": 1000 * found.plain, "blocks": 1000 * found.ours}
                    cells.append(cell)
                    console.print(_row(cell))
    results = {
        "command": shlex.join(["python", "benchmarks/block_attention.py", *sys.argv[1:]]),
        "machine": machine_facts(1),
        "cells": cells,
    }
    publish(console, out, "block-attention", results, _markdown(results))


def _graphs() -> Iterator[tuple[str, Any, Any]]:
    """Names, sources by destination and offsets."""
    import torch

    from fastgraph.nn import Reformation, dual_pattern

    for size in (16, 32, 64):
        first = torch.arange(NODES) // size * size
        sources = (first.unsqueeze(1) + torch.arange(size)).flatten()
        yield f"cliques of {size}", sources, size * torch.arange(NODES + 1)
    torch.manual_seed(0)
    yield "16 random edges", torch.randint(NODES, (16 * NODES,)), 16 * torch.arange(NODES + 1)
    cluster = torch.arange(NODES) // 1024
    target = torch.arange(NODES).repeat_interleave(16)
    near = torch.randint(1024, target.shape) + 1024 * cluster[target]
    index = torch.stack([torch.where(torch.rand(target.shape) < 0.8, near, 0), target])
    far = index[0] == 0
    index[0, far] = torch.randint(NODES, (int(far.sum()),))
    pattern = dual_pattern(index, NODES)
    yield "8 clusters", pattern.sources, pattern.ptr
    made = Reformation("elastic", clusters=cluster)
    assert made.tuner is not None
    made.tuner.index = 6
    entries = made.entries(pattern, 256)
    assert entries is not None
    yield "8 clusters, reformed", entries.sources, entries.ptr


def _fill(sources: Any, ptr: Any) -> float:
    """Edges of a column of 16 rows."""
    from fastgraph.graphs.graph import Graph
    from fastgraph.graphs.windows import windows_of

    return windows_of(Graph(sources, NODES, NODES, ptr=ptr).by_destination).fill


def _ways(
    sources: Any, ptr: Any, channels: int, heads: int, biased: bool, training: bool
) -> tuple[Callable[[], None], Callable[[], None]]:
    import torch

    from fastgraph import ops

    shape = NODES, heads, channels // heads
    tensors = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    grad, learned, given = torch.randn(shape), list(tensors), {}
    if biased:
        bias = torch.randn(5, heads, requires_grad=True)
        given = {"bias": bias, "bias_index": torch.randint(5, sources.shape).to(torch.uint8)}
        learned.append(bias)

    def step(operator: Any) -> Callable[[], None]:
        def run() -> None:
            with torch.set_grad_enabled(training):
                out = operator(*tensors, sources, ptr=ptr, **given)[0]
            if training:
                torch.autograd.grad(out, learned, grad)

        return run

    return step(ops.attention), step(ops.block_attention)


def _row(cell: dict[str, Any]) -> str:
    kind = "training" if cell["training"] else "inference"
    bias = "a table" if cell["biased"] else "none"
    shape = f"{cell['channels']} x {cell['heads']}"
    times = [f"{cell[way]:.3g}" for way in ("rows", "blocks")]
    ratio = f"{cell['rows'] / cell['blocks']:.2f}"
    fields = [cell["graph"], f"{cell['fill']:.1f}", shape, bias, kind, *times, ratio]
    return "| " + " | ".join(fields) + " |"


def _markdown(results: dict[str, Any]) -> str:
    lines = [
        "# Attention by sub-blocks",
        "",
        f"`{results['command']}`",
        "",
        f"float32, {NODES:,} nodes, lower quartiles of processor time in milliseconds on one",
        "thread of a machine that others used, too, in turns. Fill is the edges of a column of 16",
        "rows. The last column says how many times as long rows take.",
        "",
        "| graph | fill | channels x heads | bias | pass | rows | sub-blocks | ratio |",
        "| --- | ---: | --- | --- | --- | ---: | ---: | ---: |",
        *map(_row, results["cells"]),
        "",
        *machine_table(results["machine"]),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
