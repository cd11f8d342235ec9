"""Attention as algebra by fastgraph.sparse, beside DGL's message passing and torch.sparse.

    FASTGRAPH_DATA=... PYTHONPATH=. .venv-dgl-2.1.0/bin/python benchmarks/sparse.py

Dot products where a matrix has entries, the softmax of each row, the product with features; of one
head, and of eight with heads last, as in ``dgl.sparse``, beside our operators with heads first.
Times are by the processor's clock on one thread, lower quartiles of all in turns. Results go to
``benchmarks/results/<date>-sparse.json`` and ``.md``.
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

_HEADS = 8


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--graphs", default="cora,tolokers", show_default=True)
@click.option("--channels", default=64, show_default=True, help="Of all heads together.")
@click.option("--rounds", default=8, show_default=True)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
def main(graphs: str, channels: int, rounds: int, out: Path) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when DGL is loaded
    os.environ.setdefault("DGLBACKEND", "pytorch")
    import fastgraph.dgl

    fastgraph.dgl.fix_import()
    import torch

    from measure.machine import machine_facts
    from measure.turns import Effort
    from measure.ways import milliseconds

    torch.set_num_threads(1)
    console = Console(stderr=True)
    cells = []
    for name in graphs.split(","):
        for heads in (1, _HEADS):
            ways = _ways(name, channels, heads)
            for training in (False, True):
                found = milliseconds(ways, training, Effort(turn=0.05, rounds=rounds, steps=20))
                facts = {"graph": name, "heads": heads, "training": training}
                cells.append({**facts, "milliseconds": found})
                console.print(_row(cells[-1]))
    results = {
        "command": shlex.join(["python", "benchmarks/sparse.py", *sys.argv[1:]]),
        "machine": machine_facts(1),
        "channels": channels,
        "cells": cells,
    }
    publish(console, out, "sparse", results, _markdown(results))


_WAYS = ("DGL's message passing", "fastgraph.sparse", "torch.sparse", "our operators, heads first")


def _ways(name: str, channels: int, heads: int) -> dict[str, Callable[[], Any]]:
    """Calls of attention by their names, each of tensors in the layout that is usual for it."""
    import dgl
    import torch

    import fastgraph.sparse as fgs
    from fastgraph import ops
    from measure.graphs import load

    data = load(name)
    col, row = data.edge_index
    n, each = data.num_nodes, channels // heads
    torch.manual_seed(0)
    first = [torch.randn(n, heads, each) for _ in range(3)]  # queries, keys, features
    graph = dgl.graph((col, row), num_nodes=n)
    matrix = fgs.from_edge_index(data.edge_index, num_nodes=n)
    indices = matrix.indices()

    def leaves(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [t.contiguous().requires_grad_() for t in tensors]

    q, k, v = leaves([t.clone() for t in first])
    last = leaves([(t.squeeze(1) if heads == 1 else t.transpose(1, 2)).clone() for t in first])

    def dgls() -> Any:
        scores = dgl.ops.u_dot_v(graph, k, q)
        return dgl.ops.u_mul_e_sum(graph, v, dgl.ops.edge_softmax(graph, scores)), (q, k, v)

    def ours() -> Any:
        q, k, v = last
        scores = fgs.bsddmm(matrix, q, k.transpose(0, 1))
        return fgs.bspmm(fgs.softmax(scores), v), last

    def torchs() -> Any:
        q, k, v = last
        scores = torch.sparse_coo_tensor(
            indices, (q[row] * k[col]).sum(-1), (n, n), is_coalesced=False
        )
        return torch.sparse.mm(torch.sparse.softmax(scores, 1), v), last

    def operators() -> Any:
        scores = ops.sddmm(k, q, data.edge_index)
        weight = ops.edge_softmax(scores, data.edge_index, num_out=n)
        return ops.spmm(v, data.edge_index, weight), (q, k, v)

    found: list[Callable[[], Any] | None] = [dgls, ours, torchs if heads == 1 else None, operators]
    return {way: call for way, call in zip(_WAYS, found, strict=True) if call is not None}


def _row(cell: dict[str, Any]) -> str:
    found = cell["milliseconds"]
    shown = [f"{found[way]:.3g}" if way in found else "" for way in _WAYS]
    kind = "forward and backward" if cell["training"] else "forward"
    return f"| {' | '.join([cell['graph'], str(cell['heads']), kind, *shown])} |"


def _markdown(results: dict[str, Any]) -> str:
    lines = [
        "# Attention as algebra",
        "",
        f"`{results['command']}`",
        "",
        f"{results['channels']} channels of all heads together, float32. Lower quartiles of",
        "processor time in milliseconds on one thread, all ways in turns.",
        "",
        f"| graph | heads | pass | {' | '.join(_WAYS)} |",
        "| --- | ---: | --- |" + " ---: |" * len(_WAYS),
        *map(_row, results["cells"]),
        "",
        *machine_table(results["machine"]),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
