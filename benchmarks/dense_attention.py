"""Attention of all nodes of each graph of a batch, beside padding and torch's own operator.

    PYTHONPATH=. .venv/bin/python benchmarks/dense_attention.py

First PyG's ``GPSConv``: the attention alone, which upstream pads by ``to_dense_batch``, and the
whole layer with a ``GINConv``, by its route. Then ``ops.dense_attention`` beside
``scaled_dot_product_attention`` on graphs of one size, which need no padding, without and with a
learned bias by types of pairs. Sizes of molecules
are drawn with the mean and the spread of those of ZINC, those of a long tail from a log-normal
distribution. Times are by the processor's clock on one thread, lower quartiles of all in turns.
Results go to ``benchmarks/results/<date>-dense-attention.json`` and ``.md``.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from measure.output import RESULTS, machine_table, publish

TYPES = 20
"""Of pairs, as distances in a molecule are."""

KINDS = ("attention", "GPSConv", "operator", "learned table", "table beside none")
"""The comparisons."""

BATCHES = (
    "128 molecules",
    "long tail",
    "32 of 100",
    "8 of 512",
    "1 of 2048",
    "1 of 150",
    "4 of 25",
    "2 of 10",
)


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--batches", default=",".join(BATCHES), show_default=True)
@click.option("--shapes", default="64x4", show_default=True, help="channels x heads")
@click.option("--what", "kinds", default=",".join(KINDS), show_default=True)
@click.option("--rounds", default=4, show_default=True)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
def main(batches: str, shapes: str, kinds: str, rounds: int, out: Path) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    from measure.machine import machine_facts
    from measure.turns import Effort

    torch.set_num_threads(1)
    console = Console(stderr=True)
    cells = []
    for batch in batches.split(","):
        for channels, heads in (map(int, shape.split("x")) for shape in shapes.split(",")):
            for dropout in (0.0, 0.5):
                for what, training, sides in _comparisons(batch, channels, heads, dropout):
                    if what not in kinds.split(","):
                        continue
                    plain, ours = _milliseconds(sides, training, Effort(0.02, rounds, 20))
                    cell = {"batch": batch, "channels": channels, "heads": heads}
                    cell |= {"dropout": dropout, "what": what, "training": training}
                    cells.append(cell | {"upstream": plain, "fastgraph": ours})
                    console.print(_row(cells[-1]))
    results = {
        "command": shlex.join(["python", "benchmarks/dense_attention.py", *sys.argv[1:]]),
        "machine": machine_facts(1),
        "cells": cells,
    }
    publish(console, out, "dense-attention", results, _markdown(results))


Way = Callable[[], Any]
Context = Callable[[], AbstractContextManager[object]]


def _sizes(batch: str) -> Any:
    import torch

    generator = torch.Generator().manual_seed(0)
    if batch == "128 molecules":
        drawn = 23.2 + 4.5 * torch.randn(128, generator=generator)
        return drawn.round().long().clamp(9, 37)
    if batch == "long tail":
        drawn = (3 + torch.randn(128, generator=generator)).exp()
        return drawn.round().long().clamp(2, 300)
    count, size = map(int, batch.split(" of "))
    return torch.full((count,), size)


def _comparisons(batch: str, channels: int, heads: int, dropout: float) -> Any:
    """Of each comparison what is computed, whether gradients are, and both ways with contexts."""
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch_geometric.nn import GINConv, GPSConv
    from torch_geometric.utils import to_dense_batch

    import fastgraph
    from fastgraph import ops
    from fastgraph.layers.multihead import self_attention
    from fastgraph.pyg import gps_conv

    torch.manual_seed(0)
    sizes = _sizes(batch)
    nodes, is_one = int(sizes.sum()), len(sizes) == 1
    index = None if is_one else torch.arange(len(sizes)).repeat_interleave(sizes)
    x = torch.randn(nodes, channels, requires_grad=True)
    edges = torch.randint(0, nodes, (2, 2 * nodes))
    conv = GINConv(nn.Linear(channels, channels))
    layer = GPSConv(channels, conv, heads, attn_kwargs={"dropout": dropout})

    def padded() -> Any:
        h, mask = to_dense_batch(x, index)
        return layer.attn(h, h, h, key_padding_mask=~mask, need_weights=False)[0][mask]

    def unpadded() -> Any:
        return self_attention(layer.attn, x, gps_conv.graph_offsets(x, index))

    def whole() -> Any:
        return layer(x, edges, index)

    for training in (True,) if dropout else (True, False):
        layer.train(training)
        yield "attention", training, [(padded, nullcontext), (unpadded, nullcontext)]
        if not dropout:
            yield "GPSConv", training, [(whole, nullcontext), (whole, fastgraph.enabled)]
    if int(sizes.min()) < int(sizes.max()):
        return
    shape = (3, len(sizes), heads, int(sizes[0]), channels // heads)
    stacked = torch.randn(shape, requires_grad=True)
    by_rows = stacked.detach().permute(0, 1, 3, 2, 4).reshape(3, nodes, heads, -1).contiguous()
    by_rows.requires_grad_()
    ptr = torch.arange(len(sizes) + 1) * sizes[0]

    def by_torch() -> Any:
        return F.scaled_dot_product_attention(*stacked.unbind(), dropout_p=dropout)

    def by_operator() -> Any:
        return ops.dense_attention(*by_rows.unbind(), ptr, dropout=dropout)[0]

    types = torch.randint(0, TYPES, (len(sizes) * int(sizes[0]) ** 2,)).to(torch.uint8)
    of_pairs = types.long().view(len(sizes), int(sizes[0]), -1)
    table = torch.randn(TYPES, heads, requires_grad=True)

    def biased_by_torch() -> Any:
        mask = table[of_pairs].permute(0, 3, 1, 2)
        return F.scaled_dot_product_attention(*stacked.unbind(), mask, dropout_p=dropout)

    def biased_by_operator() -> Any:
        options: dict[str, Any] = {"bias": table, "pair_type": types, "dropout": dropout}
        return ops.dense_attention(*by_rows.unbind(), ptr, **options)[0]

    for training in (True,) if dropout else (True, False):
        yield "operator", training, [(by_torch, nullcontext), (by_operator, nullcontext)]
        biased = [(biased_by_torch, nullcontext), (biased_by_operator, nullcontext)]
        yield "learned table", training, biased
        yield "table beside none", training, [(by_operator, nullcontext), biased[1]]


def _milliseconds(
    sides: list[tuple[Way, Context]], training: bool, effort: Any
) -> tuple[float, float]:
    import torch

    from measure.turns import Side, measure

    def step(way: Way) -> Callable[[], object]:
        def infer() -> None:
            with torch.no_grad():
                way()

        return (lambda: way().sum().backward()) if training else infer

    plain, ours = (Side(step(way), context=context) for way, context in sides)
    found = measure(plain, ours, effort)
    return 1000 * found.plain, 1000 * found.ours


def _row(cell: dict[str, Any]) -> str:
    names = [cell["what"], cell["batch"], str(cell["channels"]), str(cell["heads"])]
    kind = "training" if cell["training"] else "inference"
    times = [f"{cell[side]:.3g}" for side in ("upstream", "fastgraph")]
    ratio = f"{cell['upstream'] / cell['fastgraph']:.2f}"
    return f"| {' | '.join([*names, str(cell['dropout']), kind, *times, ratio])} |"


def _markdown(results: dict[str, Any]) -> str:
    cells = sorted(results["cells"], key=lambda cell: KINDS.index(cell["what"]))
    lines = [
        "# Dense attention of batches",
        "",
        f"`{results['command']}`",
        "",
        "float32, lower quartiles of processor time in milliseconds on one thread of a machine",
        "that others used, too, in turns. `attention` is that of `GPSConv` with its projections,",
        "beside PyG's padding and mask; `GPSConv` the whole layer, by its route where it takes it;",
        "`operator` is `ops.dense_attention` beside `scaled_dot_product_attention` on graphs of",
        "one size, `learned table` the same with a bias by types of pairs, which torch takes as a",
        "mask, and `table beside none` the operator with that beside itself without. The last",
        "column says how many times as long upstream, or the operator without a bias, takes.",
        "",
        "| what | batch | channels | heads | dropout | pass | upstream | fastgraph | ratio |",
        "| --- | --- | ---: | ---: | ---: | --- | ---: | ---: | ---: |",
        *map(_row, cells),
        "",
        *machine_table(results["machine"]),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
