"""Sums and attention that gather features at once, and panel by panel (csrc/cpu/panels.h).

    python benchmarks/panels.py [--quick]

Graphs with edges between random nodes show for which numbers of edges panels pay. Results go to
``benchmarks/results/<date>-panels.json`` and ``.md``.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track

from measure.output import RESULTS, publish

CHANNELS = 256
# By `force_panels` of the native library: -1 for none, 0 for its own choice.
COLUMNS = {"at once": -1, "16": 16, "32": 32, "64": 64, "128": 128, "chosen": 0}


@contextmanager
def _panels(channels: int) -> Iterator[None]:
    from fastgraph.machine import native

    native.library().force_panels(channels)
    try:
        yield
    finally:
        native.library().force_panels(0)


def _random_graph(nodes: int, degree: int) -> Any:
    import torch

    from measure.graphs import GraphData

    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(nodes, (2, nodes * degree), generator=generator)
    return GraphData(f"random, {degree} edges a node", edges, nodes)


def _sum(data: Any, dtype: str, weighted: bool) -> Callable[[], list[Any]]:
    """Forward and backward of a sum of all channels."""
    import torch

    from fastgraph import ops

    index = _sorted_edges(data)
    x = torch.randn(data.num_nodes, CHANNELS, dtype=getattr(torch, dtype), requires_grad=True)
    weight = torch.rand(data.num_edges, dtype=x.dtype) if weighted else None
    grad = torch.randn_like(x)

    def step() -> list[Any]:
        out = ops.spmm(x, index, weight)
        return [out.detach(), *torch.autograd.grad(out, x, grad)]

    return step


def _gat(data: Any, dtype: str, heads: int, channels: int) -> Callable[[], list[Any]]:
    """The same of attention."""
    import torch

    from fastgraph import ops

    index, nodes = _sorted_edges(data), data.num_nodes
    shapes = (nodes, heads, channels), (nodes, heads), (nodes, heads)
    x, src, dst = (torch.randn(s, dtype=getattr(torch, dtype), requires_grad=True) for s in shapes)
    grad = torch.randn_like(x)

    def step() -> list[Any]:
        out = ops.gat(x, src, dst, index)[0]
        return [out.detach(), *torch.autograd.grad(out, [x, src, dst], grad)]

    return step


def _sorted_edges(data: Any) -> Any:
    return data.edge_index[:, data.edge_index[1].argsort(stable=True)].contiguous()


KERNELS: dict[str, Callable[[Any, str], Callable[[], list[Any]]]] = {
    "sum": partial(_sum, weighted=False),
    "weighted sum": partial(_sum, weighted=True),
    "gat, 8 x 32": partial(_gat, heads=8, channels=32),
    "gat, 8 x 8": partial(_gat, heads=8, channels=8),
    "gat, 1 x 64": partial(_gat, heads=1, channels=64),
}
# Norm of the difference over the norm; heads that are taken one by one add up in another order.
TOLERANCES = {"float32": 1e-5, "float64": 1e-13, "bfloat16": 2e-2}


def measure(data: Any, dtype: str, kernel: str, rounds: tuple[int, int]) -> dict[str, Any]:
    """Milliseconds of forward and backward. Sums have the same bits in all columns."""
    import torch

    from measure.routing import ordering_after
    from measure.timing import Contestant, interleave

    torch.manual_seed(0)
    step = KERNELS[kernel](data, dtype)
    expected: Any = None
    contestants = []
    for name, channels in COLUMNS.items():
        with _panels(channels), ordering_after(0):
            found = step()
        expected = expected or found
        for one, other in zip(found, expected, strict=True):
            error = float((one.double() - other.double()).norm() / other.double().norm())
            if not error <= (TOLERANCES[dtype] if kernel.startswith("gat") else 0):
                raise RuntimeError(f"{kernel}, {name}: {error:.1e} from at once")
        contestants.append(Contestant(name, step, context=partial(_panels, channels)))
    interleave(contestants, rounds=rounds, budget=2)
    return {contestant.name: contestant.spread.to_json() for contestant in contestants}


def markdown(results: dict[str, Any]) -> str:
    """The whole report."""
    from measure.report import machine_lines, table

    rows = []
    for cell in results["cells"]:
        medians = {name: spread["median"] for name, spread in cell["times"].items()}
        gain = medians["at once"] / medians["chosen"]
        what = [cell["graph"], cell["dtype"], cell["kernel"]]
        rows.append([*what, *(f"{medians[name]:.1f}" for name in COLUMNS), f"{gain:.2f}x"])
    return "\n".join(
        [
            "# Panels",
            "",
            f"`{results['command']}`; sums of {CHANNELS} channels, and attention of heads times "
            "channels, forward and backward, medians in milliseconds: gathered at once, in panels "
            "of so many channels, which are part of a head in attention, and as the kernel "
            "chooses. Rows are [in order](../../docs/caching.md#the-order-of-rows) in all columns.",
            "",
            *machine_lines(results["machine"]),
            *table(["graph", "dtype", "kernel", *COLUMNS, "gain"], rows),
        ]
    )


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--dtypes", default="float32,float64,bfloat16", show_default=True)
@click.option("--degrees", default="8,16,32,64", show_default=True, help="Of random graphs.")
@click.option("--quick", is_flag=True, help="Fewer repetitions.")
def main(out: Path, threads: int, dtypes: str, degrees: str, quick: bool) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # read when torch is loaded
    import torch

    from measure.graphs import default_graphs, load
    from measure.machine import machine_facts

    torch.set_num_threads(threads)
    dense = load("tolokers" if "tolokers" in default_graphs() else "kronecker-14")
    cells: list[tuple[Callable[[], Any], str, str]] = [
        (lambda: dense, dtype, kernel) for dtype in dtypes.split(",") for kernel in KERNELS
    ]
    cells += [
        (partial(_random_graph, 12_000, int(degree)), "float32", kernel)
        for kernel in ("sum", "gat, 8 x 32")
        for degree in degrees.split(",")
    ]
    results: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/panels.py", *sys.argv[1:]]),
        "machine": machine_facts(threads),
        "cells": [],
    }
    for make, dtype, kernel in track(cells, "kernels", console=Console(stderr=True)):
        data = make()
        times = measure(data, dtype, kernel, (2, 4) if quick else (3, 12))
        results["cells"].append(
            {"graph": data.name, "dtype": dtype, "kernel": kernel, "times": times}
        )
    name = "panels-quick" if quick else "panels"
    publish(Console(stderr=True), out, name, results, markdown(results))


if __name__ == "__main__":
    main()
