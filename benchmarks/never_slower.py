"""Every layer with a route, on graphs of all shapes, in all modes: is ours slower anywhere?

    FASTGRAPH_DATA=... python benchmarks/never_slower.py [--quick]
    FASTGRAPH_DATA=... PYTHONPATH=. .venv-dgl-2.1.0/bin/python benchmarks/never_slower.py \
        --library dgl

Upstream and ours take turns in one process, and processor time counts; how long, is in
``measure/turns.py``. Cells go to the record, a line each, as soon as they are known, and a run
leaves out those that are there. What the record holds is written beside it as ``.json`` and
``.md``, with the cells that were not measured.
"""

from __future__ import annotations

import functools
import gc
import itertools
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
    return _known(tuple(value.split(",")) if value else (), known, option)


def _known(names: tuple[str, ...], known: tuple[str, ...], option: str) -> tuple[str, ...]:
    """The names that were given, or all that are known.

    Raises:
        click.BadParameter: naming one that is not.
    """
    for name in names:
        if name not in known:
            raise click.BadParameter(f"{option}: some of {'; '.join(known)}; got {name!r}")
    return names or known


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--library", type=click.Choice(["pyg", "dgl"]), default="pyg", show_default=True)
@click.option("--graphs", help=f"Separated by commas. Default: {','.join(GRAPHS)}.")
@click.option(
    "--layers", multiple=True, help="One, by its name; may be given several times. Default: all."
)
@click.option("--channels", default=",".join(map(str, CHANNELS)), show_default=True)
@click.option("--modes", help="Separated by commas: all, x, parameters, first, inference.")
@click.option("--index", help="Separated by commas: reused, fresh.")
@click.option("--budget", type=float, help="Seconds after which no cell is begun.")
@click.option("--record", type=click.Path(path_type=Path), help="Default: of today, in results.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True)
@click.option("--quick", is_flag=True, help="Few rounds, short turns.")
@click.option("--again", is_flag=True, help="Measure what the record has below 0.95 once more.")
@click.option("--lost", is_flag=True, help="Only cells below 0.95 in the newest result with them.")
@click.option("--missing", is_flag=True, help="Only cells that no result has.")
@click.option("--totals", is_flag=True, help="Only count what the newest results have of cells.")
def main(
    library: str,
    graphs: str | None,
    layers: tuple[str, ...],
    channels: str,
    modes: str | None,
    index: str | None,
    budget: float | None,
    record: Path | None,
    threads: int,
    quick: bool,
    again: bool,
    lost: bool,
    missing: bool,
    totals: bool,
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
    from measure.machine import limit_memory, machine_facts
    from measure.modes import INDICES, MODES
    from measure.ratios import Cell, Known, Row, Table
    from measure.shapes import SHAPES
    from measure.turns import Effort

    torch.set_num_threads(threads)
    with fastgraph.enabled():
        known = classes.names()
    chosen = [
        Cell(library, graph, layer, width, kind, mode)
        for graph in _names(graphs, GRAPHS, "--graphs")
        for layer in _known(layers, known, "--layers")
        for width in map(int, channels.split(","))
        for mode in _names(modes, MODES, "--modes")
        for kind in _names(index, INDICES, "--index")
    ]
    before = Known.in_results(RESULTS)
    if lost:
        below = before.lost
        chosen = [cell for cell in chosen if cell in below]
    if missing:
        known = before.ratios.keys() | before.others
        chosen = [cell for cell in chosen if cell not in known]
    if totals:
        click.echo("\n".join(before.totals(chosen)))
        return
    kept = Record(record or RESULTS / f"{datetime.now(UTC):%Y-%m-%d}-never-slower.jsonl")
    kept.mend()
    rows = {row.cell: row for row in map(Row.from_json, kept.lines("row"))}
    empty = {Cell(*line) for line in kept.lines("empty")}
    failed = {Cell(*line): reason for *line, reason in kept.lines("failed")}
    below = {cell for cell, row in rows.items() if again and row.ratio < 0.95}
    known_cells = rows.keys() | empty | failed.keys()
    left = [cell for cell in chosen if cell not in known_cells or cell in below]
    console = Console(stderr=True)
    end = time.monotonic() + (float("inf") if budget is None else budget)
    effort = Effort(turn=0.004, rounds=4) if quick else Effort()
    limit_memory()
    machine = machine_facts(threads)
    kept.add("commit", machine["commit"])
    machine["commit"] = ", ".join(dict.fromkeys(kept.lines("commit")))
    with fastgraph.enabled():
        for found in _measured(left, classes.Case, SHAPES, effort, SWITCH.suspended, end):
            if isinstance(found, Row):
                rows[found.cell] = found
                kept.add("row", found.to_json())
                if found.ratio < 0.95:
                    console.print(f"{found.ratio:.2f}", *found.cell[1:3], found.cell.call)
                continue
            cell, reason = found
            if reason is None:
                empty.add(cell)
                kept.add("empty", list(cell))
            else:
                failed[cell] = reason
                kept.add("failed", [*cell, reason])
                console.print(f"{reason}:", *cell[1:3], cell.call)
    facts = {
        "command": shlex.join(["python", "benchmarks/never_slower.py", *sys.argv[1:]]),
        "machine": machine,
    }
    left = [cell for cell in chosen if cell not in rows.keys() | empty | failed.keys()]
    order = {cell: number for number, cell in enumerate(chosen)}
    measured = sorted(rows.values(), key=lambda row: order.get(row.cell, len(order)))
    table = Table(facts, GRAPHS, measured, sorted(empty), list(failed.items()), left)
    path = table.write(kept.stem)
    console.print(f"{len(rows)} of {len(chosen)} cells, written to {path}")


def _measured(
    cells: list[Any],
    make: Callable[[str, Any, int], Any],
    shapes: dict[str, Callable[[], Any]],
    effort: Any,
    upstream: Callable[[], AbstractContextManager[object]],
    end: float,
) -> Iterator[Any]:
    """The rows of cells, until the time is up; a cell and a reason where there is none.

    The reason is ``None`` where the mode asks for nothing.
    """
    from measure.modes import beside
    from measure.ratios import Row
    from measure.routing import calls_routed

    make_graph = functools.cache(lambda name: shapes[name]())
    at = case = None
    for (*layer, mode), group in itertools.groupby(
        cells, lambda c: (c.graph, c.layer, c.channels, c.mode)
    ):
        if time.monotonic() > end:
            return
        indices = {cell.index: cell for cell in group}
        before = calls_routed()
        try:
            if layer != at:
                case = None  # so that two are never there at once
                at, case = layer, make(layer[1], make_graph(layer[0]), layer[2])
                gc.unfreeze()
                gc.collect()
                gc.freeze()  # what is there by now need not be looked at between cells
            found = beside(case, mode, list(indices), effort, upstream)
        except (RuntimeError, MemoryError, ValueError, AssertionError) as error:
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:120]}"
            yield from ((cell, reason) for cell in indices.values())
            continue
        if found is None:
            yield from ((cell, None) for cell in indices.values())
            continue
        routed = calls_routed() > before
        yield from (Row.of(indices[index], row, routed) for index, row in found.items())


if __name__ == "__main__":
    main()
