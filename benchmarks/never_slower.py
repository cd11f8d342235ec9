"""Every layer with a route, on graphs of all shapes, in all modes: is ours slower anywhere?

    FASTGRAPH_DATA=... python benchmarks/never_slower.py [--quick]
    FASTGRAPH_DATA=... PYTHONPATH=. .venv-dgl-2.1.0/bin/python benchmarks/never_slower.py \
        --library dgl

Upstream and ours take turns in one process, and processor time counts. Cells go to the record, a
line each, as soon as they are known, and a run leaves out those that are there. What the record
holds is written beside it as ``.json`` and ``.md``.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from measure.output import RESULTS, Record

GRAPHS = ("tiny", "cora-size", "molecules", "mesh", "dense", "tolokers")
CHANNELS = (1, 8, 64, 256)


def _names(value: str | None, known: tuple[str, ...], option: str) -> tuple[str, ...]:
    names = tuple(value.split(",")) if value else known
    for name in names:
        if name not in known:
            raise click.BadParameter(f"{option}: some of {', '.join(known)}, got {name!r}")
    return names


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--library", type=click.Choice(["pyg", "dgl"]), default="pyg", show_default=True)
@click.option("--graphs", help=f"Separated by commas. Default: {','.join(GRAPHS)}.")
@click.option("--layers", help="Separated by commas. Default: all.")
@click.option("--channels", default=",".join(map(str, CHANNELS)), show_default=True)
@click.option("--modes", help="Separated by commas: all, x, parameters, first, inference.")
@click.option("--index", help="Separated by commas: reused, fresh.")
@click.option("--budget", type=float, help="Seconds after which no cell is begun.")
@click.option("--record", type=click.Path(path_type=Path), help="Default: of today, in results.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True)
@click.option("--quick", is_flag=True, help="Few samples.")
@click.option("--again", is_flag=True, help="Measure what the record has below 0.95 once more.")
def main(
    library: str,
    graphs: str | None,
    layers: str | None,
    channels: str,
    modes: str | None,
    index: str | None,
    budget: float | None,
    record: Path | None,
    threads: int,
    quick: bool,
    again: bool,
) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # read when DGL is loaded
    if library == "dgl":
        os.environ.setdefault("DGLBACKEND", "pytorch")
        import fastgraph.dgl

        fastgraph.dgl.fix_import()
        from measure import dgl_classes as classes
    else:
        from measure import pyg_classes as classes  # type: ignore[no-redef]
    import torch

    import fastgraph
    from fastgraph.routing.switch import SWITCH
    from measure.machine import machine_facts
    from measure.modes import INDICES, MODES
    from measure.ratios import Cell, Row, write
    from measure.shapes import SHAPES
    from measure.turns import Effort

    torch.set_num_threads(threads)
    known = tuple(name for name in classes.LAYERS if name not in classes.UNAVAILABLE)
    chosen = [
        Cell(library, graph, layer, width, kind, mode)
        for graph in _names(graphs, GRAPHS, "--graphs")
        for layer in _names(layers, known, "--layers")
        for width in map(int, channels.split(","))
        for kind in _names(index, INDICES, "--index")
        for mode in _names(modes, MODES, "--modes")
    ]
    kept = Record(record or RESULTS / f"{datetime.now(UTC):%Y-%m-%d}-never-slower.jsonl")
    kept.mend()
    rows = {row.cell: row for row in map(Row.from_json, kept.lines("row"))}
    lost = {cell for cell, row in rows.items() if again and row.ratio < 0.95}
    left = [cell for cell in chosen if cell not in rows or cell in lost]
    console = Console(stderr=True)
    end = time.monotonic() + (budget or float("inf"))
    effort = Effort(turn=0.004, samples=3) if quick else Effort()
    with fastgraph.enabled():
        for row in _measured(left, classes.Case, SHAPES, effort, SWITCH.upstream, end):
            rows[row.cell] = row
            kept.add("row", row.to_json())
            if row.ratio < 0.95:
                console.print(f"{row.ratio:.2f}", *row.cell[1:3], row.cell.call)
    facts = {
        "command": shlex.join(["python", "benchmarks/never_slower.py", *sys.argv[1:]]),
        "machine": machine_facts(threads),
    }
    path = write(kept.stem, facts, list(rows.values()), GRAPHS)
    console.print(f"{len(rows)} of {len(chosen)} cells, written to {path}")


def _measured(
    cells: list[Any],
    make: Callable[[str, Any, int], Any],
    shapes: dict[str, Callable[[], Any]],
    effort: Any,
    upstream: Callable[[], AbstractContextManager[object]],
    end: float,
) -> Iterator[Any]:
    """The rows of cells, one after the other, until the time is up."""
    from measure.modes import beside
    from measure.ratios import Row
    from measure.routing import calls_routed

    graph = data = at = case = None
    for cell in cells:
        if time.monotonic() > end:
            return
        if cell.graph != graph:
            graph, data = cell.graph, shapes[cell.graph]()
        if (cell.graph, cell.layer, cell.channels) != at:
            at = cell.graph, cell.layer, cell.channels
            case = make(cell.layer, data, cell.channels)
        before = calls_routed()
        found = beside(case, cell.mode, cell.index, effort, upstream)
        if found is not None:
            yield Row.of(cell, found, calls_routed() > before)


if __name__ == "__main__":
    main()
