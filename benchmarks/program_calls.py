"""The cost of calls of layers by edge programs: processor time on a graph of a few edges.

    python benchmarks/program_calls.py BEFORE AFTER

Each is a folder with a checkout of fastgraph and its compiled kernels. Their processes take short
turns, since the machine is shared; a time is the least of three calls together, over all turns, and
the lower quartile is in the record. ``propagate`` alone is measured. Some layers compute more
around their programs by torch: GEN none, CG two linear maps, PNA its scalers. With
``--library dgl`` it is ``update_all`` by functions of users, with what DGL does around it.
Results go to ``benchmarks/results/<date>-program-calls.json`` and ``.md``.
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

NODES, CHANNELS, CALLS = 10, 8, 3
PASSES = ("inference", "training forward", "training, both")


@click.command(help=__doc__.split("\n\n")[0])
@click.argument("before", type=click.Path(path_type=Path, exists=True), required=False)
@click.argument("after", type=click.Path(path_type=Path, exists=True), required=False)
@click.option("--library", type=click.Choice(("pyg", "dgl")), default="pyg", show_default=True)
@click.option("--turns", default=40, show_default=True, help="Of each checkout.")
@click.option("--name", default="program-calls", show_default=True, help="Of the results.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
def main(
    before: Path | None, after: Path | None, library: str, turns: int, name: str, out: Path
) -> None:
    if before is None or after is None:
        answer(made() if library == "pyg" else made_of_dgl())
        return
    console = Console(stderr=True)
    found: dict[str, dict[str, list[list[float]]]] = {"before": {}, "after": {}}
    processes = {"before": _process(before, library), "after": _process(after, library)}
    for _ in track(range(turns), console=console):
        for when, process in processes.items():
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            for layer, passes in json.loads(process.stdout.readline()).items():
                known = found[when].setdefault(layer, [[] for _ in PASSES])
                for all_times, times in zip(known, passes, strict=True):
                    all_times += times
    for process in processes.values():
        process.communicate()
    chosen = {"microseconds": min, "quartiles": _quartile}
    times_of: dict[str, Any] = {
        name: {
            when: {layer: [round(choose(p), 1) for p in passes] for layer, passes in layers.items()}
            for when, layers in found.items()
        }
        for name, choose in chosen.items()
    }
    results = {
        "command": shlex.join(
            ["python", "benchmarks/program_calls.py", "BEFORE", "AFTER", "--library", library]
        ),
        "machine": machine_facts(1),
        "calls": "a call of `propagate`" if library == "pyg" else "message passing in DGL",
        "nodes": NODES if library == "pyg" else 30,
        "channels": CHANNELS,
        "turns": turns,
        **times_of,
    }
    publish(console, out, name, results, markdown(results))


def _process(folder: Path, library: str) -> subprocess.Popen[str]:
    """A process of a checkout, which gives the times of a turn for each line."""
    paths = os.pathsep.join(map(str, (folder.resolve(), Path(__file__).parent)))
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "--library", library]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, env=env, text=True, cwd="/", **pipes)


def _quartile(times: list[float]) -> float:
    return sorted(times)[len(times) // 4]


def answer(steps: dict[str, list[Callable[[], Any]]]) -> None:
    """Microseconds of calls for each layer and each of ``PASSES``, for each line that comes."""
    for _ in sys.stdin:
        found = {name: [_microseconds(step) for step in of] for name, of in steps.items()}
        print(json.dumps(found), flush=True)


def made() -> dict[str, list[Callable[[], Any]]]:
    """The calls of each layer, by ``PASSES``."""
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
        found[name] = _steps(layer, x, index, features.get(name, {}))
    return found


def made_of_dgl() -> dict[str, list[Callable[[], Any]]]:
    """The calls of each of the functions of users, by ``PASSES``."""
    os.environ.setdefault("DGLBACKEND", "pytorch")
    import fastgraph.dgl

    fastgraph.dgl.fix_import()
    import torch

    from measure.user_cases import CASES, graph_of

    torch.set_num_threads(1)
    torch.manual_seed(0)
    g = graph_of("tiny")
    x = torch.randn(g.num_nodes(), CHANNELS, requires_grad=True)
    grad = torch.randn(g.num_nodes(), CHANNELS)

    def steps(call: Callable[[Any], Any]) -> list[Callable[[], Any]]:
        def forward() -> Any:
            with g.local_scope():
                g.ndata["h"] = x
                return call(g)

        def inference() -> None:
            with torch.no_grad():
                forward()

        def both() -> None:
            torch.autograd.grad(forward(), x, grad)

        return [inference, forward, both]

    fastgraph.enable(min_edges=0)
    return {name: steps(case.build(CHANNELS)) for name, case in CASES.items() if name != "PNAConv"}


def _steps(layer: Any, x: Any, index: Any, features: dict[str, Any]) -> list[Callable[[], Any]]:
    import torch

    edges, arguments = _arguments(layer, x, index, features)
    leaves = [t for v in arguments.values() for t in (v if isinstance(v, tuple) else (v,))]
    leaves = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
    unique = list({id(t): t for t in (*leaves, *layer.parameters())}.values())
    grad = torch.randn_like(layer.propagate(edges, **arguments))

    def forward() -> Any:
        return layer.propagate(edges, **arguments)

    def inference() -> None:
        with torch.no_grad():
            forward()

    def both() -> None:
        torch.autograd.grad(forward(), unique, grad, allow_unused=True)

    return [inference, forward, both]


def _arguments(layer: Any, x: Any, index: Any, features: dict[str, Any]) -> tuple[Any, Any]:
    """The arguments that a layer passes to ``propagate``, as leaves of autograd."""
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


def _microseconds(step: Callable[[], Any]) -> list[float]:
    step()
    found = []
    for _ in range(15):
        start = time.thread_time_ns()
        for _ in range(CALLS):
            step()
        found.append((time.thread_time_ns() - start) / CALLS / 1000)
    return found


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
            f"`min_edges=0`: microseconds of processor time of {results['calls']}, before and "
            "after, least of all turns. The machine is shared and was busy.",
            "",
            *table(["layer", *PASSES], rows),
            *machine_lines(results["machine"]),
        ]
    )


if __name__ == "__main__":
    main()
