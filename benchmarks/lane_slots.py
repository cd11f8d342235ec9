"""How long the lanes of a GPU wait for each other, computed from the rows of real graphs.

    python benchmarks/lane_slots.py

What a warp is busy for, what pieces of rows take in memory, and how much neighbouring groups gather
in common: with the list of tasks, and as it was without one. Nothing is measured. Results go to
``benchmarks/results/<date>-lane-slots.json`` and ``.md``.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from measure.output import RESULTS, publish

GROUPS = (2, 4, 8)
"""Of a warp: float32 with 64 channels, with 32 or bfloat16 with 64, and narrower ones."""
GROUPS_OF_BLOCK = 8
"""With 16 lanes each, of 128 threads."""


def _of_list(spans: Any, col: Any, num_pieces: int) -> dict[str, Any]:
    from measure.tasks import gathered_per_entry, slots_per_entry

    lengths = spans[:, 1] - spans[:, 0]
    return {
        "tasks": len(lengths),
        "empty tasks": int((lengths == 0).sum()),
        "longest": int(lengths.max()),
        "pieces": num_pieces,
        "slots": {groups: slots_per_entry(spans, groups) for groups in GROUPS},
        "gathered": gathered_per_entry(spans, col, GROUPS_OF_BLOCK),
    }


def compute(edge_index: Any, num_nodes: int) -> dict[str, Any]:
    """Of the rows by destination, which are those by source where edges go both ways."""
    from fastgraph import Graph
    from fastgraph.backends.tasks import chunk_of
    from measure.tasks import formerly, listed

    rows = Graph(edge_index, num_nodes, num_nodes).by_destination
    chunk = chunk_of(num_nodes, rows.col.numel())
    before = formerly(rows.ptr)
    tasks, cut_rows = listed(rows.ptr, chunk)
    return {
        "nodes": num_nodes,
        "edges": rows.col.numel(),
        "chunk": chunk,
        "rows that are cut": len(cut_rows),
        "before": _of_list(before, rows.col, len(before) - num_nodes),
        "after": _of_list(tasks[:, 1:3], rows.col, len(tasks) + len(cut_rows) - num_nodes),
    }


def markdown(results: dict[str, Any]) -> str:
    """The whole report."""
    from measure.report import table

    columns = ["graph", "", *(f"slots of {groups} groups" for groups in GROUPS)]
    columns += ["longest task", "pieces", "gathered"]
    rows = []
    for name, graph in results["graphs"].items():
        where = f"{name}, cut after {graph['chunk']}"
        for when in ("before", "after"):
            found = graph[when]
            slots = [f"{found['slots'][groups]:.2f}" for groups in GROUPS]
            numbers = [f"{found['longest']:,}", f"{found['pieces']:,}"]
            rows.append([where, when, *slots, *numbers, f"{found['gathered']:.2f}"])
            where = ""
    return "\n".join(
        [
            "# How long lanes wait for each other",
            "",
            f"`{results['command']}`; computed from the graphs, not measured. `slots` are the "
            "entries for which a warp of so many groups is busy, for each that it computes. "
            "`pieces` are those of long rows for which memory is kept, each as wide as a result. "
            f"`gathered` are the rows that a block of {GROUPS_OF_BLOCK} groups reads for the first "
            "time, for each entry.",
            "",
            *table(columns, rows),
        ]
    )


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
def main(out: Path) -> None:
    from measure.graphs import default_graphs, load

    results: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/lane_slots.py", *sys.argv[1:]]),
        "graphs": {},
    }
    for name in default_graphs():
        graph = load(name)
        results["graphs"][name] = compute(graph.edge_index, graph.num_nodes)
    publish(Console(stderr=True), out, "lane-slots", results, markdown(results))


if __name__ == "__main__":
    main()
