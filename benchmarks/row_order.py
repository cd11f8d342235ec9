"""Operators on graphs whose rows stay as they are, and where they are put in order.

    python benchmarks/row_order.py [--quick]

Beside them the time to put both groupings in order, once for each graph. Results go to
``benchmarks/results/<date>-row-order.json`` and ``.md``.
"""

from __future__ import annotations

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

HEADS = 4
SUMS = ("spmm", "segment_reduce")
_NEVER = sys.maxsize


def _operators(num_nodes: int, channels: int) -> dict[str, Callable[[Any], Any]]:
    """Forward and backward of each operator, as functions of ``edge_index``."""
    import torch

    from fastgraph import ops

    torch.manual_seed(0)
    x, y, z = (torch.randn(num_nodes, channels, requires_grad=True) for _ in range(3))
    a, b, c = (t.view(num_nodes, HEADS, -1) for t in (x, y, z))
    att = torch.randn(1, HEADS, channels // HEADS, requires_grad=True)
    scores = [torch.randn(num_nodes, HEADS, requires_grad=True) for _ in range(2)]
    grad = torch.randn(num_nodes, channels)
    forward: dict[str, Callable[[Any], Any]] = {
        "spmm": lambda index: ops.spmm(x, index),
        "segment_reduce": lambda index: ops.segment_reduce(x, index),
        "gat": lambda index: ops.gat(a, *scores, index)[0],
        "gatv2": lambda index: ops.gatv2(a, b, att, index)[0],
        "attention": lambda index: ops.attention(a, b, c, index)[0],
    }

    def step(operator: Callable[[Any], Any]) -> Callable[[Any], None]:
        def run(index: Any) -> None:
            for tensor in (x, y, z, att, *scores):
                tensor.grad = None
            out = operator(index)
            out.backward(grad.view_as(out))

        return run

    return {name: step(operator) for name, operator in forward.items()}


def measure(edge_index: Any, num_nodes: int, channels: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of each operator without and with rows put in order, and to do that."""
    import torch

    from fastgraph import Graph
    from fastgraph.machine import native
    from fastgraph.tune.row_order import RowOrder
    from measure.routing import ordering_after
    from measure.timing import Contestant, interleave

    rows_of = RowOrder(native.library)
    graph = Graph(edge_index, num_nodes, num_nodes)
    _ = graph.by_source  # sorted before, and not timed
    gathered = torch.empty(num_nodes, channels)
    with ordering_after(0):
        start = time.perf_counter()
        for transpose in (False, True):
            rows_of(graph, gathered, transpose=transpose)
        milliseconds = 1e3 * (time.perf_counter() - start)

    def is_ordered(*, attention: bool) -> bool:
        groupings = (
            rows_of(graph, gathered, transpose=t, attention=attention) for t in (False, True)
        )
        return all(rows.order is not None for rows in groupings)

    found: dict[str, Any] = {}
    for name, step in _operators(num_nodes, channels).items():
        contestants = [
            Contestant(column, lambda i=index, s=step: s(i), context=lambda n=n: ordering_after(n))
            for column, index, n in (
                ("as they are", edge_index.clone(), _NEVER),
                ("in order", edge_index.clone(), 0),
            )
        ]
        for contestant in contestants:
            contestant.turn(2)
        interleave(contestants, rounds=(rounds, rounds), budget=0)
        found[name] = {c.name: c.spread.to_json() for c in contestants}
    return {
        "nodes": num_nodes,
        "edges": edge_index.shape[1],
        "channels": channels,
        "ordered": {name: is_ordered(attention=name not in SUMS) for name in found},
        "ordering": milliseconds,
        "operators": found,
    }


def markdown(results: dict[str, Any]) -> str:
    """The whole report."""
    from measure.report import machine_lines, table

    rows = []
    for name, graph in results["graphs"].items():
        where = (
            f"{name} ({graph['nodes']:,} nodes, {graph['edges']:,} edges), "
            f"{graph['channels']} channels"
        )
        for operator, spreads in graph["operators"].items():
            before, after = (spreads[c]["median"] for c in ("as they are", "in order"))
            times = [f"{before:.1f}", f"{after:.1f}", f"{before / after:.2f}x"]
            left = "" if graph["ordered"][operator] else ", left as they are"
            rows.append([where, operator + left, *times, f"{graph['ordering']:.0f}"])
            where = ""
    return "\n".join(
        [
            "# Rows in order",
            "",
            f"`{results['command']}`; forward and backward, float32, medians in milliseconds. "
            "`ordering` is the time to put both groupings of a graph in order, once. The mesh and "
            "the communities, in which most edges lead to nodes of the same one, are generated and "
            "numbered at random.",
            "",
            *machine_lines(results["machine"]),
            *table(["graph", "operator", "as they are", "in order", "gain", "ordering"], rows),
        ]
    )


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--quick", is_flag=True, help="Smaller graphs and fewer repetitions.")
def main(out: Path, threads: int, quick: bool) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # read when torch is loaded
    import torch

    from measure.graphs import communities, default_graphs, load, mesh
    from measure.machine import machine_facts

    torch.set_num_threads(threads)
    graphs = [(load(name), 256) for name in ([] if quick else default_graphs())]
    graphs += [(mesh(130 if quick else 250), 256)]
    sizes = [(20_000, 10, 100, 64)] if quick else [(100_000, 8, 100, 256), (200_000, 14, 300, 128)]
    graphs += [(communities(*shape), channels) for *shape, channels in sizes]
    console = Console(stderr=True)
    results: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/row_order.py", *sys.argv[1:]]),
        "machine": machine_facts(threads),
        "graphs": {},
    }
    for graph, channels in track(graphs, "operators", console=console):
        results["graphs"][graph.name] = measure(
            graph.edge_index, graph.num_nodes, channels, 3 if quick else 7
        )
    name = "row-order-quick" if quick else "row-order"
    publish(console, out, name, results, markdown(results))


if __name__ == "__main__":
    main()
