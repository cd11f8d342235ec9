"""Expressions of fastgraph.sparse by one operator, beside separate ones and the operator itself.

    FASTGRAPH_DATA=... PYTHONPATH=. .venv/bin/python benchmarks/sparse_fused.py

Each form is a product with values that wait (fused), the same by one operator for each step, as
values that do not wait are computed (separate), and, where there is one, the operator itself,
called with tensors in its own layout (operator); with ``--upstream``, where DGL is installed, forms
of one head also by DGL's message passing, torch's sparse matrices and PyG's. Of one head, and of
eight, which stand last in matrices and are copied for operators. Times are by the processor's clock
on one thread, lower quartiles of all in turns.

Results go to ``benchmarks/results/<date>-sparse-fused.json`` and ``.md``.
"""

from __future__ import annotations

import itertools
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import psutil
from rich.console import Console

from measure.output import RESULTS, Record, machine_table, write_to

_HEADS = 8
_WAYS = ("fused", "separate", "operator")
_UPSTREAM = ("DGL", "torch.sparse", "PyG")


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--graphs", default="cora,tolokers", show_default=True)
@click.option("--channels", default="64", show_default=True, help="Of all heads together.")
@click.option("--forms", default="", help="Comma-separated; default: all.")
@click.option("--heads", default="1,8", show_default=True)
@click.option("--upstream", is_flag=True, help="Beside DGL, torch.sparse and PyG, too.")
@click.option("--name", default="sparse-fused", show_default=True, help="Of the results.")
@click.option("--rounds", default=8, show_default=True)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
def main(
    graphs: str,
    channels: str,
    forms: str,
    heads: str,
    upstream: bool,
    name: str,
    rounds: int,
    out: Path,
) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if upstream:
        os.environ.setdefault("DGLBACKEND", "pytorch")
        import fastgraph.dgl

        fastgraph.dgl.fix_import()
    import torch

    from measure.graphs import load
    from measure.machine import machine_facts
    from measure.turns import Effort
    from measure.ways import milliseconds

    torch.set_num_threads(1)
    console = Console(stderr=True)
    cells = []
    record = Record.fresh(out, name)
    for width, graph, number in itertools.product(
        map(int, channels.split(",")), graphs.split(","), map(int, heads.split(","))
    ):
        for form in _forms(graph, width, number, upstream):
            if forms and form not in forms.split(","):
                continue
            # Of a pattern of its own: what others did with one may decide.
            ways = _forms(graph, width, number, upstream)[form]
            for training in (False, True):
                effort = Effort(0.05, rounds, 20, again=0 if upstream else 2)
                fitting = ways
                if training and not _fits(load(graph).num_nodes):
                    fitting = {way: f for way, f in ways.items() if way != "torch.sparse"}
                found = milliseconds(fitting, training, effort)
                facts = {"graph": graph, "channels": width, "heads": number, "form": form}
                cells.append({**facts, "training": training, "milliseconds": found})
                record.add("cell", cells[-1])
                console.print(_row(cells[-1]), soft_wrap=True)
    results = {
        "command": shlex.join(["python", "benchmarks/sparse_fused.py", *sys.argv[1:]]),
        "machine": machine_facts(1),
        "cells": cells,
    }
    console.print(f"written to {write_to(record.stem, results, _markdown(results))}")
    record.path.unlink()


def _fits(num_nodes: int) -> bool:
    """True if torch's gradient of a sparse product fits memory: three matrices of all pairs."""
    return 3 * 4 * num_nodes**2 < psutil.virtual_memory().available


def _forms(
    name: str, channels: int, heads: int, upstream: bool
) -> dict[str, dict[str, Callable[[], Any]]]:
    """The ways of each form; every call returns its result and the tensors with a gradient."""
    import torch
    import torch.nn.functional as F

    import fastgraph.sparse as fgs
    from fastgraph import ops
    from fastgraph.sparse import products
    from measure.graphs import load

    data = load(name)
    n, each = data.num_nodes, channels // heads
    torch.manual_seed(0)
    matrix = fgs.from_edge_index(data.edge_index, num_nodes=n)
    pattern, ones = matrix.pattern, matrix.val
    index, ptr, transpose, _, _ = pattern.edges
    edges = {"ptr": ptr, "transpose": transpose}
    last = () if heads == 1 else (heads,)
    q, k, x = (torch.randn(n, each, *last, requires_grad=True) for _ in range(3))
    u, v = (torch.randn(n, *last, requires_grad=True) for _ in range(2))
    lengths = (torch.rand(n, *last) + 0.5).requires_grad_()
    qh, kh, xh = (torch.randn(n, heads, each, requires_grad=True) for _ in range(3))
    uh, vh = (torch.randn(n, heads, requires_grad=True) for _ in range(2))
    vector = torch.randn(each, *last, requires_grad=True)
    att = torch.randn(1, heads, each, requires_grad=True)
    scale = each**-0.5
    weight = ones if heads == 1 else ones.unsqueeze(1)

    def turned(t: torch.Tensor) -> torch.Tensor:
        return t.transpose(0, 1)

    def softmax_spmm(score: torch.Tensor, rate: float = 0.0) -> torch.Tensor:
        weights = F.dropout(products.softmax(pattern, score, 1), rate)
        return products.spmm(pattern, weights, x)

    def dots(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return products.sddmm(pattern, ones, a, turned(b))

    def sums() -> torch.Tensor:
        return weight * F.leaky_relu(pattern.by_row.gather(u) + pattern.by_column.gather(v), 0.2)

    def product_of_lengths() -> torch.Tensor:
        return pattern.by_row.gather(lengths) * pattern.by_column.gather(lengths)

    def dgls_gat() -> Any:
        e = F.leaky_relu(u[matrix.row] + v[matrix.col], 0.2)
        attended = fgs.val_like(matrix, e).softmax()
        return fgs.bspmm(fgs.val_like(attended, F.dropout(attended.val, 0.6)), x)

    virtual = fgs.dense, fgs.rows, fgs.cols

    def cosines() -> Any:
        dense, rows, cols = virtual
        return matrix * (dense(x) @ turned(x)) / (rows(lengths) * cols(lengths))

    def gatv2() -> Any:
        both = fgs.rows(q) + fgs.cols(x)
        return (matrix * (F.leaky_relu(both, 0.2) @ vector)).softmax() @ x

    def separate_gatv2() -> torch.Tensor:
        both = pattern.by_row.gather(q) + pattern.by_column.gather(x)
        return softmax_spmm((F.leaky_relu(both, 0.2) * vector).sum(1))

    def scaled() -> Any:
        return matrix * (fgs.rows(u) * fgs.cols(v)) @ x

    def separate_scaled() -> torch.Tensor:
        weights = pattern.by_row.gather(u) * pattern.by_column.gather(v)
        return products.spmm(pattern, weights, x)

    def similarities() -> Any:
        return matrix * (fgs.dense(q) @ turned(x))

    bias = torch.randn(pattern.nnz, *last, requires_grad=True)
    bias_h = torch.randn(pattern.nnz, heads, requires_grad=True)

    def biased() -> Any:
        scores = fgs.bsddmm(matrix, q, turned(k)).val * scale + bias
        return fgs.val_like(matrix, scores).softmax() @ x

    found = {
        "attention with a bias": {
            "fused": lambda: (biased(), (q, k, x, bias)),
            "separate": lambda: (softmax_spmm(dots(q, k) * scale + bias), (q, k, x, bias)),
            "operator": lambda: (
                ops.attention(qh, kh, xh, index, bias=bias_h, **edges)[0],
                (qh, kh, xh, bias_h),
            ),
        },
        "gatv2": {
            "fused": lambda: (gatv2(), (q, x, vector)),
            "separate": lambda: (separate_gatv2(), (q, x, vector)),
            "operator": lambda: (ops.gatv2(xh, qh, att, index, **edges)[0], (xh, qh, att)),
        },
        "gcn": {
            "fused": lambda: (scaled(), (u, v, x)),
            "separate": lambda: (separate_scaled(), (u, v, x)),
        },
        "row sums": {
            "fused": lambda: (similarities().sum(1), (q, x)),
            "separate": lambda: (pattern.by_row.reduce(dots(q, x), "sum"), (q, x)),
        },
        "column sums": {
            "fused": lambda: (similarities().sum(0), (q, x)),
            "separate": lambda: (pattern.by_column.reduce(dots(q, x), "sum"), (q, x)),
        },
        "row maxima": {
            "fused": lambda: (similarities().smax(1), (q, x)),
            "separate": lambda: (pattern.by_row.reduce(dots(q, x), "smax"), (q, x)),
        },
        "attention": {
            "fused": lambda: (
                (fgs.bsddmm(matrix, q, turned(k)) * scale).softmax() @ x,
                (q, k, x),
            ),
            "separate": lambda: (softmax_spmm(dots(q, k) * scale), (q, k, x)),
            "operator": lambda: (ops.attention(qh, kh, xh, index, **edges)[0], (qh, kh, xh)),
        },
        "gat": {
            "fused": lambda: (
                (matrix * F.leaky_relu(fgs.rows(u) + fgs.cols(v), 0.2)).softmax() @ x,
                (u, v, x),
            ),
            "separate": lambda: (softmax_spmm(sums()), (u, v, x)),
            "operator": lambda: (ops.gat(xh, uh, vh, index, **edges)[0], (uh, vh, xh)),
        },
        "gat as DGL's, with dropout": {
            "fused": lambda: (dgls_gat(), (u, v, x)),
            "separate": lambda: (softmax_spmm(sums(), 0.6), (u, v, x)),
            "operator": lambda: (ops.gat(xh, uh, vh, index, dropout=0.6, **edges)[0], (uh, vh, xh)),
        },
        "cosine": {
            "fused": lambda: (cosines().softmax() @ x, (x, lengths)),
            "separate": lambda: (
                softmax_spmm(dots(x, x) / product_of_lengths()),
                (x, lengths),
            ),
        },
        "va": {
            "fused": lambda: (fgs.bsddmm(matrix, x, turned(x)) @ x, (x,)),
            "separate": lambda: (products.spmm(pattern, dots(x, x), x), (x,)),
        },
        "agnn": {
            "fused": lambda: (cosines() @ x, (x, lengths)),
            "separate": lambda: (
                products.spmm(pattern, dots(x, x) / product_of_lengths(), x),
                (x, lengths),
            ),
        },
    }
    if upstream and heads == 1:
        from measure.algebra import upstream_forms

        tensors = {"q": q, "k": k, "x": x, "u": u, "v": v, "lengths": lengths, "bias": bias}
        for form, ways in upstream_forms(data, tensors, scale).items():
            found[form].update(ways)
    return found


def _row(cell: dict[str, Any]) -> str:
    found = cell["milliseconds"]
    ways = (*_WAYS, *_UPSTREAM)
    shown = [f"{found[way]:.3g}" if way in found else "" for way in ways]
    kind = "forward and backward" if cell["training"] else "forward"
    facts = [cell["graph"], cell["form"], str(cell["channels"]), str(cell["heads"]), kind]
    ratio = found["separate"] / found["fused"]
    return f"| {' | '.join([*facts, *shown, f'{ratio:.2f}'])} |"


def _markdown(results: dict[str, Any]) -> str:
    ways = (*_WAYS, *_UPSTREAM)
    lines = [
        "# Expressions by one operator",
        "",
        f"`{results['command']}`",
        "",
        "float32. Lower quartiles of processor time in milliseconds on one thread, all ways in",
        "turns; the last column is separate over fused. Torch's matrices have a gradient of all",
        "pairs of nodes, which is left out where it does not fit memory.",
        "",
        f"| graph | form | channels | heads | pass | {' | '.join(ways)} | ratio |",
        "| --- | --- | ---: | ---: | --- |" + " ---: |" * (len(ways) + 1),
        *map(_row, results["cells"]),
        "",
        *machine_table(results["machine"]),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
