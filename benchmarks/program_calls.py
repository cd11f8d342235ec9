"""What a call of a layer by an edge program costs: processor time on a graph of a few edges.

    python benchmarks/program_calls.py BEFORE AFTER

Each is a folder with a checkout of fastgraph and its compiled kernels. Its processes are started in
turns, since the machine is shared; a time is the fastest twentieth of ten calls together, the
better of all processes. ``propagate`` alone is measured. Some layers compute more around their
programs by torch: GEN none, CG two linear maps, PNA its scalers. Results go to
``benchmarks/results/<date>-program-calls.json`` and ``.md``.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track

from measure.machine import machine_facts
from measure.output import RESULTS, publish
from measure.report import machine_lines, table

NODES, CHANNELS, CALLS = 10, 8, 10
PASSES = ("inference", "training forward", "training, both")


@click.command(help=__doc__.split("\n\n")[0])
@click.argument("before", type=click.Path(path_type=Path, exists=True), required=False)
@click.argument("after", type=click.Path(path_type=Path, exists=True), required=False)
@click.option("--turns", default=3, show_default=True, help="Processes of each checkout.")
@click.option("--rounds", default=100, show_default=True, help="Of ten calls, in each process.")
@click.option("--name", default="program-calls", show_default=True, help="Of the results.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
def main(
    before: Path | None, after: Path | None, turns: int, rounds: int, name: str, out: Path
) -> None:
    if before is None or after is None:
        print(json.dumps(measured(rounds)))
        return
    console = Console(stderr=True)
    found: dict[str, dict[str, list[float]]] = {"before": {}, "after": {}}
    for _ in track(range(turns), console=console):
        for when, folder in (("before", before), ("after", after)):
            for layer, times in _of(folder, rounds).items():
                known = found[when].get(layer, times)
                found[when][layer] = list(map(min, known, times))
    results = {
        "command": shlex.join(["python", "benchmarks/program_calls.py", "BEFORE", "AFTER"]),
        "machine": machine_facts(1),
        "nodes": NODES,
        "channels": CHANNELS,
        "turns": turns,
        "rounds": rounds,
        "microseconds": found,
    }
    publish(console, out, name, results, markdown(results))


def _of(folder: Path, rounds: int) -> dict[str, list[float]]:
    """The times of a checkout, in a process of its own."""
    command = [sys.executable, str(Path(__file__)), "--rounds", str(rounds)]
    paths = os.pathsep.join(map(str, (folder.resolve(), Path(__file__).parent)))
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True, cwd="/")
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(rounds: int) -> dict[str, list[float]]:
    """Microseconds of a call for each layer and each of ``PASSES``."""
    import torch
    from torch import nn
    from torch_geometric import nn as pyg

    import fastgraph

    torch.set_num_threads(1)
    torch.manual_seed(0)
    nodes = torch.arange(NODES).repeat_interleave(3)
    index = torch.stack([nodes, (nodes + torch.tensor([1, 2, 5]).repeat(NODES)) % NODES])
    scalers = ["identity", "amplification", "attenuation"]
    degrees = torch.tensor([0, 0, 0, NODES])
    layers: dict[str, Any] = {
        "ResGatedGraphConv": pyg.ResGatedGraphConv(CHANNELS, CHANNELS),
        "GINEConv": pyg.GINEConv(nn.Linear(CHANNELS, CHANNELS)),
        "GENConv": pyg.GENConv(CHANNELS, CHANNELS),
        "CGConv": pyg.CGConv(CHANNELS),
        "PNAConv": pyg.PNAConv(CHANNELS, CHANNELS, ["mean", "min", "max", "std"], scalers, degrees),
    }
    features = {"GINEConv": {"edge_attr": torch.randn(index.shape[1], CHANNELS)}}
    fastgraph.enable(min_edges=0)
    found = {}
    for name, layer in layers.items():
        x = torch.randn(NODES, CHANNELS, requires_grad=True)
        found[name] = _times(layer, x, index, features.get(name, {}), rounds)
    return found


def _times(layer: Any, x: Any, index: Any, features: dict[str, Any], rounds: int) -> list[float]:
    import torch

    edges, arguments = _arguments(layer, x, index, features)
    leaves = [t for v in arguments.values() for t in (v if isinstance(v, tuple) else (v,))]
    leaves = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
    unique = list({id(t): t for t in (*leaves, *layer.parameters())}.values())
    grad = torch.randn_like(layer.propagate(edges, **arguments))

    def both() -> None:
        out = layer.propagate(edges, **arguments)
        torch.autograd.grad(out, unique, grad, allow_unused=True)

    forward = lambda: layer.propagate(edges, **arguments)  # noqa: E731
    with torch.no_grad():
        inference = _microseconds(forward, rounds)
    return [inference, _microseconds(forward, rounds), _microseconds(both, rounds)]


def _arguments(layer: Any, x: Any, index: Any, features: dict[str, Any]) -> tuple[Any, Any]:
    """What a layer passes to ``propagate``, as leaves of autograd."""
    import torch

    taken: dict[str, Any] = {}
    cls = type(layer)
    propagate = cls.propagate

    def leaf(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(leaf, value))
        wants = isinstance(value, torch.Tensor) and value.requires_grad
        return value.detach().requires_grad_() if wants else value

    def take(self: Any, edges: Any, *args: Any, **kwargs: Any) -> Any:
        taken.update(edges=edges, arguments={name: leaf(v) for name, v in kwargs.items()})
        return propagate(self, edges, *args, **kwargs)

    cls.propagate = take
    try:
        layer(x, index, **features)
    finally:
        cls.propagate = propagate
    return taken["edges"], taken["arguments"]


def _microseconds(step: Callable[[], Any], rounds: int) -> float:
    for _ in range(2 * CALLS):
        step()
    found = []
    for _ in range(rounds):
        start = time.thread_time_ns()
        for _ in range(CALLS):
            step()
        found.append(time.thread_time_ns() - start)
    return round(sorted(found)[len(found) // 20] / CALLS / 1000, 1)


def markdown(results: dict[str, Any]) -> str:
    """The whole report."""
    before, after = (results["microseconds"][when] for when in ("before", "after"))
    rows = [
        [layer, *(f"{b:.0f} -> {a:.0f}" for b, a in zip(times, after[layer], strict=True))]
        for layer, times in before.items()
    ]
    return "\n".join(
        [
            "# Calls of layers by edge programs",
            "",
            f"`{results['command']}`",
            "",
            f"{results['nodes']} nodes with 3 edges each, {results['channels']} channels, float32, "
            "`min_edges=0`: microseconds of processor time of a call of `propagate`, before and "
            "after. The machine is shared and was busy.",
            "",
            *table(["layer", *PASSES], rows),
            *machine_lines(results["machine"]),
        ]
    )


if __name__ == "__main__":
    main()
