"""Edge programs beside the operators written by hand for the same message, and stored messages.

    PYTHONPATH=. python benchmarks/edge_programs.py [--graph NAME] [--channels N] [--stored]

Times are the processor's, on one thread, contestants in turns. Stored messages are plain torch's,
as upstream computes them, and take gigabytes. Results go to
``benchmarks/results/<date>-<name>.json`` and ``.md``.
"""

from __future__ import annotations

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

HEADS = 8
MESSAGES = {
    "x": "x = gathered {c}\nsum x",
    "w * x": "x = gathered {c}\nw = edge 1\nt0 = mul w x\nsum t0",
    "max": "x = gathered {c}\nmax x",
    "ResGated": "k = row {c}\nq = gathered {c}\nv = gathered {c}\nt0 = add k q\nt1 = sigmoid t0\n"
    "t2 = mul t1 v\nsum t2",
    "FiLM": "x = gathered {c}\nb = row {c}\ng = row {c}\nt0 = mul g x\nt1 = add t0 b\n"
    "t2 = relu t1\nsum t2",
    "PNA": "x = gathered {c}\ny = row {c}\nt0 = add x y\nmean t0\nmin t0\nmax t0\nstd t0",
    "GEN softmax": "x = gathered {c}\nt0 = relu x\nt1 = constant 1e-07\nt2 = add t0 t1\n"
    "softmax t2 t2",
    "GATv2": "q = gathered {c}\nk = row {c}\na = parameter {c}\nt0 = add k q\nt1 = constant 0.2\n"
    "t2 = leaky_relu t0 t1\nt3 = dot t2 a {h}\nsoftmax q t3",
}

Step = Callable[[], Any]


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--graph", default="tolokers", show_default=True)
@click.option("--channels", default=128, show_default=True)
@click.option("--rounds", default=7, show_default=True)
@click.option("--stored", is_flag=True, help="Stored messages, too.")
@click.option("--name", default="edge-programs", show_default=True, help="Of the results.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
def main(graph: str, channels: int, rounds: int, stored: bool, name: str, out: Path) -> None:
    import torch

    from measure.graphs import load
    from measure.machine import machine_facts

    torch.set_num_threads(1)
    data = load(graph)
    console = Console(stderr=True)
    found = [measure(data, m, channels, rounds, stored) for m in track(MESSAGES, console=console)]
    results = {
        "command": shlex.join(["python", "benchmarks/edge_programs.py", *sys.argv[1:]]),
        "machine": machine_facts(1),
        "graph": {"name": data.name, "nodes": data.num_nodes, "edges": data.num_edges},
        "channels": channels,
        "cells": found,
    }
    publish(console, out, name, results, markdown(results))


def measure(data: Any, message: str, channels: int, rounds: int, stored: bool) -> dict[str, Any]:
    """Milliseconds of the forward and the backward pass of each contestant."""
    import torch

    from fastgraph import ops
    from fastgraph.edge_programs.evaluation import Edges, evaluate
    from fastgraph.edge_programs.program import parse
    from measure.timing import spreads

    torch.manual_seed(0)
    program = parse(MESSAGES[message].format(c=channels, h=HEADS))
    sizes = {"row": (data.num_nodes,), "gathered": (data.num_nodes,), "edge": (data.num_edges,)}
    given = {o.name: torch.randn(*sizes.get(o.place, ()), o.width) for o in program.operands}
    leaves = [t.requires_grad_() for name, t in given.items() if name != "w"]
    index = data.edge_index
    edges = Edges(index[0], index[1], data.num_nodes)
    steps: dict[str, Step] = {
        "program": lambda: ops.edge_program(program, given, index, num_out=data.num_nodes)
    }
    if stored:
        tensors = list(given.values())
        steps["stored"] = lambda: evaluate(program, tensors, edges, torch.float32)
    by_hand = _by_hand(message, given, index)
    if by_hand is not None:
        steps["by hand"] = by_hand
    seconds: dict[str, dict[str, list[float]]] = {
        name: {"forward": [], "backward": []} for name in steps
    }
    grads = [torch.randn_like(out) for out in steps["program"]()]
    for turn in range(rounds + 1):
        for name, step in steps.items():
            if name == "stored" and turn > 2:  # a hundred times slower
                continue
            times = [time.process_time()]
            out = step()
            times.append(time.process_time())
            torch.autograd.grad(out, leaves, grads)
            times.append(time.process_time())
            if turn:
                seconds[name]["forward"].append(times[1] - times[0])
                seconds[name]["backward"].append(times[2] - times[1])
    return {"message": message, "times": spreads(seconds)}


def _by_hand(message: str, given: dict[str, Any], index: Any) -> Step | None:
    """The operator of the same message, if there is one."""
    from fastgraph import ops

    if message == "x":
        return lambda: [ops.spmm(given["x"], index)]
    if message == "w * x":
        return lambda: [ops.spmm(given["x"], index, given["w"].view(-1))]
    if message == "max":
        return lambda: [ops.segment_reduce(given["x"], index, reduce="max", ties="split")]
    if message != "GATv2":
        return None

    def gatv2() -> Any:
        q, k, a = (given[name].unflatten(-1, (HEADS, -1)) for name in "qka")
        out = ops.gatv2(q, k, a.unsqueeze(0), index, negative_slope=0.2)[0]
        return [out.flatten(1)]

    return gatv2


def markdown(results: dict[str, Any]) -> str:
    """The whole report."""
    from measure.report import machine_lines, table

    rows = []
    for cell in results["cells"]:
        times = cell["times"]
        row = [cell["message"]]
        for kind in ("forward", "backward"):
            ours = times["program"][kind]["minimum"]
            row.append(f"{ours:.1f}")
            for rival in ("by hand", "stored"):
                has = rival in times
                row.append(f"{times[rival][kind]['minimum'] / ours:.2f}x" if has else "")
        rows.append(row)
    head = ["message"]
    for kind in ("forward", "backward"):
        head += [f"{kind}, ms", "operator by hand over it", "stored messages over it"]
    graph = results["graph"]
    return "\n".join(
        [
            "# Edge programs",
            "",
            f"`{results['command']}`",
            "",
            f"{graph['name']}: {graph['nodes']:,} nodes and {graph['edges']:,} edges; "
            f"{results['channels']} channels, float32; GATv2 has {HEADS} heads.",
            "Minima of processor time on one thread, contestants in turns: the machine is shared.",
            "",
            *table(head, rows),
            *machine_lines(results["machine"]),
        ]
    )


if __name__ == "__main__":
    main()
