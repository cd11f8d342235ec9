"""Elastic computation reformation: time and accuracy by threshold, with the edges that are kept.

    FASTGRAPH_DATA=... PYTHONPATH=. .venv/bin/python benchmarks/elastic.py

In the shape of TorchGT's table VIII. Nodes are in the order of 8 clusters, whose pairs below a
threshold of density become sub-blocks of 16 rows, with ``fastgraph.nn.Reformation``. First a step
of attention alone, forward and backward with 64 channels and 8 heads, by ``ops.attention`` and in
turns with the graph's own edges, by processor time on one thread. Then accuracies: PyG's Planetoid
graphs with their public splits, ``fastgraph.nn.GraphTransformer`` of 4 layers that never attends to
all pairs, test accuracy at the best validation, where training and evaluation see the same entries.
Results go to ``benchmarks/results/<date>-elastic.json`` and ``.md``.
"""

from __future__ import annotations

import os
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from dual_attention import real_graphs
from measure.output import RESULTS, machine_table, publish

CHANNELS, HEADS, CLUSTERS = 64, 8, 8


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--seeds", default=3, show_default=True)
@click.option("--epochs", default=60, show_default=True)
@click.option("--rounds", default=4, show_default=True)
@click.option("--block", default=16, show_default=True)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
def main(seeds: int, epochs: int, rounds: int, block: int, out: Path) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    from measure.machine import machine_facts

    torch.set_num_threads(1)
    console, steps, accuracies = Console(stderr=True), [], []
    for name, index, nodes in _graphs():
        for cell in _steps(name, index, nodes, rounds, block):
            steps.append(cell)
            console.print(_step_row(cell))
    for name in ("Cora", "CiteSeer"):
        data = planetoid(name)
        for label, options in _ways():
            cell = _accuracy(data, options, seeds, epochs, block)
            accuracies.append({"graph": name, "pairs": label} | cell)
            console.print(_accuracy_row(accuracies[-1]))
    results = {
        "command": shlex.join(["python", "benchmarks/elastic.py", *sys.argv[1:]]),
        "machine": machine_facts(1),
        "epochs": epochs,
        "steps": steps,
        "accuracies": accuracies,
    }
    publish(console, out, "elastic", results, _markdown(results))


def planetoid(name: str) -> Any:
    from torch_geometric.datasets import Planetoid
    from torch_geometric.transforms import NormalizeFeatures

    source = Path(os.environ["FASTGRAPH_DATA"]) / "Planetoid" / name / "raw"
    with tempfile.TemporaryDirectory() as folder:  # PyG writes beside what it reads
        shutil.copytree(source, Path(folder) / name / "raw")
        return Planetoid(folder, name, transform=NormalizeFeatures())[0]


def _graphs() -> Iterator[tuple[str, Any, int]]:
    for name in ("Cora", "CiteSeer"):
        data = planetoid(name)
        yield name, data.edge_index, data.num_nodes
    yield from real_graphs()


def _ways() -> Iterator[tuple[str, dict[str, Any]]]:
    """Selections of pairs, with their names in tables."""
    from fastgraph.nn.auto_tuner import FACTORS

    for number, factor in enumerate(FACTORS):
        label = "density < 1" if number == len(FACTORS) - 1 else f"density < {factor:g} of graph"
        yield label, {"index": number}
    yield "density < 1, random", {"index": len(FACTORS) - 1, "placement": "random"}
    yield "Auto Tuner", {"index": None}


def _reformation(options: dict[str, Any], **others: Any) -> Any:
    from fastgraph.nn import AutoTuner, Reformation

    options = dict(options)
    index, tuner = options.pop("index"), AutoTuner()
    if index is not None:
        tuner.index = index
    return Reformation("elastic", tuner=tuner, **options, **others)


def _clustered(index: Any, nodes: int) -> tuple[Any, Any, Any]:
    """Edges with nodes in the order of clusters, the cluster of each, and their order before."""
    import torch

    from fastgraph.nn import dual_pattern
    from fastgraph.nn.clusters import clusters_by_metis

    found = clusters_by_metis(dual_pattern(index, nodes), [CLUSTERS])
    inverse = torch.empty_like(found.order)
    inverse[found.order] = torch.arange(nodes)
    return inverse[index], found.cluster[found.order], found.order


def _counts(entries: Any) -> dict[str, Any]:
    names = ("transferred", "pairs", "sub_blocks", "edges", "kept", "dropped", "invented")
    return {name: getattr(entries, name) for name in names}


def _steps(name: str, index: Any, nodes: int, rounds: int, block: int) -> Iterator[dict[str, Any]]:
    import torch

    from fastgraph import ops
    from fastgraph.nn import dual_pattern
    from measure.turns import Effort, Side, measure

    torch.manual_seed(0)
    shape = nodes, HEADS, CHANNELS // HEADS
    query, key, value = (torch.randn(shape, requires_grad=True) for _ in range(3))
    index, cluster, _ = _clustered(index, nodes)
    pattern = dual_pattern(index, nodes)

    def step(entries: Any) -> Any:
        def run() -> None:
            out, _, _ = ops.attention(query, key, value, entries.sources, ptr=entries.ptr)
            out.sum().backward()

        return run

    for label, options in _ways():
        if options["index"] is None:
            continue
        start = time.process_time()
        entries = _reformation(options, clusters=cluster, block=block).entries(pattern, 256)
        made = time.process_time() - start
        found = measure(Side(step(pattern)), Side(step(entries)), Effort(0.05, rounds, 20))
        times = {"plain": 1000 * found.plain, "reformed": 1000 * found.ours, "made": 1000 * made}
        yield {"graph": name, "nodes": nodes, "pairs_below": label} | times | _counts(entries)


def _accuracy(
    data: Any, options: dict[str, Any], seeds: int, epochs: int, block: int
) -> dict[str, Any]:
    """Test accuracies, and processor seconds of an epoch with its evaluation."""
    from torch_geometric.data import Data

    index, cluster, order = _clustered(data.edge_index, data.num_nodes)
    masks = {name: data[name][order] for name in ("train_mask", "val_mask", "test_mask")}
    data = Data(x=data.x[order], y=data.y[order], edge_index=index, **masks)
    runs = []
    for seed in range(seeds):
        made = _reformation(options, clusters=cluster, block=block)
        runs.append(_run(data, made, options["index"] is None, seed, epochs))
    seconds, kept = min(run[1] for run in runs), [run[2] for run in runs]
    return {"accuracies": [run[0] for run in runs], "seconds": seconds, "kept": kept}


def _run(
    data: Any, made: Any, is_tuned: bool, seed: int, epochs: int
) -> tuple[float, float, float]:
    import torch
    import torch.nn.functional as F

    from fastgraph.nn import GraphTransformer, Schedule

    torch.manual_seed(seed)
    sizes = data.num_features, int(data.y.max()) + 1
    model = GraphTransformer(
        *sizes,
        CHANNELS,
        4,
        HEADS,
        dropout=0.5,
        attention_dropout=0,
        schedule=Schedule("layer", None),
        reformation=made,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    pattern = model.layers[0].self_attn.pattern(data.edge_index, data.num_nodes)
    best, accuracy, kept, start = -1.0, 0.0, 0.0, time.process_time()
    for _ in range(epochs):
        began = time.process_time()
        model.train()
        optimizer.zero_grad()
        out = model(data.x, pattern)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            is_right = model(data.x, pattern).argmax(1) == data.y
        entries = made.entries(pattern, 4 * CHANNELS)
        kept += entries.kept / entries.edges / epochs
        validation = float(is_right[data.val_mask].float().mean())
        if validation > best:
            best, accuracy = validation, float(is_right[data.test_mask].float().mean())
        if is_tuned:
            made.tuner.step(loss.detach(), time.process_time() - began)
    return accuracy, (time.process_time() - start) / epochs, kept


def _step_row(cell: dict[str, Any]) -> str:
    times = [f"{cell[side]:.3g}" for side in ("plain", "reformed")]
    kept = f"{100 * cell['kept'] / cell['edges']:.1f}"
    fields = [cell["graph"], cell["pairs_below"], f"{cell['transferred']} of {cell['pairs']}"]
    fields += [*times, f"{cell['plain'] / cell['reformed']:.2f}", kept, str(cell["dropped"])]
    return "| " + " | ".join([*fields, str(cell["invented"]), f"{cell['made']:.0f}"]) + " |"


def _accuracy_row(cell: dict[str, Any]) -> str:
    found = [100 * accuracy for accuracy in cell["accuracies"]]
    spread = statistics.stdev(found) if len(found) > 1 else 0.0
    kept = 100 * statistics.mean(cell["kept"])
    fields = [cell["graph"], cell["pairs"], f"{statistics.mean(found):.1f} ± {spread:.1f}"]
    return "| " + " | ".join([*fields, f"{1000 * cell['seconds']:.0f}", f"{kept:.1f}"]) + " |"


def _markdown(results: dict[str, Any]) -> str:
    lines = [
        "# Elastic computation reformation",
        "",
        f"`{results['command']}`",
        "",
        "A step of attention, forward and backward in float32 with 64 channels and 8 heads, on",
        "one thread of a machine that others used, too: milliseconds of processor time, lower",
        "quartiles, with the graph's edges and with those that a reformation leaves, in turns.",
        "Then edges, and how long it took to make the entries, where clusters are given.",
        "",
        "| graph | pairs | transferred | edges | reformed | ratio | kept, % | dropped | invented "
        "| made |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        *map(_step_row, results["steps"]),
        "",
        "Test accuracies in per cent, mean and deviation of seeds at the best validation of",
        f"{results['epochs']} epochs, processor time of an epoch and its evaluation in",
        "milliseconds, and edges kept in per cent, the mean of epochs.",
        "",
        "| graph | pairs | accuracy | an epoch | kept, % |",
        "| --- | --- | ---: | ---: | ---: |",
        *map(_accuracy_row, results["accuracies"]),
        "",
        *machine_table(results["machine"]),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
