"""Accuracy of a graph transformer whose attention is sparse, dense, or takes turns.

    FASTGRAPH_DATA=... PYTHONPATH=. .venv/bin/python benchmarks/dual_accuracy.py

``fastgraph.nn.GraphTransformer`` with 4 layers of 64 channels and 8 heads on PyG's Planetoid
graphs, with their public splits: "exact" never attends to all pairs, "union" in its first layer,
"dense" in all. TorchGT's own rule is dense on these graphs, which have leaves. Beside them PyG's
``GCN`` and ``MLP`` of two layers. Accuracies are of the test nodes, at the epoch with the best
validation. Results go to ``benchmarks/results/<date>-dual-accuracy.json`` and ``.md``.
"""

from __future__ import annotations

import os
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from measure.output import RESULTS, machine_table, publish

MODELS = ("MLP", "GCN", "exact", "union", "dense")


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--graphs", default="Cora,CiteSeer", show_default=True)
@click.option("--models", default=",".join(MODELS), show_default=True)
@click.option("--seeds", default=3, show_default=True)
@click.option("--epochs", default=60, show_default=True)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
def main(graphs: str, models: str, seeds: int, epochs: int, out: Path) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    from measure.machine import machine_facts

    torch.set_num_threads(1)
    console, cells = Console(stderr=True), []
    for graph in graphs.split(","):
        data = _data(graph)
        for name in models.split(","):
            runs = [_run(data, name, seed, epochs) for seed in range(seeds)]
            cell: dict[str, Any] = {"graph": graph, "model": name}
            cell |= {"accuracies": [run[0] for run in runs], "seconds": min(run[1] for run in runs)}
            cells.append(cell)
            console.print(_row(cell))
    results = {
        "command": shlex.join(["python", "benchmarks/dual_accuracy.py", *sys.argv[1:]]),
        "machine": machine_facts(1),
        "epochs": epochs,
        "cells": cells,
    }
    publish(console, out, "dual-accuracy", results, _markdown(results))


def _data(name: str) -> Any:
    import shutil

    from torch_geometric.datasets import Planetoid
    from torch_geometric.transforms import NormalizeFeatures

    source = Path(os.environ["FASTGRAPH_DATA"]) / "Planetoid" / name / "raw"
    with tempfile.TemporaryDirectory() as folder:  # PyG writes beside what it reads
        shutil.copytree(source, Path(folder) / name / "raw")
        return Planetoid(folder, name, transform=NormalizeFeatures())[0]


def _model(data: Any, name: str) -> Any:
    from torch_geometric.nn import GCN, MLP

    from fastgraph.nn import GraphTransformer, Schedule

    sizes = data.num_features, int(data.y.max()) + 1
    if name == "MLP":
        return MLP([sizes[0], 64, sizes[1]], dropout=0.5)
    if name == "GCN":
        return GCN(sizes[0], 64, 2, sizes[1], dropout=0.5)
    periods = {"exact": None, "union": 4, "dense": 1}
    schedule = Schedule("layer", periods[name])
    return GraphTransformer(*sizes, 64, 4, 8, dropout=0.5, attention_dropout=0, schedule=schedule)


def _run(data: Any, name: str, seed: int, epochs: int) -> tuple[float, float]:
    """The accuracy of the test nodes, and processor seconds of an epoch."""
    import torch
    import torch.nn.functional as F

    torch.manual_seed(seed)
    model = _model(data, name)
    inputs = (data.x,) if name == "MLP" else (data.x, data.edge_index)
    rate = 1e-3 if name in ("exact", "union", "dense") else 1e-2
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    best, found, start = -1.0, 0.0, time.process_time()
    for _ in range(epochs):
        model.train()
        optimizer.zero_grad()
        out = model(*inputs)
        F.cross_entropy(out[data.train_mask], data.y[data.train_mask]).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            is_right = model(*inputs).argmax(1) == data.y
        validation = float(is_right[data.val_mask].float().mean())
        if validation > best:
            best, found = validation, float(is_right[data.test_mask].float().mean())
    return found, (time.process_time() - start) / epochs


def _row(cell: dict[str, Any]) -> str:
    accuracies = [100 * accuracy for accuracy in cell["accuracies"]]
    spread = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
    found = f"{statistics.mean(accuracies):.1f} ± {spread:.1f}"
    return f"| {cell['graph']} | {cell['model']} | {found} | {1000 * cell['seconds']:.0f} |"


def _markdown(results: dict[str, Any]) -> str:
    seeds = len(results["cells"][0]["accuracies"])
    lines = [
        "# Accuracy of attention that takes turns",
        "",
        f"`{results['command']}`",
        "",
        f"Test accuracies in per cent, mean and deviation of {seeds} seeds, at the best validation",
        f"of {results['epochs']} epochs, and processor time of an epoch and its evaluation in",
        "milliseconds, on one thread of a machine that others used, too.",
        "",
        "| graph | model | accuracy | an epoch |",
        "| --- | --- | ---: | ---: |",
        *map(_row, results["cells"]),
        "",
        *machine_table(results["machine"]),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
