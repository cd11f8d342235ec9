"""PyG's layers whose messages are traced into edge programs, with and without fastgraph.

    FASTGRAPH_DATA=... PYTHONPATH=. python benchmarks/any_message.py [--graph NAME] [--channels N]

Times are of whole layers, their linear maps included, by the processor's clock on one thread, both
in turns. Results go to ``benchmarks/results/<date>-<name>.json`` and ``.md``.
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


def layers(channels: int, degrees: Any) -> dict[str, Callable[[], Any]]:
    """The layers by name; those named with edges take as many channels of each edge.

    Args:
        channels: of the features and of each result.
        degrees: the number of nodes of each in-degree, from 0 on.
    """
    from torch.nn import Linear
    from torch_geometric import nn

    c = channels
    return {
        "ResGatedGraphConv": lambda: nn.ResGatedGraphConv(c, c),
        "GINEConv, edges": lambda: nn.GINEConv(Linear(c, c)),
        "GENConv max": lambda: nn.GENConv(c, c, aggr="max"),
        "GENConv mean, edges": lambda: nn.GENConv(c, c, aggr="mean"),
        "CGConv": lambda: nn.CGConv(c),
        "FiLMConv": lambda: nn.FiLMConv(c, c),
        "EdgeConv": lambda: nn.EdgeConv(Linear(2 * c, c)),
        "LEConv": lambda: nn.LEConv(c, c),
        "AGNNConv": lambda: nn.AGNNConv(),
        "SuperGATConv": lambda: nn.SuperGATConv(c, c // 4, heads=4).eval(),
        "GeneralConv, attention": lambda: nn.GeneralConv(c, c, attention=True),
        "GENConv softmax": lambda: nn.GENConv(c, c, learn_t=True),
        "GENConv softmax, edges": lambda: nn.GENConv(c, c),
        "GENConv powermean": lambda: nn.GENConv(c, c, aggr="powermean", p=2.0),
        "SAGEConv mean and max": lambda: nn.SAGEConv(c, c, aggr=["mean", "max"]),
        "SAGEConv std": lambda: nn.SAGEConv(c, c, aggr="std"),
        "PNAConv": lambda: nn.PNAConv(
            c,
            c,
            ["mean", "min", "max", "std"],
            ["identity", "amplification", "attenuation"],
            degrees,
        ),
        "FAConv": lambda: nn.FAConv(c),
    }


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--graph", default="tolokers", show_default=True)
@click.option("--channels", default=64, show_default=True)
@click.option("--only", multiple=True, default=[""], help="The layers whose names begin so.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--name", default="any-message", show_default=True, help="Of the results.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
def main(
    graph: str, channels: int, only: tuple[str, ...], rounds: int, name: str, out: Path
) -> None:
    import torch

    from measure.graphs import load
    from measure.machine import machine_facts

    torch.set_num_threads(1)
    data = load(graph)
    console = Console(stderr=True)
    degrees = torch.bincount(torch.bincount(data.edge_index[1], minlength=data.num_nodes))
    made = {
        layer: make for layer, make in layers(channels, degrees).items() if layer.startswith(only)
    }
    found = [
        measure(data, layer, make, channels, rounds)
        for layer, make in track(made.items(), console=console)
    ]
    results = {
        "command": shlex.join(["python", "benchmarks/any_message.py", *sys.argv[1:]]),
        "machine": machine_facts(1),
        "graph": {"name": data.name, "nodes": data.num_nodes, "edges": data.num_edges},
        "channels": channels,
        "cells": found,
    }
    publish(console, out, name, results, markdown(results))


def measure(
    data: Any, layer: str, make: Callable[[], Any], channels: int, rounds: int
) -> dict[str, Any]:
    """Milliseconds of both passes, plain and ours, and how far results are apart.

    Raises:
        click.ClickException: the layer is left to upstream.
    """
    import torch

    import fastgraph
    from measure.timing import spreads

    torch.manual_seed(0)
    module = make()
    x = torch.randn(data.num_nodes, channels, requires_grad=True)
    nodes = [x, x] if layer == "FAConv" else [x]  # which also takes the first layer's features
    edges = [torch.randn(data.num_edges, channels)] if "edges" in layer else []
    seconds: dict[str, dict[str, list[float]]] = {
        side: {"forward": [], "backward": []} for side in ("plain", "ours")
    }
    leaves = [x, *module.parameters()]
    found: dict[str, Any] = {}
    for turn in range(rounds + 1):
        for side, times in seconds.items():
            fastgraph.enable() if side == "ours" else fastgraph.disable()
            start = time.process_time()
            out = module(*nodes, data.edge_index, *edges)
            middle = time.process_time()
            # Parameters of a layer need not all be used.
            grads = torch.autograd.grad(out.sum(), leaves, allow_unused=True)
            end = time.process_time()
            found[side] = out.detach(), grads[0]
            if turn:
                times["forward"].append(middle - start)
                times["backward"].append(end - middle)
    row = next(row for row in fastgraph.status().rows if row.layer == type(module).__name__)
    fastgraph.disable()
    if not row.programs:
        raise click.ClickException(f"{layer} is left to upstream: {', '.join(row.reasons)}")
    pairs = zip(found["plain"], found["ours"], strict=True)
    return {
        "layer": layer,
        "difference": max(float((a - b).norm() / a.norm()) for a, b in pairs),
        "times": spreads(seconds),
    }


def markdown(results: dict[str, Any]) -> str:
    """The whole report."""
    from measure.report import machine_lines, table

    rows = []
    for cell in results["cells"]:
        row = [cell["layer"]]
        for kind in ("forward", "backward"):
            plain, ours = (cell["times"][side][kind]["median"] for side in ("plain", "ours"))
            row += [f"{plain:.0f}", f"{ours:.0f}", f"{plain / ours:.1f}x"]
        rows.append([*row, f"{cell['difference']:.1e}"])
    head = ["layer"]
    for kind in ("forward", "backward"):
        head += [f"{kind}, plain, ms", "ours, ms", "times as fast"]
    graph = results["graph"]
    return "\n".join(
        [
            "# Any message",
            "",
            f"`{results['command']}`",
            "",
            f"{graph['name']}: {graph['nodes']:,} nodes and {graph['edges']:,} edges; "
            f"{results['channels']} channels, float32. Whole layers, medians of processor time on "
            "one thread, both in turns; the difference is the larger one of the outputs and of the "
            "gradients of features, over the norm of upstream's.",
            "",
            *table([*head, "difference"], rows),
            *machine_lines(results["machine"]),
        ]
    )


if __name__ == "__main__":
    main()
