"""Attention that takes turns: sparse turns beside dense ones, and what conditions cost.

    FASTGRAPH_DATA=... PYTHONPATH=. .venv/bin/python benchmarks/dual_attention.py

Random graphs with 16 edges into each node, by ``fastgraph.nn.DualInterleavedAttention`` with its
projections: dense turns beside ``torch.nn.MultiheadAttention``, sparse turns beside dense ones, and
sparse turns with biases by types beside those without. Then the processor time of
``fastgraph.nn.conditions`` on real graphs, for four layers, without a token and with one. Times are
by the processor's clock on one thread, lower quartiles of all in turns. Results go to
``benchmarks/results/<date>-dual-attention.json`` and ``.md``.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from measure.output import RESULTS, machine_table, publish

EDGES = 16
"""Into each node."""


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--nodes", default="1024,8192", show_default=True)
@click.option("--shape", default="64x8", show_default=True, help="channels x heads")
@click.option("--rounds", default=3, show_default=True)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
def main(nodes: str, shape: str, rounds: int, out: Path) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    from measure.machine import machine_facts
    from measure.turns import Effort, Side, measure

    torch.set_num_threads(1)
    console, cells = Console(stderr=True), []
    channels, heads = map(int, shape.split("x"))
    for size in map(int, nodes.split(",")):
        for dropout in (0.0, 0.5):
            for what, *ways in _comparisons(size, channels, heads, dropout):
                for training in (True,) if dropout else (True, False):
                    plain, other = (Side(_step(way, training)) for way in ways)
                    found = measure(plain, other, Effort(0.02, rounds, 20))
                    cell = {"nodes": size, "dropout": dropout, "what": what, "training": training}
                    cell |= {"plain": 1000 * found.plain, "other": 1000 * found.ours}
                    cells.append(cell)
                    console.print(_row(cell))
    answers = [_answers(*graph) for graph in real_graphs()]
    results = {
        "command": shlex.join(["python", "benchmarks/dual_attention.py", *sys.argv[1:]]),
        "machine": machine_facts(1),
        "cells": cells,
        "conditions": answers,
    }
    publish(console, out, "dual-attention", results, _markdown(results))


Way = Callable[[], Any]


def _comparisons(
    nodes: int, channels: int, heads: int, dropout: float
) -> Iterator[tuple[str, Way, Way]]:
    import torch
    from torch import nn

    from fastgraph.nn import DualInterleavedAttention, Schedule, dual_pattern

    torch.manual_seed(0)
    x = torch.randn(nodes, channels, requires_grad=True)
    target = torch.arange(nodes).repeat_interleave(EDGES)
    pattern = dual_pattern(torch.stack([torch.randint(nodes, target.shape), target]), nodes)

    def turns(dense: bool, **options: Any) -> Way:
        schedule = Schedule("layer", 1) if dense else None
        options = {"schedule": schedule, "path": not dense, "dropout": dropout} | options
        layer = DualInterleavedAttention(channels, heads, **options)
        return lambda: layer(x, pattern)

    of_torch = nn.MultiheadAttention(channels, heads, dropout=dropout, batch_first=True)

    def by_torch() -> Any:
        return of_torch(x[None], x[None], x[None], need_weights=False)[0]

    yield "torch's / dense", by_torch, turns(True)
    yield "dense / sparse", turns(True), turns(False)
    yield "sparse / with biases", turns(False), turns(False, type_bias=True)


def _step(way: Way, training: bool) -> Callable[[], object]:
    import torch

    def infer() -> None:
        with torch.no_grad():
            way()

    return (lambda: way().sum().backward()) if training else infer


def real_graphs() -> Iterator[tuple[str, Any, int]]:
    import numpy as np
    import torch

    folder = Path(os.environ["FASTGRAPH_DATA"])
    for name in ("wordnet", "debian", "wing"):
        stored = np.load(folder / f"{name}.npz")
        nodes = len(stored["x"]) if "x" in stored else int(stored["num_nodes"])
        yield name, torch.from_numpy(stored["edge_index"].astype(np.int64)), nodes
    for name in ("tolokers", "minesweeper"):
        (path,) = (folder / "HeterophilousGraphDataset" / name).glob("raw/*.npz")
        stored = np.load(path)
        edges = torch.from_numpy(stored["edges"].astype(np.int64)).T
        both = torch.cat([edges, edges.flip(0)], dim=1)
        yield name, both, len(stored["node_features"])


def _answers(name: str, index: Any, nodes: int) -> dict[str, Any]:
    from fastgraph.nn import conditions

    found: dict[str, Any] = {"graph": name, "nodes": nodes, "edges": index.shape[1]}
    for key, token in (("alone", False), ("token", True)):
        start = time.process_time()
        answers = conditions(index, nodes, 4, token=token)
        found[f"{key}_seconds"] = time.process_time() - start
        found[key] = [answers.hamiltonian_path.verdict, answers.reachability.verdict]
    return found


def _row(cell: dict[str, Any]) -> str:
    kind = "training" if cell["training"] else "inference"
    times = [f"{cell[side]:.3g}" for side in ("plain", "other")]
    ratio = f"{cell['plain'] / cell['other']:.2f}"
    names = [cell["what"], str(cell["nodes"]), str(cell["dropout"]), kind]
    return f"| {' | '.join([*names, *times, ratio])} |"


def _markdown(results: dict[str, Any]) -> str:
    lines = [
        "# Attention that takes turns",
        "",
        f"`{results['command']}`",
        "",
        "float32, lower quartiles of processor time in milliseconds on one thread of a machine",
        f"that others used, too, in turns. Graphs have {EDGES} random edges into each node, layers",
        "64 channels and 8 heads if the command says nothing else, and sparse turns the path of",
        "consecutive nodes besides. The last column says how many times as long the first takes.",
        "",
        "| first / second | nodes | dropout | pass | first | second | ratio |",
        "| --- | ---: | ---: | --- | ---: | ---: | ---: |",
        *map(_row, results["cells"]),
        "",
        "Answers to C2 and C3 for four layers, and processor time of all three conditions in",
        "seconds; the first has the imports of NumPy and NetworkX.",
        "",
        "| graph | nodes | edges | C2, C3 | seconds | with a token | seconds |",
        "| --- | ---: | ---: | --- | ---: | --- | ---: |",
    ]
    for found in results["conditions"]:
        sides = [
            f"{', '.join(found[key])} | {found[f'{key}_seconds']:.2f}" for key in ("alone", "token")
        ]
        lines.append(
            f"| {found['graph']} | {found['nodes']} | {found['edges']} | {' | '.join(sides)} |"
        )
    return "\n".join([*lines, "", *machine_table(results["machine"])]) + "\n"


if __name__ == "__main__":
    main()
