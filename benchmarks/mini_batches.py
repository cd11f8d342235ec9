"""Epochs of mini-batches: PyG's layers and ours beside each other, both with our sampler.

    FASTGRAPH_DATA=... PYTHONPATH=. python benchmarks/mini_batches.py [--name NAME]

Two layers on samples of tolokers (1,024 seeds, fanouts 15 and 10), trained for epochs in turns: on
whole samples, and with ``trim_to_layer``, which leaves out of each layer what later ones do not
need. Processor and wall time of an epoch, sampling and gathering included. Besides, what sampling
takes alone, and with gathering. Results go to ``benchmarks/results/<date>-<name>.json`` and
``.md``.
"""

from __future__ import annotations

import gc
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track

from measure.output import RESULTS, publish

FANOUTS = [15, 10]
BATCH = 1024
MODELS = ("SAGE mean", "SAGE max", "GAT", "GATv2")


def data() -> Any:
    """Tolokers with features and classes that a layer can compute with."""
    import torch
    from torch_geometric.data import Data

    from measure.graphs import load

    graph = load("tolokers")
    return Data(
        x=torch.randn(graph.num_nodes, 128),
        y=torch.randint(8, (graph.num_nodes,)),
        edge_index=graph.edge_index,
    )


def model(name: str, channels: int = 128) -> Any:
    """Two layers of one kind."""
    from torch_geometric.nn import GAT, GraphSAGE

    kind, _, aggregation = name.partition(" ")
    if kind == "SAGE":
        return GraphSAGE(128, channels, num_layers=2, out_channels=8, aggr=aggregation)
    return GAT(128, channels, num_layers=2, out_channels=8, heads=4, v2=kind == "GATv2")


def epoch(network: Any, batches: Any, trimmed: bool) -> None:
    """Train on all batches."""
    import torch.nn.functional as F

    for batch in batches:
        network.zero_grad()
        counts = (
            {
                "num_sampled_nodes_per_hop": batch.num_sampled_nodes,
                "num_sampled_edges_per_hop": batch.num_sampled_edges,
            }
            if trimmed
            else {}
        )
        out = network(batch.x, batch.edge_index, **counts)[: batch.batch_size]
        F.cross_entropy(out, batch.y[: batch.batch_size]).backward()


def timed(step: Callable[[], object]) -> tuple[float, float]:
    """Processor and wall seconds."""
    gc.collect()
    cpu, wall = time.process_time(), time.perf_counter()
    step()
    return time.process_time() - cpu, time.perf_counter() - wall


def lower_quartile(values: list[tuple[float, float]]) -> tuple[float, float]:
    """Of processor and of wall seconds; other programs only ever add to them."""
    cpu, wall = (sorted(column) for column in zip(*values, strict=True))
    return cpu[len(cpu) // 4], wall[len(wall) // 4]


def measured(graph: Any, name: str, trimmed: bool, rounds: int) -> dict[str, Any]:
    """Seconds of an epoch of both sides."""
    import torch
    from torch_geometric.loader import NeighborLoader

    import fastgraph

    def side() -> tuple[float, float]:
        torch.manual_seed(0)
        loader = NeighborLoader(graph, FANOUTS, batch_size=BATCH, shuffle=True)
        network = model(name)
        return timed(lambda: epoch(network, loader, trimmed))

    plain, ours = [], []
    for number in range(rounds + 1):
        first = side()
        with fastgraph.enabled():
            second = side()
        if number > 0:  # the first warms up
            plain.append(first)
            ours.append(second)
    (plain_cpu, plain_wall), (our_cpu, our_wall) = lower_quartile(plain), lower_quartile(ours)
    return {
        "model": name,
        "trimmed": trimmed,
        "plain_cpu": plain_cpu,
        "plain_wall": plain_wall,
        "our_cpu": our_cpu,
        "our_wall": our_wall,
    }


def alone(graph: Any, rounds: int) -> Iterator[dict[str, Any]]:
    """Milliseconds that a batch takes without a model."""
    import torch
    from torch_geometric.loader import NeighborLoader
    from torch_geometric.sampler import NodeSamplerInput

    loader = NeighborLoader(graph, FANOUTS, batch_size=BATCH, shuffle=True)
    sampler = loader.node_sampler
    seeds = torch.randperm(graph.num_nodes).split(BATCH)[:-1]
    inputs = [NodeSamplerInput(input_id=None, node=seed) for seed in seeds]
    steps: dict[str, tuple[Callable[[], object], int]] = {
        "sampling": (lambda: [sampler.sample_from_nodes(i) for i in inputs], len(inputs)),
        "sampling and gathering": (lambda: list(loader), len(loader)),
    }
    for name, (step, batches) in steps.items():
        step()
        cpu, wall = lower_quartile([timed(step) for _ in range(4 * rounds)])
        yield {"step": name, "cpu_ms": 1e3 * cpu / batches, "wall_ms": 1e3 * wall / batches}


def markdown(results: dict[str, Any]) -> str:
    """The whole report."""
    from measure.report import machine_lines, table

    rows = [
        [
            cell["model"],
            "trimmed" if cell["trimmed"] else "whole",
            *(f"{cell[key]:.2f}" for key in ("plain_cpu", "our_cpu")),
            f"{cell['plain_cpu'] / cell['our_cpu']:.2f}x",
            *(f"{cell[key]:.2f}" for key in ("plain_wall", "our_wall")),
            f"{cell['plain_wall'] / cell['our_wall']:.2f}x",
        ]
        for cell in results["cells"]
    ]
    of_batches = [
        [cell["step"], f"{cell['cpu_ms']:.2f}", f"{cell['wall_ms']:.2f}"]
        for cell in results["alone"]
    ]
    heading = ["model", "samples", "PyG, s", "ours, s", "", "PyG, wall", "ours, wall", ""]
    return "\n".join(
        [
            "# Mini-batches",
            "",
            f"`{results['command']}`; seconds of an epoch on tolokers, of processor time and, in "
            "the last columns, by the wall clock, which counts what other programs do, too. "
            "Both sides have our sampler.",
            "",
            *machine_lines(results["machine"]),
            *table(heading, rows),
            "",
            "Milliseconds of a batch without a model:",
            "",
            *table(["", "processor", "wall"], of_batches),
        ]
    )


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
@click.option("--name", default="mini-batches", show_default=True, help="Of the results.")
@click.option("--threads", default=1, show_default=True)
@click.option("--rounds", default=5, show_default=True, help="Epochs of each side that count.")
def main(out: Path, name: str, threads: int, rounds: int) -> None:
    import torch

    from fastgraph.pyg import fix_sampling
    from measure.machine import machine_facts

    fix_sampling()
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    graph = data()
    cells = [(kind, trimmed) for kind in MODELS for trimmed in (False, True)]
    console = Console(stderr=True)
    results: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/mini_batches.py", *sys.argv[1:]]),
        "machine": machine_facts(threads),
        "alone": list(alone(graph, rounds)),
        "cells": [
            measured(graph, kind, trimmed, rounds)
            for kind, trimmed in track(cells, console=console)
        ],
    }
    publish(console, out, name, results, markdown(results))


if __name__ == "__main__":
    main()
