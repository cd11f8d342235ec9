"""Attention with features of edges: layers beside plain PyG, and what the operators cost per edge.

    PYTHONPATH=. python benchmarks/edge_features.py [--quick] [--kinds GATv2] [--name NAME]

Times are the processor's, on one thread, plain and ours in turns. Results go to
``benchmarks/results/<date>-<name>.json`` and ``.md``.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track

from measure.output import RESULTS, publish

HEADS, CHANNELS = 4, 16
EDGE_DIMS = (0, 4, 16, 32)
_TURN_SECONDS = 0.05

Step = Callable[[], object]


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--quick", is_flag=True, help="Fewer rounds, and no large graph.")
@click.option("--name", default="edge-features", show_default=True, help="Of the results.")
@click.option("--kinds", default="GATv2,Transformer,GAT", show_default=True, help="Of layers.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
def main(quick: bool, name: str, kinds: str, out: Path) -> None:
    import torch

    from measure.machine import machine_facts

    torch.set_num_threads(1)
    rounds = 5 if quick else 11
    graphs = [molecules(), lattice()]
    if os.environ.get("FASTGRAPH_DATA") and not quick:
        from measure.graphs import load

        graphs.append(load("tolokers"))
    cells = [
        (data, kind, edge_dim, wanted)
        for data in graphs
        for kind in kinds.split(",")
        for edge_dim in EDGE_DIMS
        for wanted in ((True, False) if edge_dim else (False,))
    ]
    console = Console(stderr=True)
    found = []
    for data, kind, edge_dim, wanted in track(cells, console=console):
        facts = {
            "graph": data.name,
            "nodes": data.num_nodes,
            "edges": data.num_edges,
            "kind": kind,
            "edge_dim": edge_dim,
            "edge_gradient": wanted,
        }
        found.append({**facts, **measure(data, kind, edge_dim, wanted, rounds)})
    results = {
        "command": shlex.join(["python", "benchmarks/edge_features.py", *sys.argv[1:]]),
        "machine": machine_facts(1),
        "cells": found,
    }
    publish(console, out, name, results, markdown(results))


def molecules(count: int = 128) -> Any:
    """A batch of random molecules: about 25 nodes each, 2.1 edges for a node."""
    import torch

    from measure.graphs import GraphData

    generator = torch.Generator().manual_seed(0)
    ends, first = [], 0
    for size in torch.randint(18, 33, (count,), generator=generator).tolist():
        nodes = torch.arange(1, size)
        # A tree whose nodes are joined to one of the three before them, and a ring now and then.
        near = (nodes - torch.randint(1, 4, (size - 1,), generator=generator)).clamp(min=0)
        rings = torch.randint(size, (2, round(0.05 * size) + 1), generator=generator)
        bonds = torch.cat([torch.stack([nodes, near]), rings[:, rings[0] != rings[1]]], 1) + first
        ends.append(torch.cat([bonds, bonds.flip(0)], 1))
        first += size
    return GraphData(f"{count} molecules", torch.cat(ends, 1), first)


def lattice(side: int = 140) -> Any:
    """A triangular lattice on a torus: six neighbours for each node, in both directions."""
    import torch

    from measure.graphs import GraphData

    number = torch.arange(side * side).view(side, side)
    steps = [(0, 1), (1, 0), (1, 1)]
    near = torch.cat([number.roll(step, (0, 1)).flatten() for step in steps])
    ends = torch.stack([number.flatten().repeat(len(steps)), near])
    return GraphData(f"lattice of {side}", torch.cat([ends, ends.flip(0)], 1), side * side)


def measure(data: Any, kind: str, edge_dim: int, wanted: bool, rounds: int) -> dict[str, Any]:
    """Milliseconds of a layer's step, plain and ours, and nanoseconds per edge of its operator."""
    import torch

    import fastgraph

    torch.manual_seed(0)
    step = _layer_step(data, kind, edge_dim, wanted)
    with fastgraph.enabled(strict=True):
        step()
    layers = interleave({"plain": (step, False), "ours": (step, True)}, rounds)
    forward, both = _operator_steps(data, kind, edge_dim, wanted)
    operator = interleave({"forward": (forward, False), "both": (both, False)}, rounds)
    each = {column: 1e6 * spread["median"] / data.num_edges for column, spread in operator.items()}
    per_edge = {"forward": each["forward"], "backward": each["both"] - each["forward"]}
    return {"layer": layers, "operator": operator, "nanoseconds_per_edge": per_edge}


def interleave(steps: dict[str, tuple[Step, bool]], rounds: int) -> dict[str, dict[str, float]]:
    """The processor's milliseconds of steps that run in turns, plain or with fastgraph enabled."""
    import fastgraph
    from measure.timing import Spread, no_garbage_collection

    def turn(step: Step, ours: bool, count: int) -> float:
        with fastgraph.enabled() if ours else contextlib.nullcontext():
            step()
            start = time.process_time()
            for _ in range(count):
                step()
            return (time.process_time() - start) / count

    with no_garbage_collection():
        counts = {
            name: max(1, min(50, int(_TURN_SECONDS / turn(*step, 1))))
            for name, step in steps.items()
        }
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(rounds):
            for name, step in steps.items():
                seconds[name].append(turn(*step, counts[name]))
    return {name: Spread.of(of).to_json() for name, of in seconds.items()}


def _layer_step(data: Any, kind: str, edge_dim: int, wanted: bool) -> Step:
    import torch
    from torch_geometric import nn

    layer = {"GATv2": nn.GATv2Conv, "GAT": nn.GATConv, "Transformer": nn.TransformerConv}[kind]
    width = HEADS * CHANNELS
    module = layer(width, CHANNELS, heads=HEADS, edge_dim=edge_dim or None)
    if kind != "Transformer":
        module.add_self_loops = False
    x = torch.randn(data.num_nodes, width, requires_grad=True)
    edge = torch.randn(data.num_edges, edge_dim, requires_grad=wanted) if edge_dim else None
    grad = torch.randn(data.num_nodes, width)

    def step() -> None:
        module.zero_grad()
        x.grad = None
        if edge is not None:
            edge.grad = None
        module(x, data.edge_index, edge).backward(grad)

    return step


def _operator_steps(data: Any, kind: str, edge_dim: int, wanted: bool) -> tuple[Step, Step]:
    import torch

    from fastgraph import ops

    def random(*shape: int) -> Any:
        return torch.randn(*shape, requires_grad=True)

    rows = (data.num_nodes, HEADS)
    edge = torch.randn(data.num_edges, edge_dim, requires_grad=wanted) if edge_dim else None
    inputs: list[Any]
    extra: dict[str, Any] = {}
    attention = "edge_attention" if edge_dim else "attention"
    operator: Any = getattr(ops, attention if kind == "Transformer" else kind.lower())
    if kind == "GATv2":
        inputs = [random(*rows, CHANNELS), random(*rows, CHANNELS), random(1, HEADS, CHANNELS)]
        if edge_dim:
            extra = {"edge": edge, "weight_edge": random(HEADS, edge_dim, CHANNELS)}
    elif kind == "GAT":
        inputs = [random(*rows, CHANNELS), random(*rows), random(*rows)]
        if edge_dim:
            of_edges = torch.randn(data.num_edges, HEADS, requires_grad=wanted)
            extra = {"score_edge": of_edges}
    else:
        inputs = [random(*rows, CHANNELS) for _ in range(3)]
        if edge_dim:
            extra = {"edge": edge, "weight_edge": random(HEADS, edge_dim, CHANNELS)}
    asked = [t for t in (*inputs, *extra.values()) if t.requires_grad]
    grad = torch.randn(*rows, CHANNELS)

    def forward() -> Any:
        return operator(*inputs, data.edge_index, **extra)[0]

    def both() -> Any:
        return torch.autograd.grad(forward(), asked, grad)

    return forward, both


def markdown(results: dict[str, Any]) -> str:
    """The whole report."""
    from measure.report import machine_lines, table

    rows = []
    for cell in results["cells"]:
        layer, each = cell["layer"], cell["nanoseconds_per_edge"]
        plain, ours = layer["plain"]["median"], layer["ours"]["median"]
        rows.append(
            [
                cell["graph"],
                cell["kind"],
                str(cell["edge_dim"]),
                ("yes" if cell["edge_gradient"] else "no") if cell["edge_dim"] else "",
                f"{plain:.2f}",
                f"{ours:.2f}",
                f"{plain / ours:.2f}x",
                f"{each['forward']:.0f}",
                f"{each['backward']:.0f}",
            ]
        )
    head = ["graph", "layer", "edge_dim", "gradient of edges", "plain, ms", "ours, ms", "faster"]
    head += ["operator forward, ns per edge", "backward"]
    sizes = {c["graph"]: f"{c['nodes']:,} nodes and {c['edges']:,} edges" for c in results["cells"]}
    return "\n".join(
        [
            "# Attention with features of edges",
            "",
            f"`{results['command']}`",
            "",
            f"Layers of {HEADS} heads of {CHANNELS} channels, float32, forward and backward; "
            "medians of processor time on one thread.",
            "Of GAT the operator has one number for each edge and head, whatever `edge_dim` is.",
            "",
            *(f"- {graph}: {size}" for graph, size in sizes.items()),
            "",
            *table(head, rows),
            "",
            *machine_lines(results["machine"]),
        ]
    )


if __name__ == "__main__":
    main()
