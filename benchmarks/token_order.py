"""Attention over edges with the nodes in different orders, one process, in turns.

    FASTGRAPH_DATA=... PYTHONPATH=. python benchmarks/token_order.py [--quick]

Orders are those of ``fastgraph.reorder``, beside the graph's own and a random one. Kernels visit
rows as they are; the last column lets them put rows in order themselves, as they do after some
thirty uses of a graph. Results go to ``benchmarks/results/<date>-token-order.json`` and ``.md``.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track

from measure.output import RESULTS, publish

HEADS = 4
ORDERS = ("original", "random", "cluster", "rcm", "degree")
BY_ITSELF = "random, rows in order"
_NEVER = sys.maxsize


def measure(graph: Any, channels: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of a forward and a backward pass in each order, and to find it."""
    import torch
    from torch_geometric.data import Data

    import fastgraph
    from fastgraph import ops
    from measure.routing import ordering_after
    from measure.timing import Contestant, interleave

    torch.manual_seed(0)
    data = Data(edge_index=graph.edge_index, num_nodes=graph.num_nodes)
    tensors = [
        torch.randn(graph.num_nodes, HEADS, channels // HEADS, requires_grad=True) for _ in range(3)
    ]
    grad = torch.randn(graph.num_nodes, HEADS, channels // HEADS)

    def step(index: Any) -> None:
        for tensor in tensors:
            tensor.grad = None
        ops.attention(*tensors, index)[0].backward(grad)

    contestants, facts = [], {}
    for order in (*ORDERS, BY_ITSELF):
        start = time.perf_counter()
        edges = data.edge_index
        if order in ("random", BY_ITSELF):
            generator = torch.Generator().manual_seed(1)
            given = torch.randperm(graph.num_nodes, generator=generator)
            edges = fastgraph.reorder(data, given).data.edge_index
        elif order != "original":
            edges = fastgraph.reorder(data, order).data.edge_index
        seconds = time.perf_counter() - start
        after = 0 if order == BY_ITSELF else _NEVER
        contestant = Contestant(
            order, lambda e=edges: step(e), context=lambda n=after: ordering_after(n)
        )
        contestant.turn(2)
        contestants.append(contestant)
        span = (edges[0] - edges[1]).abs().double()
        facts[order] = {"seconds": seconds, "mean span": float(span.mean())}
    interleave(contestants, rounds=(rounds, rounds), budget=0)
    for contestant in contestants:
        facts[contestant.name]["spread"] = contestant.spread.to_json()
    return {
        "nodes": graph.num_nodes,
        "edges": graph.num_edges,
        "channels": channels,
        "orders": facts,
    }


def markdown(results: dict[str, Any]) -> str:
    """The whole report."""
    from measure.report import machine_lines, table

    rows = []
    for name, graph in results["graphs"].items():
        where = (
            f"{name} ({graph['nodes']:,} nodes, {graph['edges']:,} edges, {graph['channels']} "
            "channels)"
        )
        random = graph["orders"]["random"]["spread"]["median"]
        for order, found in graph["orders"].items():
            milliseconds = found["spread"]["median"]
            rows.append(
                [
                    where,
                    order,
                    f"{milliseconds:.1f}",
                    f"{random / milliseconds:.2f}x",
                    f"{found['mean span']:,.0f}",
                    f"{found['seconds']:.2f}",
                ]
            )
            where = ""
    head = ["graph", "order", "milliseconds", "of random", "mean span", "seconds to reorder"]
    return "\n".join(
        [
            "# Attention with the nodes in different orders",
            "",
            f"`{results['command']}`; `attention`, {HEADS} heads, forward and backward, float32,",
            "medians. The span of an edge is the difference between the numbers of its ends.",
            "",
            *table(head, rows),
            "",
            *machine_lines(results["machine"]),
        ]
    )


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--quick", is_flag=True, help="Smaller graphs and fewer repetitions.")
def main(out: Path, threads: int, quick: bool) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # read when torch is loaded
    import torch

    from measure.graphs import communities, load, mesh
    from measure.machine import machine_facts

    torch.set_num_threads(threads)
    if quick:
        graphs = [mesh(130), communities(20_000, 10, 100)]
    else:
        named = [load("wordnet")] if os.environ.get("FASTGRAPH_DATA") else []
        graphs = [*named, mesh(300), communities(100_000, 8, 100)]
    console = Console(stderr=True)
    results: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/token_order.py", *sys.argv[1:]]),
        "machine": machine_facts(threads),
        "graphs": {},
    }
    for graph in track(graphs, "orders", console=console):
        results["graphs"][graph.name] = measure(graph, 256, 3 if quick else 9)
    publish(console, out, "token-order-quick" if quick else "token-order", results,
            markdown(results))  # fmt: skip


if __name__ == "__main__":
    main()
