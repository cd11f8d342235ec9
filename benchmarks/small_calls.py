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
    left = [c for cells in rows.values() for c in cells.values() if not c["routed"]]
    more = sum(_goes_through_more(cell) for cell in left)
    text = [
        *("# Functions of a small call", ""),
        *(f"`{facts['command']}`; inference on a graph that is known.", ""),
        *(*machine_lines(facts["machine"]), ""),
        "Functions of Python + of C that are called, by PyG alone / with fastgraph. Of "
        f"{len(left)} calls that are left to PyG {more} go through more functions of Python: in "
        "bold.",
        "",
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


def _called(run: Callable[[], object]) -> tuple[int, int]:
    """The functions of Python and of C that are called."""
    counts = {"call": 0, "c_call": 0}

    def seen(_: object, event: str, __: object) -> None:
        if event in counts:
            counts[event] += 1

    sys.setprofile(seen)
    try:
        run()
    finally:
        sys.setprofile(None)
    return counts["call"], counts["c_call"] - 1  # but for what ends counting


def _goes_through_more(cell: dict[str, Any]) -> bool:
    return bool(cell["ours"][0] > cell["plain"][0])


def _shown(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return ""
    text = " / ".join("{}+{}".format(*cell[side]) for side in ("plain", "ours"))
    if cell["routed"]:
        return f"{text} (routed)"
    return f"**{text}**" if _goes_through_more(cell) else text


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
