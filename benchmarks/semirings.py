"""Products over semirings beside the same of torch's operators.

    FASTGRAPH_DATA=... PYTHONPATH=. python benchmarks/semirings.py

Torch gathers features of all entries, computes messages and scatters them: by ``scatter_reduce``,
by ``index_add``, and for ``logsumexp`` by both. Products of a matrix with itself are made of pairs
of entries that are looked for anew at each call, or known. Times are by the processor's clock on
one thread, lower quartiles of all in turns. Results go to ``<date>-semirings.json`` and ``.md`` in
``benchmarks/results``.
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

from measure.output import RESULTS, machine_table, publish

SEMIRINGS = (
    "min_plus",
    "min_plus, winner",
    "max_second",
    "max_times",
    "logsumexp_plus",
    "plus_plus",
    "mean_times",
    "weighted_mean_second",
)


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--graphs", default="cora,tolokers,debian,wing", show_default=True)
@click.option("--channels", default=64, show_default=True)
@click.option("--rounds", default=6, show_default=True)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
def main(graphs: str, channels: int, rounds: int, out: Path) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    from measure.machine import machine_facts

    torch.set_num_threads(1)
    console = Console(stderr=True)
    cells, squares = [], []
    for name in graphs.split(","):
        for semiring in SEMIRINGS:
            for training in (False, True):
                torchs, ours = _product(name, semiring, channels, training)
                found = {"graph": name, "semiring": semiring, "training": training}
                cells.append(found | _beside(torchs, ours, rounds))
                console.print(_row(cells[-1]))
        if name in ("cora", "wing"):
            for training in (False, True):
                anew, known = _square(name, training)
                found = {"graph": name, "training": training}
                squares.append(found | _beside(anew, known, rounds))
                console.print(squares[-1])
    results = {
        "command": shlex.join(["python", "benchmarks/semirings.py", *sys.argv[1:]]),
        "machine": machine_facts(1),
        "channels": channels,
        "cells": cells,
        "squares": squares,
    }
    publish(console, out, "semirings", results, _markdown(results))


def _beside(plain: Callable[[], object], ours: Callable[[], object], rounds: int) -> dict[str, Any]:
    from measure.turns import Effort, Side, measure

    found = measure(Side(plain), Side(ours), Effort(turn=0.05, rounds=rounds, steps=20))
    return {"plain": 1000 * found.plain, "ours": 1000 * found.ours}


def _product(
    name: str, semiring: str, channels: int, training: bool
) -> tuple[Callable[[], object], Callable[[], object]]:
    """A step by torch's operators and one by ours."""
    import torch

    import fastgraph.sparse as fgs
    from measure.graphs import load

    data = load(name)
    n = data.num_nodes
    torch.manual_seed(0)
    val = torch.rand(data.num_edges).requires_grad_(training)
    x = torch.randn(n, channels).requires_grad_(training)
    a = fgs.from_edge_index(data.edge_index, val, num_nodes=n)
    col, row = data.edge_index
    semiring, _, ties = semiring.partition(", ")
    add, multiply = semiring.rsplit("_", 1)

    def gathered() -> Any:
        of_entries, features = val.unsqueeze(1), x[col]
        message = features
        if multiply != "second":
            message = of_entries * features if multiply == "times" else of_entries + features
        zeros = torch.zeros(n, channels)
        index = row.unsqueeze(1).expand_as(message)
        if add in ("min", "max"):
            return zeros.scatter_reduce(0, index, message, f"a{add}", include_self=False)
        if add == "mean":
            return zeros.scatter_reduce(0, index, message, "mean", include_self=False)
        if add == "weighted_mean":
            sums = zeros.index_add(0, row, of_entries * message)
            return sums / torch.zeros(n, 1).index_add(0, row, of_entries)
        if add == "plus":
            return zeros.index_add(0, row, message)
        most = zeros.scatter_reduce(0, index, message.detach(), "amax", include_self=False)
        return zeros.index_add(0, row, (message - most[row]).exp()).log() + most

    def ours() -> Any:
        return fgs.matmul(a, x, semiring=semiring, ties=ties or "split")

    grad = torch.randn(n, channels)
    leaves = [x] if multiply == "second" and add != "weighted_mean" else [val, x]

    def step_of(call: Callable[[], Any]) -> Callable[[], object]:
        return (lambda: torch.autograd.grad(call(), leaves, grad)) if training else call

    return step_of(gathered), step_of(ours)


def _square(name: str, training: bool) -> tuple[Callable[[], object], Callable[[], object]]:
    """The product of a matrix with itself, by pairs that are looked for and by known ones."""
    import torch

    import fastgraph.sparse as fgs
    from fastgraph.graphs.memo import MEMO
    from measure.graphs import load

    data = load(name)
    a = fgs.from_edge_index(data.edge_index, num_nodes=data.num_nodes).coalesce()
    val = torch.rand(a.nnz).requires_grad_(training)
    a = fgs.val_like(a, val)

    def known() -> object:
        out = (a @ a).val
        return torch.autograd.grad(out.sum(), val) if training else out

    def anew() -> object:
        MEMO.forget_named("pairs")
        return known()

    return anew, known


def _row(cell: dict[str, Any]) -> str:
    kind = "forward and backward" if cell["training"] else "forward"
    first = [cell["graph"], *([cell["semiring"]] if "semiring" in cell else []), kind]
    times = [f"{cell[side]:.3g}" for side in ("plain", "ours")]
    ratio = f"{cell['plain'] / cell['ours']:.2f}"
    return f"| {' | '.join([*first, *times, ratio])} |"


def _markdown(results: dict[str, Any]) -> str:
    lines = [
        "# Products over semirings",
        "",
        f"`{results['command']}`",
        "",
        f"{results['channels']} channels, float32. Lower quartiles of processor time in",
        "milliseconds on one thread of a machine that others used, too; both ways in turns.",
        "",
        "| graph | semiring | pass | torch's operators | fastgraph.sparse | ratio |",
        "| --- | --- | --- | ---: | ---: | ---: |",
        *map(_row, results["cells"]),
        "",
        "Products of a matrix with itself:",
        "",
        "| graph | pass | pairs looked for | pairs known | ratio |",
        "| --- | --- | ---: | ---: | ---: |",
        *map(_row, results["squares"]),
        "",
        *machine_table(results["machine"]),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
