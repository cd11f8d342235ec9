"""Neighbour sampling beside DGL's, for one thread and for two.

    FASTGRAPH_DATA=... PYTHONPATH=. .venv-dgl-2.1.0/bin/python benchmarks/sampling.py [--quick]

Contestants sample the same seeds in turns, ours in its own form and as blocks of DGL, as its
``NeighborSampler`` gives them with the setting ``dgl_sampling``, DGL's as blocks. Processor time is
that of all threads together, which wait actively unless ``OMP_WAIT_POLICY`` is ``passive``; wall
time means nothing on a machine that has other work. Results go to
``benchmarks/results/<date>-sampling.json`` and ``.md``.
"""

from __future__ import annotations

import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from measure.output import RESULTS, publish

_BATCHES = 8
_SHARE_OF_MASK = 0.7


@click.command(help=__doc__.split("\n\n")[0])
@click.option(
    "--graphs",
    default="tolokers",
    show_default=True,
    help="Separated by commas; `types` is a random one of three types of nodes and six of edges.",
)
@click.option("--fanouts", default="15,10", show_default=True, help="By hop.")
@click.option("--batch", default=1024, show_default=True, help="How many seeds.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
@click.option("--quick", is_flag=True, help="Fewer repetitions.")
def main(graphs: str, fanouts: str, batch: int, out: Path, quick: bool) -> None:
    os.environ["FASTGRAPH_DGL_SAMPLING"] = "1"
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is loaded
    os.environ.setdefault("DGLBACKEND", "pytorch")
    import fastgraph.dgl

    fastgraph.dgl.fix_import()

    from measure.graphs import load
    from measure.machine import machine_facts

    results: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/sampling.py", *sys.argv[1:]]),
        "machine": machine_facts(2),
        "batch": batch,
        "fanouts": [int(fanout) for fanout in fanouts.split(",")],
        "cells": {},
    }
    for name in graphs.split(","):
        if name == "types":
            contestants = _of_types(results["fanouts"], batch)
        else:
            data = load(name)
            contestants = _contestants(data.edge_index, data.num_nodes, results["fanouts"], batch)
        results["cells"][name] = _measure(contestants, 10 if quick else 100)
    publish(Console(), out, "sampling", results, _markdown(results))


def _measure(contestants: dict[str, Callable[[int], int]], rounds: int) -> dict[str, Any]:
    import torch

    times: dict[tuple[str, int], list[tuple[float, float]]] = {}
    edges = {name: call(0) for name, call in contestants.items()}
    before = torch.get_num_threads()
    for _ in range(rounds):
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for name, call in contestants.items():
                processor, wall = time.process_time(), time.perf_counter()
                for batch in range(_BATCHES):
                    call(batch)
                taken = (time.process_time() - processor, time.perf_counter() - wall)
                times.setdefault((name, threads), []).append(taken)
    torch.set_num_threads(before)
    cells: dict[str, Any] = {}
    for (name, threads), taken in times.items():
        per_batch = [[1e3 * t / _BATCHES for t in kind] for kind in zip(*taken, strict=True)]
        cells[f"{name}, {threads}"] = {
            "contestant": name,
            "threads": threads,
            "edges": edges[name],
            "processor_ms": _summary(per_batch[0]),
            "wall_ms": _summary(per_batch[1]),
        }
    return cells


def _summary(values: list[float]) -> dict[str, float]:
    return {"least": min(values), "median": statistics.median(values)}


def _contestants(
    edge_index: Any, num_nodes: int, fanouts: list[int], batch: int
) -> dict[str, Callable[[int], int]]:
    """Functions that sample one of some batches and return how many edges it has."""
    import dgl
    import torch

    import fastgraph
    from fastgraph.sampling import neighbor_sample

    generator = torch.Generator().manual_seed(0)
    order = edge_index[1].argsort(stable=True)
    row = edge_index[0][order].contiguous()
    counts = torch.bincount(edge_index[1], minlength=num_nodes)
    colptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    seeds = [torch.randperm(num_nodes, generator=generator)[:batch] for _ in range(_BATCHES)]
    narrow = colptr.int(), row.int(), [one.int() for one in seeds]

    graph = dgl.graph((edge_index[0], edge_index[1]), num_nodes=num_nodes)
    graph.create_formats_()
    graph.edata["weight"] = torch.rand(graph.num_edges(), generator=generator)
    graph.edata["mask"] = torch.rand(graph.num_edges(), generator=generator) < _SHARE_OF_MASK
    excluded = torch.randperm(graph.num_edges(), generator=generator)[: 2 * batch]
    sampler = dgl.dataloading.NeighborSampler(fanouts[::-1])
    by_weight = dgl.dataloading.NeighborSampler(fanouts[::-1], prob="weight")
    by_mask = dgl.dataloading.NeighborSampler(fanouts[::-1], mask="mask")

    def ours(batch: int) -> int:
        return neighbor_sample(colptr, row, seeds[batch], fanouts).row.numel()

    def ours_narrow(batch: int) -> int:
        return neighbor_sample(narrow[0], narrow[1], narrow[2][batch], fanouts).row.numel()

    upstream = type(sampler).sample_blocks
    fastgraph.enable()

    def theirs(sampler: Any, excluded: Any = None) -> Callable[[int], int]:
        return lambda batch: _num_edges(upstream(sampler, graph, seeds[batch], excluded)[2])

    def ours_as_blocks(sampler: Any, excluded: Any = None) -> Callable[[int], int]:
        return lambda batch: _num_edges(sampler.sample_blocks(graph, seeds[batch], excluded)[2])

    return {
        "fastgraph": ours,
        "fastgraph, int32": ours_narrow,
        "fastgraph, blocks of DGL": ours_as_blocks(sampler),
        "DGL": theirs(sampler),
        "fastgraph, blocks of DGL by probabilities": ours_as_blocks(by_weight),
        "DGL, by probabilities": theirs(by_weight),
        "fastgraph, blocks of DGL by a mask": ours_as_blocks(by_mask),
        "DGL, by a mask": theirs(by_mask),
        "fastgraph, blocks of DGL without some edges": ours_as_blocks(sampler, excluded),
        "DGL, without some edges": theirs(sampler, excluded),
    }


def _of_types(fanouts: list[int], batch: int) -> dict[str, Callable[[int], int]]:
    """The same of blocks from the graph of several types of ``mini_batches.py``."""
    import dgl
    import torch

    import fastgraph
    from measure.batches import hetero_data

    upstream = dgl.dataloading.NeighborSampler.sample_blocks
    torch.manual_seed(0)
    data = hetero_data()
    edges = {kind: tuple(data[kind].edge_index) for kind in data.edge_types}
    graph = dgl.heterograph(edges, {kind: data[kind].num_nodes for kind in data.node_types})
    graph.create_formats_()
    size = graph.num_nodes("paper")
    seeds = [{"paper": torch.randperm(size)[:batch]} for _ in range(_BATCHES)]
    for kind in graph.canonical_etypes:
        graph.edges[kind].data["weight"] = torch.rand(graph.num_edges(kind))
        graph.edges[kind].data["mask"] = torch.rand(graph.num_edges(kind)) < _SHARE_OF_MASK
    samplers = {
        "": dgl.dataloading.NeighborSampler(fanouts[::-1]),
        " by probabilities": dgl.dataloading.NeighborSampler(fanouts[::-1], prob="weight"),
        " by a mask": dgl.dataloading.NeighborSampler(fanouts[::-1], mask="mask"),
    }
    fastgraph.enable()

    def contestant(sampler: Any, sample: Callable[..., Any]) -> Callable[[int], int]:
        return lambda batch: _num_edges(sample(sampler, graph, seeds[batch])[2])

    routed = dgl.dataloading.NeighborSampler.sample_blocks
    found = {}
    for how, sampler in samplers.items():
        found[f"fastgraph, blocks of DGL{how}"] = contestant(sampler, routed)
        found[f"DGL{how}"] = contestant(sampler, upstream)
    return found


def _num_edges(blocks: list[Any]) -> int:
    return sum(int(block.num_edges()) for block in blocks)


def _markdown(results: dict[str, Any]) -> str:
    lines = [
        f"Batches of {results['batch']} seeds, fanouts {results['fanouts']}; milliseconds each.",
        "",
        "| graph | sampler | threads | edges | processor: least | median | wall: least | median |",
        "| --- | --- | --: | --: | --: | --: | --: | --: |",
    ]
    for graph, cells in results["cells"].items():
        for cell in cells.values():
            kinds = (cell["processor_ms"], cell["wall_ms"])
            times = [f"{kind[which]:.2f}" for kind in kinds for which in ("least", "median")]
            facts = [graph, cell["contestant"], str(cell["threads"]), str(cell["edges"])]
            lines.append(f"| {' | '.join([*facts, *times])} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
