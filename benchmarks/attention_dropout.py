"""Attention layers with dropout of their weights, beside plain PyG.

    FASTGRAPH_DATA=FOLDER python benchmarks/attention_dropout.py [--graphs cora] [--name NAME]

Processor time of training steps on one thread, plain, ours, and ours without dropout in turns.
Results go to ``benchmarks/results/<date>-<name>.json`` and ``.md``.
"""

from __future__ import annotations

import itertools
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track

from measure.output import RESULTS, publish

LAYERS = ("GATConv", "GATv2Conv", "TransformerConv", "SuperGATConv", "RGATConv", "FAConv")
SHAPES = ((1, 64), (8, 8), (4, 64))
NUM_TYPES = 4
RATE = 0.6  # of Velickovic et al., Graph Attention Networks, ICLR 2018


def _sides(layer: str, graph: str, heads: int, channels: int) -> list[Any]:
    """Both passes of a layer: plain, ours, and ours without dropout."""
    import torch
    from torch_geometric import nn

    import fastgraph
    from measure.graphs import load
    from measure.turns import Side

    data = load(graph)
    torch.manual_seed(0)
    x = torch.randn(data.num_nodes, heads * channels, requires_grad=True)

    types = torch.arange(data.num_edges) % NUM_TYPES

    def step(rate: float) -> Callable[[], object]:
        sizes = [] if layer == "FAConv" else [channels]
        sizes += [NUM_TYPES] if layer == "RGATConv" else []
        options = {} if layer == "FAConv" else {"heads": heads}
        module = getattr(nn, layer)(heads * channels, *sizes, **options, dropout=rate)
        given = [x, x.detach()] if layer == "FAConv" else [x]
        given += [data.edge_index, *([types] if layer == "RGATConv" else [])]
        wanted = [x, *module.parameters()]
        return lambda: torch.autograd.grad(module(*given).sum(), wanted, allow_unused=True)

    dropping = step(RATE)
    return [
        Side(dropping),
        Side(dropping, context=fastgraph.enabled),
        Side(step(0.0), context=fastgraph.enabled),
    ]


def markdown(results: dict[str, Any]) -> str:
    """The whole report."""
    from measure.report import machine_lines, table

    rows = [
        [
            cell["layer"],
            cell["graph"],
            f"{cell['heads']} x {cell['channels']}",
            *(f"{cell[name]:.2f}" for name in ("plain", "ours", "without")),
            f"{cell['plain'] / cell['ours']:.2f}x",
        ]
        for cell in results["cells"]
    ]
    head = [
        "layer",
        "graph",
        "heads x channels",
        "plain",
        "ours",
        "ours without dropout",
        "as fast",
    ]
    return "\n".join(
        [
            "# Attention with dropout",
            "",
            f"`{results['command']}`; milliseconds of both passes with all gradients, processor "
            f"time on one thread, {RATE:.0%} of the weights dropped.",
            "",
            *machine_lines(results["machine"]),
            *table(head, rows),
        ]
    )


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
@click.option("--name", default="attention-dropout", show_default=True, help="Of the results.")
@click.option("--graphs", default="cora,tolokers", show_default=True)
@click.option("--layers", default=",".join(LAYERS), show_default=True)
def main(out: Path, name: str, graphs: str, layers: str) -> None:
    import torch

    from measure.machine import machine_facts
    from measure.turns import Effort, measure_all

    torch.set_num_threads(1)
    cells = []
    kinds = [
        (layer, graph, shape)
        for layer, graph, shape in itertools.product(layers.split(","), graphs.split(","), SHAPES)
        if shape[0] == 1 or layer != "FAConv"  # which has no heads
    ]
    for layer, graph, (heads, channels) in track(kinds, console=Console(stderr=True)):
        plain, *others = _sides(layer, graph, heads, channels)
        found = measure_all(plain, others, Effort(0.05, 5, 11, again=0))
        milliseconds = [1000 * found[0].plain, *(1000 * beside.ours for beside in found)]
        facts = {"layer": layer, "graph": graph, "heads": heads, "channels": channels}
        times = zip(("plain", "ours", "without"), milliseconds, strict=True)
        cells.append({**facts, **dict(times)})
    results = {
        "command": shlex.join(["python", "benchmarks/attention_dropout.py", *sys.argv[1:]]),
        "machine": machine_facts(1),
        "cells": cells,
    }
    publish(Console(stderr=True), out, name, results, markdown(results))


if __name__ == "__main__":
    main()
