"""Global attention in the paper's shape, beside message passing of DGL and PyG.

    PYTHONPATH=. .venv-dgl-2.1.0/bin/python benchmarks/global_attention.py

Layers of ``fastgraph.nn``, 3 or as many as are asked for, with ReLU between them, and rows of unit
length before each of vanilla attention, on Kronecker graphs of three densities, as in figures 6 to
8 of "High-Performance and Programmable Attentional Graph Neural Networks with Global Tensor
Formulations" (SC 2023), with as many nodes as a small machine holds; inference, and training
forward and backward. Beside them are the same equations as DGL's functions on messages and as
layers of PyG, by upstream's own code. Times are by the processor's clock on one thread, lower
quartiles of all in turns. Results go to ``benchmarks/results/<date>-global-attention.json`` and
``.md``.
"""

from __future__ import annotations

import itertools
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from measure.output import RESULTS, machine_table, publish

GRAPHS = {"1 %": (12, 1e-2), "0.1 %": (14, 1e-3), "0.01 %": (15, 1e-4)}
"""Of each density the binary logarithm of the number of nodes."""

_WAYS = ("DGL", "PyG", "fastgraph.nn")


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--densities", default=",".join(GRAPHS), show_default=True)
@click.option("--channels", default="16,32,128", show_default=True)
@click.option("--layers", default="3", show_default=True, help="Numbers of layers.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
def main(densities: str, channels: str, layers: str, rounds: int, out: Path) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when DGL is loaded
    os.environ.setdefault("DGLBACKEND", "pytorch")
    import fastgraph.dgl

    fastgraph.dgl.fix_import()
    import torch

    from measure.graphs import kronecker_of_density
    from measure.machine import machine_facts
    from measure.turns import Effort
    from measure.ways import milliseconds

    torch.set_num_threads(1)
    console = Console(stderr=True)
    cells = []
    for density in densities.split(","):
        graph = kronecker_of_density(*GRAPHS[density])
        for width, depth in itertools.product(
            map(int, channels.split(",")), map(int, layers.split(","))
        ):
            for model, ways in _models(graph, width, depth).items():
                _check(ways)
                for training in (False, True):
                    in_order = {way: ways[way] for way in _WAYS}
                    found = milliseconds(in_order, training, Effort(0.05, rounds, 10))
                    cells.append(
                        {
                            "density": density,
                            "nodes": graph.num_nodes,
                            "edges": graph.num_edges,
                            "channels": width,
                            "layers": depth,
                            "model": model,
                            "training": training,
                            "milliseconds": found,
                        }
                    )
                    console.print(_row(cells[-1]))
    results = {
        "command": shlex.join(["python", "benchmarks/global_attention.py", *sys.argv[1:]]),
        "machine": machine_facts(1),
        "cells": cells,
    }
    publish(console, out, "global-attention", results, _markdown(results))


Call = Callable[[], tuple[Any, list[Any]]]
"""Gives the result of the layers, and the features and parameters that have gradients."""


def _models(graph: Any, width: int, depth: int) -> dict[str, dict[str, Call]]:
    import dgl
    import torch
    import torch.nn.functional as F

    import fastgraph.sparse as fgs
    from fastgraph.nn import GlobalAGNN, GlobalGAT, GlobalVA
    from measure import global_layers as layers

    torch.manual_seed(0)
    n = graph.num_nodes
    x = torch.randn(n, width, requires_grad=True)
    matrix = fgs.from_edge_index(graph.edge_index, num_nodes=n)
    edges = dgl.graph(tuple(graph.edge_index), num_nodes=n)
    made = {
        "VA": (GlobalVA, layers.dgl_va, layers.PygVA),
        "AGNN": (GlobalAGNN, layers.dgl_agnn, layers.PygAGNN),
        "GAT": (GlobalGAT, layers.dgl_gat, layers.PygGAT),
    }

    def ways(kind: Any, by_dgl: Callable[..., Any], by_pyg: Any) -> dict[str, Call]:
        own = [kind(width, width) for _ in range(depth)]
        leaves = [x, *(p for layer in own for p in layer.parameters())]
        of_pyg = [by_pyg(layer) for layer in own]

        def run(layer_of: Callable[[int, Any], Any]) -> Call:
            def call() -> tuple[Any, list[Any]]:
                h = x
                for number in range(depth):
                    # Results of VA are cubes of features: those of unit length stay finite.
                    h = F.normalize(h) if kind is GlobalVA else h
                    h = layer_of(number, h.relu() if number else h)
                return h, leaves

            return call

        return {
            "DGL": run(lambda k, h: by_dgl(own[k], edges, h)),
            "PyG": run(lambda k, h: of_pyg[k](h, graph.edge_index)),
            "fastgraph.nn": run(lambda k, h: own[k](matrix, h)),
        }

    return {model: ways(*parts) for model, parts in made.items()}


def _check(ways: dict[str, Call]) -> None:
    """All ways compute the same."""
    import torch

    expected = ways["DGL"]()[0].detach()
    scale = expected.abs().max()
    for way in _WAYS[1:]:
        torch.testing.assert_close(
            ways[way]()[0].detach() / scale, expected / scale, rtol=1e-3, atol=1e-4
        )


def _row(cell: dict[str, Any]) -> str:
    found = cell["milliseconds"]
    ours = found["fastgraph.nn"]
    first = [cell["density"], f"{cell['nodes']:,}", f"{cell['edges']:,}", str(cell["channels"])]
    first.append(str(cell["layers"]))
    kind = "training" if cell["training"] else "inference"
    times = [f"{found[way]:.3g}" for way in _WAYS]
    ratios = [f"{found[way] / ours:.1f}" for way in _WAYS[:2]]
    return f"| {' | '.join([*first, cell['model'], kind, *times, *ratios])} |"


def _markdown(results: dict[str, Any]) -> str:
    lines = [
        "# Global attention beside message passing",
        "",
        f"`{results['command']}`",
        "",
        "L layers, float32, Kronecker graphs. Lower quartiles of processor time, in",
        "milliseconds on one thread of a machine that others used, too; all ways in turns. The",
        "last columns say how many times as long DGL and PyG take.",
        "",
        "| density | nodes | edges | k | L | model | pass | DGL | PyG | fastgraph.nn | DGL | PyG |",
        "| --- | ---: | ---: | ---: | ---: | --- | --- | ---: | ---: | ---: | ---: | ---: |",
        *map(_row, results["cells"]),
        "",
        *machine_table(results["machine"]),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
