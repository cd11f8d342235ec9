"""Attention of all pairs by torch's operations in blocks, beside the same graph by graph.

    PYTHONPATH=. .venv/bin/python benchmarks/dense_blocks.py

What ``ops.dense_attention`` does on devices for which no backend has a kernel, here on the CPU:
``blocks`` beside ``reference``, which stores all pairs, in one forward and backward pass. Memory is
the peak above what was resident before, in a process for each cell, and time the processor's on one
thread, lower quartiles of both in turns. What a GPU takes, no CPU tells. Results go to
``benchmarks/results/<date>-dense-blocks.json`` and ``.md``.
"""

from __future__ import annotations

import multiprocessing
import os
import shlex
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from dense_attention import TYPES, _sizes
from measure.output import RESULTS, machine_table, publish

BACKENDS = ("reference", "blocks")
_MIB = 2**20


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--batches", default="128 molecules,8 of 512,1 of 2048", show_default=True)
@click.option("--heads", default=8, show_default=True)
@click.option("--channels", default=8, show_default=True, help="Of a head.")
@click.option("--rounds", default=4, show_default=True)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
def main(batches: str, heads: int, channels: int, rounds: int, out: Path) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    from measure.machine import machine_facts

    console = Console(stderr=True)
    cells = []
    for batch in batches.split(","):
        for has_table in (False, True):
            for dropout in (0.0, 0.5):
                call = (batch, heads, channels, dropout, has_table)
                peaks = {name: _alone(_peak, name, *call) for name in BACKENDS}
                times = dict(zip(BACKENDS, _alone(_milliseconds, rounds, *call), strict=True))
                cell = {"batch": batch, "dropout": dropout, "table": has_table}
                cells.append(cell | {"peak": peaks, "milliseconds": times})
                console.print(_row(cells[-1]))
    results = {
        "command": shlex.join(["python", "benchmarks/dense_blocks.py", *sys.argv[1:]]),
        "heads": heads,
        "channels": channels,
        "machine": machine_facts(1),
        "cells": cells,
    }
    publish(console, out, "dense-blocks", results, _markdown(results))


def _alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a process of its own."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as process:
        return process.submit(function, *arguments).result()


def _step(
    batch: str, heads: int, channels: int, dropout: float, has_table: bool
) -> Callable[[], object]:
    """A forward and a backward pass, to be called."""
    import torch

    from fastgraph import ops

    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = _sizes(batch)
    ptr = torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)])
    shape = (int(sizes.sum()), heads, channels)
    inputs = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    grad = torch.randn(shape)
    given: dict[str, Any] = {"dropout": dropout}
    if has_table:
        types = torch.randint(0, TYPES, (int(sizes.square().sum()),)).to(torch.uint8)
        given |= {"bias": torch.randn(TYPES, heads, requires_grad=True), "pair_type": types}
        inputs.append(given["bias"])

    def step() -> object:
        out, _ = ops.dense_attention(*inputs[:3], ptr, **given)
        return torch.autograd.grad(out, inputs, grad)

    return step


def _peak(backend: str, batch: str, *options: Any) -> int:
    """Bytes at most above what was resident before."""
    import fastgraph
    from fastgraph.comparison.memory import release_freed, resident, restart_peak

    with fastgraph.enabled(backend=backend):
        _step("4 of 25", *options)()
        step = _step(batch, *options)
        release_freed()
        if not restart_peak():
            raise click.ClickException("this system does not let the peak start again")
        before = resident() or 0
        step()
        return (resident("VmHWM") or 0) - before


def _milliseconds(rounds: int, *options: Any) -> tuple[float, float]:
    import fastgraph
    from measure.turns import Effort, Side, measure

    step = _step(*options)
    plain, ours = (
        Side(step, context=lambda name=name: fastgraph.enabled(backend=name))  # type: ignore[misc]
        for name in BACKENDS
    )
    found = measure(plain, ours, Effort(0.02, rounds, 20, again=0))
    return 1000 * found.plain, 1000 * found.ours


def _row(cell: dict[str, Any]) -> str:
    kind = "table" if cell["table"] else "none"
    values = [f"{cell['peak'][name] / _MIB:.0f}" for name in BACKENDS]
    values += [f"{cell['milliseconds'][name]:.3g}" for name in BACKENDS]
    return f"| {cell['batch']} | {kind} | {cell['dropout']} | {' | '.join(values)} |"


def _markdown(results: dict[str, Any]) -> str:
    lines = [
        "# Attention of all pairs in blocks",
        "",
        f"`{results['command']}`",
        "",
        f"float32, {results['heads']} heads of {results['channels']}, a forward and a backward",
        "pass of `ops.dense_attention` on one thread of a machine that others used, too: the peak",
        "of resident memory above what was there before, in MiB, and lower quartiles of processor",
        "time in milliseconds, in turns. `reference` goes graph by graph and stores all pairs,",
        f"`blocks` has some at a time. A table has {TYPES} types.",
        "",
        "| batch | bias | dropout | reference, MiB | blocks, MiB | reference, ms | blocks, ms |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
        *map(_row, results["cells"]),
        "",
        *machine_table(results["machine"]),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
