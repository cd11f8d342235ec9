"""DGL layers on the CPU, with and without fastgraph, in one process.

    FASTGRAPH_DATA=... PYTHONPATH=. .venv-dgl-2.1.0/bin/python benchmarks/dgl_cpu.py [--quick]

Contestants are timed in turns, after each has run once and agreed with upstream. Results go to
``benchmarks/results/<date>-dgl-cpu.json`` and ``.md``.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track

from measure.output import RESULTS, publish

HEADS = 4
# The layers, and under which name their calls are counted.
LAYERS = {
    "GATConv": "GATConv",
    "GATv2Conv": "GATv2Conv",
    "GraphConv": "dgl.gspmm",
    "SAGEConv mean": "dgl.gspmm",
    "SAGEConv pool": "dgl.gspmm",
}
GRAPHS = ("wing", "wordnet", "debian")
GENERATED = ("kronecker-11", "kronecker-14")

# Norm of the difference over the norm of upstream's value, as for PyG's layers.
_TOLERANCE = 1e-3


def _build(layer: str, channels: int) -> Any:
    import torch
    from dgl import nn

    torch.manual_seed(0)
    if layer in ("GATConv", "GATv2Conv"):
        return getattr(nn, layer)(channels, channels // HEADS, HEADS)
    if layer == "GraphConv":
        return nn.GraphConv(channels, channels)
    return nn.SAGEConv(channels, channels, layer.rpartition(" ")[2])


@contextmanager
def _expected(name: str, routed: bool) -> Iterator[None]:
    """Fail unless calls are routed in the block, all of them, or fastgraph sees none."""
    import fastgraph
    from measure.routing import ColumnError

    fastgraph.status().reset()
    yield
    row = fastgraph.status().row(name)
    if row.fell_back or bool(row.routed) is not routed:
        raise ColumnError(f"expected routed={routed}:\n{fastgraph.status()}")


def _agree(found: dict[str, Any], expected: dict[str, Any]) -> None:
    from measure.routing import ColumnError

    for what, value in expected.items():
        error = float((found[what] - value).norm() / value.norm().clamp(min=1e-30))
        if not error < _TOLERANCE:
            raise ColumnError(f"{what} differs from upstream's by {error:.1e} of its norm")


def _measure(graph: Any, layer: str, channels: int, quick: bool) -> dict[str, Any]:
    """Milliseconds of forward and backward of both."""
    import torch

    from measure.cell import Run
    from measure.routing import ordering_after, ours_enabled
    from measure.timing import Contestant, interleave

    module = _build(layer, channels)
    torch.manual_seed(0)
    x = torch.randn(graph.num_nodes(), channels, requires_grad=True)
    contexts: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "upstream": nullcontext,
        "ours": ours_enabled,
    }
    contestants, expected = [], None
    for column, context in contexts.items():
        run = Run(module, x, graph, forward=lambda x, graph: module(graph, x))
        contestant = Contestant(column, run.step, run.prepare, context)
        with _expected(LAYERS[layer], column == "ours"):
            (contestant.estimate,) = contestant.turn()
            with ordering_after(0):  # rows of a graph are put in order once
                (contestant.estimate,) = contestant.turn()
        if expected is None:
            expected = run.results()
        else:
            _agree(run.results(), expected)
        run.prepare()
        contestants.append(contestant)
    rounds, budget = ((1, 10), 2.0) if quick else ((3, 40), 8.0)
    interleave(contestants, rounds=rounds, budget=budget)
    return {contestant.name: contestant.spread.to_json() for contestant in contestants}


def _markdown(results: dict[str, Any]) -> str:
    lines = [
        "# DGL layers on the CPU",
        "",
        f"`{results['command']}`",
        "",
        "Milliseconds of forward and backward, medians; each graph has a self-loop at every node.",
        "",
        "| graph | layer | upstream | ours | times as fast |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for name, layers in results["cells"].items():
        for layer, cell in layers.items():
            upstream, ours = (cell[column]["median"] for column in ("upstream", "ours"))
            ratio = f"{upstream / ours:.1f}"
            lines.append(f"| {name} | {layer} | {upstream:.1f} | {ours:.1f} | {ratio} |")
    facts = [f"- {name}: {fact}" for name, fact in results["machine"].items()]
    return "\n".join([*lines, "", *facts])


@click.command(help=__doc__.split("\n\n")[0])
@click.option(
    "--graphs", help="Separated by commas. Default: wing, wordnet and debian, or made ones."
)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--channels", type=click.IntRange(HEADS), default=256, show_default=True)
@click.option("--quick", is_flag=True, help="Fewer repetitions.")
def main(graphs: str | None, out: Path, threads: int, channels: int, quick: bool) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # read when DGL is loaded
    os.environ.setdefault("DGLBACKEND", "pytorch")
    import fastgraph.dgl

    fastgraph.dgl.fix_import()
    import dgl
    import torch

    from measure.graphs import load
    from measure.machine import machine_facts

    torch.set_num_threads(threads)
    known = GRAPHS if os.environ.get("FASTGRAPH_DATA") else GENERATED
    names = graphs.split(",") if graphs else known
    console = Console(stderr=True)
    results: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/dgl_cpu.py", *sys.argv[1:]]),
        "machine": machine_facts(threads),
        "channels": channels,
        "cells": {},
    }
    for name in names:
        data = load(name)
        graph = dgl.graph(tuple(data.edge_index), num_nodes=data.num_nodes)
        graph = dgl.add_self_loop(dgl.remove_self_loop(graph))
        graph.create_formats_()  # as DGL advises before training
        results["cells"][name] = {
            layer: _measure(graph, layer, channels, quick)
            for layer in track(LAYERS, name, console=console)
        }
    publish(console, out, "dgl-cpu-quick" if quick else "dgl-cpu", results, _markdown(results))


if __name__ == "__main__":
    main()
