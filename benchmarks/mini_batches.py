"""Epochs of mini-batches: PyG's layers and ours beside each other, both with our sampler.

    FASTGRAPH_DATA=... PYTHONPATH=. python benchmarks/mini_batches.py [--name NAME]

Layers on samples (1,024 seeds, fanouts 15 and 10) of tolokers, of wordnet, of a random graph of
38,000 nodes with 5 edges each and of a heterogeneous graph, on whole samples, and with
``trim_to_layer``, which leaves out of each layer what later ones do not need; and on batches of 128
graphs of the size of molecules. Both sides train on the same batches in turns, so that what else
the machine does meets both, and so does PyG's model without passing messages. Processor and wall
time of a batch, sampling and gathering included. Besides, what sampling takes alone, and with
gathering. Results go to
``benchmarks/results/<date>-<name>.json`` and ``.md``.
"""

from __future__ import annotations

import gc
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track

from measure.output import RESULTS, publish


def epoch(network: Any, batches: Any, loss: Callable[[Any, Any], Any]) -> None:
    """Train on all batches."""
    for batch in batches:
        network.zero_grad()
        loss(network, batch).backward()


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


def measured(
    source: str, kind: str, loader: Any, way: tuple[str, Any], rounds: int, prefetch: bool
) -> dict[str, Any]:
    """Milliseconds of a batch of both sides, and of PyG's without passing messages."""
    import torch

    import fastgraph
    from measure.batches import can_do_without_messages, model, without_messages

    def side(context: Callable[[Any], Any]) -> tuple[float, float]:
        torch.manual_seed(0)
        network = model(kind, source, loader)
        with context(network):
            return timed(lambda: epoch(network, loader, way[1]))

    settings = {"prefetch": True} if prefetch else {}
    sides: dict[str, Callable[[Any], Any]] = {
        "plain": lambda network: nullcontext(),
        "our": lambda network: fastgraph.enabled(**settings),
    }
    if can_do_without_messages(kind):
        sides["least"] = without_messages
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, context in sides.items():
            taken = side(context)
            if number > 0:  # the first warms up
                times[name].append(taken)
    found: dict[str, Any] = {"source": source, "model": kind, "way": way[0], "prefetch": prefetch}
    for name in sides:
        cpu, wall = lower_quartile(times[name])
        found[f"{name}_cpu"] = 1e3 * cpu / len(loader)
        found[f"{name}_wall"] = 1e3 * wall / len(loader)
    return found


def alone(loader: Any, rounds: int) -> Iterator[dict[str, Any]]:
    """Milliseconds that a batch takes without a model."""
    from torch_geometric.loader import NodeLoader
    from torch_geometric.sampler import NodeSamplerInput

    sampler = loader.node_sampler
    seeds = loader.input_data.node.split(loader.batch_size)
    inputs = [NodeSamplerInput(input_id=None, node=seed) for seed in seeds]
    ours = NodeLoader.filter_fn

    def as_pyg() -> None:
        NodeLoader.filter_fn = ours.__wrapped__  # type: ignore[attr-defined]
        try:
            list(loader)
        finally:
            NodeLoader.filter_fn = ours  # type: ignore[method-assign]

    steps: dict[str, Callable[[], object]] = {
        "sampling": lambda: [sampler.sample_from_nodes(i) for i in inputs],
        "sampling, and gathering as PyG does": as_pyg,
        "sampling and gathering": lambda: list(loader),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for number in range(4 * rounds + 1):
        for name, step in steps.items():
            found = timed(step)
            if number > 0:
                times[name].append(found)
    for name, found_times in times.items():
        cpu, wall = lower_quartile(found_times)
        yield {"step": name, "cpu_ms": 1e3 * cpu / len(seeds), "wall_ms": 1e3 * wall / len(seeds)}


def markdown(results: dict[str, Any]) -> str:
    """The whole report."""
    from measure.report import machine_lines, table

    rows = [
        [
            cell["source"],
            cell["model"],
            cell["way"] + (", prefetched" if cell["prefetch"] else ""),
            *(f"{cell[key]:.1f}" for key in ("plain_cpu", "our_cpu")),
            f"{cell['plain_cpu'] / cell['our_cpu']:.2f}x",
            *(_without_messages(cell) if "least_cpu" in cell else ("", "")),
            *(f"{cell[key]:.1f}" for key in ("plain_wall", "our_wall")),
            f"{cell['plain_wall'] / cell['our_wall']:.2f}x",
        ]
        for cell in results["cells"]
    ]
    of_batches = [
        [cell["step"], f"{cell['cpu_ms']:.2f}", f"{cell['wall_ms']:.2f}"]
        for cell in results["alone"]
    ]
    heading = ["graph", "model", "samples", "PyG, ms", "ours, ms", "", "no messages, ms", ""]
    return "\n".join(
        [
            "# Mini-batches",
            "",
            f"`{results['command']}`; milliseconds of a batch, of processor time and, in the last "
            "columns, by the wall clock, which counts what other programs do, too. Both sides have "
            "our sampler. `no messages` is PyG's step without passing any, and behind it is by how "
            "much PyG's would be faster if messages took no time.",
            "",
            *machine_lines(results["machine"]),
            *table([*heading, "PyG, wall", "ours, wall", ""], rows),
            "",
            "Milliseconds of a batch of tolokers without a model:",
            "",
            *table(["", "processor", "wall"], of_batches),
        ]
    )


def _without_messages(cell: dict[str, Any]) -> tuple[str, str]:
    return f"{cell['least_cpu']:.1f}", f"{cell['plain_cpu'] / cell['least_cpu']:.2f}x"


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
@click.option("--name", default="mini-batches", show_default=True, help="Of the results.")
@click.option("--threads", default=1, show_default=True)
@click.option("--rounds", default=5, show_default=True, help="Epochs of each side that count.")
@click.option("--batches", default=6, show_default=True, help="Of an epoch.")
@click.option("--prefetch/--no-prefetch", default=False, help="On our side.")
@click.option("--source", "sources", multiple=True, help="Only of these; by default all.")
@click.option("--model", "models", multiple=True, help="Only these; by default all.")
def main(
    out: Path,
    name: str,
    threads: int,
    rounds: int,
    batches: int,
    prefetch: bool,
    sources: tuple[str, ...],
    models: tuple[str, ...],
) -> None:
    import torch

    from fastgraph.pyg import fix_sampling
    from measure.batches import MODELS, SOURCES, can_train, loader_of, ways
    from measure.machine import machine_facts

    fix_sampling()
    torch.set_num_threads(threads)
    loaders = {source: loader_of(source, batches) for source in sources or SOURCES}
    cells = [
        (source, kind, loader, way)
        for source, loader in loaders.items()
        for kind in models or MODELS
        for way in ways(source)
        if can_train(kind, source)
    ]
    console = Console(stderr=True)
    results: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/mini_batches.py", *sys.argv[1:]]),
        "machine": machine_facts(threads),
        "alone": list(alone(loaders["tolokers"], rounds)) if "tolokers" in loaders else [],
        "cells": [measured(*cell, rounds, prefetch) for cell in track(cells, console=console)],
    }
    publish(console, out, name, results, markdown(results))


if __name__ == "__main__":
    main()
