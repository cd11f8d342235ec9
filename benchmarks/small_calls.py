"""How many functions a call of PyG's layers goes through, plain and ours, where a graph is small.

    python benchmarks/small_calls.py

What is left to PyG loses by questions alone. These counts tell of them on any machine and beside
any other programs, where the processor time of a call of 100 us deviates by more than they take.
Functions of Python and of C are counted, those of torch among them; inference, on a graph that is
known. Results go to ``benchmarks/results/<date>-small-calls.json`` and ``.md``.
"""

from __future__ import annotations

import functools
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

import fastgraph
from measure.machine import machine_facts
from measure.output import RESULTS, publish
from measure.pyg_classes import Case, names
from measure.report import machine_lines, table
from measure.shapes import SHAPES

CELLS = (("tiny", 8), ("cora-size", 1), ("cora-size", 8))
"""Graphs and channels."""


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--layers", multiple=True, help="One, by its name; several times. Default: all.")
@click.option("--name", default="small-calls", show_default=True, help="Of the results.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
def main(layers: tuple[str, ...], name: str, out: Path) -> None:
    with fastgraph.enabled():
        known = names()
    rows: dict[str, dict[str, Any]] = {}
    for layer in layers or known:
        for graph, channels in CELLS:
            try:
                case = Case(layer, _graph(graph), channels)
            except ValueError:
                continue  # heads that this number of channels has not
            found = _counts(case, _graph(graph).edge_index)
            rows.setdefault(layer, {})[f"{graph}, {channels}"] = found
    facts = {
        "command": shlex.join(["python", "benchmarks/small_calls.py", *sys.argv[1:]]),
        "machine": machine_facts(torch.get_num_threads()),
    }
    headings = ["layer", *(f"{graph}, {channels} channels" for graph, channels in CELLS)]
    lines = [
        [layer, *(_shown(cells.get(f"{graph}, {channels}")) for graph, channels in CELLS)]
        for layer, cells in rows.items()
    ]
    more = sum(c["ours"] > c["plain"] for cells in rows.values() for c in cells.values())
    count = sum(map(len, rows.values()))
    text = [
        *("# Functions of a small call", ""),
        *(f"`{facts['command']}`; functions that are called by PyG alone / with fastgraph.", ""),
        *(*machine_lines(facts["machine"]), ""),
        *(f"Of {count} calls {more} go through more functions with fastgraph: in bold.", ""),
        *(*table(headings, lines), ""),
    ]
    publish(Console(stderr=True), out, name, {**facts, "rows": rows}, "\n".join(text))


@functools.cache
def _graph(name: str) -> Any:
    return SHAPES[name]()


def _counts(case: Case, edges: torch.Tensor) -> dict[str, Any]:
    """The functions of one call, after some from which its size is known."""

    def forward() -> None:
        case.forward(case.x, edges)

    with torch.no_grad():
        forward()
        plain = _called(forward)
        with fastgraph.enabled():
            before = _routed()
            for _ in range(3):
                forward()
            return {"plain": plain, "ours": _called(forward), "routed": _routed() > before}


def _routed() -> int:
    return sum(row.routed for row in fastgraph.status().rows)


def _called(run: Callable[[], object]) -> int:
    count = 0

    def seen(_: object, event: str, __: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(seen)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def _shown(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return ""
    text = f"{cell['plain']} / {cell['ours']}"
    text = f"**{text}**" if cell["ours"] > cell["plain"] else text
    return f"{text} (routed)" if cell["routed"] else text


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
