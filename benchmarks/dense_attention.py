"""Attention of all nodes of each graph of a batch, beside padding and torch's own operator.

    PYTHONPATH=. .venv/bin/python benchmarks/dense_attention.py

First PyG's ``GPSConv``: the attention alone, which upstream pads by ``to_dense_batch``, and the
whole layer with a ``GINConv``, by its route. Likewise the aggregations that are Set Transformers,
and their block of attention on padded sets. Then ``ops.dense_attention`` with a learned bias by
types of pairs, or of each pair, beside itself without; and, on graphs of one size, which need no
padding, beside ``scaled_dot_product_attention`` without a bias and with one. Sizes of molecules are
drawn with the mean and the spread of those of ZINC, those of a long tail from a log-normal
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

KINDS = (
    "attention",
    "GPSConv",
    "SetTransformer",
    "GraphMultisetTransformer",
    "SetAttentionBlock",
    "operator",
    "learned table",
    "table beside none",
    "pairs beside none",
)
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

    trainings = (True,) if dropout else (True, False)
    for training in trainings:
        layer.train(training)
        yield "attention", training, [(padded, nullcontext), (unpadded, nullcontext)]
        if not dropout:
            yield "GPSConv", training, [(whole, nullcontext), (whole, fastgraph.enabled)]
    for name, sets in _set_transformers(channels, heads, dropout).items():
        of_sets = _of_sets(name, sets, x, index)
        for training in trainings:
            sets.train(training)
            yield name, training, [(of_sets, nullcontext), (of_sets, fastgraph.enabled)]
    of_heads = (nodes, heads, channels // heads)
    inputs = [torch.randn(of_heads, requires_grad=True) for _ in range(3)]
    ptr = torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)])
    pairs = int(sizes.square().sum())
    types = torch.randint(0, TYPES, (pairs,)).to(torch.uint8)
    table = torch.randn(TYPES, heads, requires_grad=True)
    biases: dict[str, dict[str, Any]] = {
        "none": {},
        "table beside none": {"bias": table, "pair_type": types},
        "pairs beside none": {"bias": torch.randn(pairs, heads, requires_grad=True)},
    }

    def with_bias(given: dict[str, Any]) -> Way:
        options = {"dropout": dropout, **given}
        return lambda: ops.dense_attention(*inputs, ptr, **options)[0]

    ways = {name: (with_bias(given), nullcontext) for name, given in biases.items()}
    for training in trainings:
        for name in list(ways)[1:]:
            yield name, training, [ways["none"], ways[name]]
    if int(sizes.min()) < int(sizes.max()):
        return
    shape = (3, len(sizes), heads, int(sizes[0]), channels // heads)
    stacked = torch.randn(shape, requires_grad=True)
    by_rows = stacked.detach().permute(0, 1, 3, 2, 4).reshape(3, nodes, heads, -1).contiguous()
    by_rows.requires_grad_()

    def by_torch() -> Any:
        return F.scaled_dot_product_attention(*stacked.unbind(), dropout_p=dropout)

    def by_operator() -> Any:
        return ops.dense_attention(*by_rows.unbind(), ptr, dropout=dropout)[0]

    of_pairs = types.long().view(len(sizes), int(sizes[0]), -1)

    def biased_by_torch() -> Any:
        mask = table[of_pairs].permute(0, 3, 1, 2)
        return F.scaled_dot_product_attention(*stacked.unbind(), mask, dropout_p=dropout)

    def biased_by_operator() -> Any:
        options: dict[str, Any] = {"bias": table, "pair_type": types, "dropout": dropout}
        return ops.dense_attention(*by_rows.unbind(), ptr, **options)[0]

    for training in trainings:
        yield "operator", training, [(by_torch, nullcontext), (by_operator, nullcontext)]
        biased = [(biased_by_torch, nullcontext), (biased_by_operator, nullcontext)]
        yield "learned table", training, biased


def _set_transformers(channels: int, heads: int, dropout: float) -> dict[str, Any]:
    from torch_geometric.nn import GraphMultisetTransformer, SetTransformerAggregation
    from torch_geometric.nn.aggr.utils import SetAttentionBlock

    options: dict[str, Any] = {"heads": heads, "dropout": dropout}
    return {
        "SetTransformer": SetTransformerAggregation(channels, **options),
        "GraphMultisetTransformer": GraphMultisetTransformer(channels, 4, **options),
        "SetAttentionBlock": SetAttentionBlock(channels, **options),
    }


def _of_sets(name: str, module: Any, x: Any, index: Any) -> Way:
    """A call of an aggregation, or of a block on sets that have been padded before."""
    import torch
    from torch_geometric.utils import to_dense_batch

    if name != "SetAttentionBlock":
        own = torch.zeros(len(x), dtype=torch.long) if index is None else index
        return lambda: module(x, own)
    rows, mask = to_dense_batch(x.detach(), index)
    rows.requires_grad_()
    return lambda: module(rows, mask)


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
        "beside PyG's padding and mask; `GPSConv` the whole layer, by its route where it takes it,",
        "`SetTransformer` and `GraphMultisetTransformer` are PyG's aggregations by theirs, and",
        "`SetAttentionBlock` a block on padded sets;",
        "`operator` is `ops.dense_attention` beside `scaled_dot_product_attention` on graphs of",
        "one size, `learned table` the same with a bias by types of pairs, which torch takes as a",
        "mask, and `table beside none` the operator with that beside itself without, as is `pairs",
        "beside none` with a bias of each pair. The last column says how many times as long",
        "upstream, or the operator without a bias, takes.",
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
