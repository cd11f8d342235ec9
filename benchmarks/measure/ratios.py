"""Cells in which ours must not be slower than upstream, and what their ratios say."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from measure.report import geometric_mean, table
from measure.turns import LOWEST, Beside


class Cell(NamedTuple):
    """One measurement: a layer on a graph, and how it is called."""

    library: str
    graph: str
    layer: str
    channels: int
    index: str  # type: ignore[assignment]  # shadows tuple.index
    mode: str

    @property
    def call(self) -> str:
        """The part of a call that layer and graph do not give."""
        return f"{self.channels} channels, {self.index}, {self.mode}"


class Row(NamedTuple):
    """A cell, and what was found.

    Attributes:
        cell: what was measured.
        plain: microseconds of a step of upstream's.
        ours: microseconds of a step of ours.
        again: true if it was measured again.
        routed: true if a route was taken in ours.
    """

    cell: Cell
    plain: float
    ours: float
    again: bool
    routed: bool

    @classmethod
    def of(cls, cell: Cell, found: Beside, routed: bool) -> Row:
        """From seconds."""
        plain, ours = (float(f"{1e6 * seconds:.4g}") for seconds in (found.plain, found.ours))
        return cls(cell, plain, ours, found.again, routed)

    @classmethod
    def from_json(cls, line: Sequence[Any]) -> Row:
        """The row that :meth:`to_json` wrote."""
        size = len(Cell._fields)
        plain, ours, again, routed = line[size:]
        return cls(Cell(*line[:size]), plain, ours, bool(again), bool(routed))

    def to_json(self) -> list[Any]:
        """A list, since there are thousands."""
        return [*self.cell, self.plain, self.ours, int(self.again), int(self.routed)]

    @property
    def ratio(self) -> float:
        """How many times faster ours is."""
        return self.plain / self.ours


def write(stem: Path, facts: dict[str, Any], rows: Sequence[Row], graphs: Sequence[str]) -> Path:
    """Write ``<stem>.json``, a row in a line, and ``<stem>.md``; return the latter's path."""
    results = {**facts, "columns": [*Cell._fields, "plain us", "ours us", "again", "routed"]}
    results["rows"] = [row.to_json() for row in rows]
    text = json.dumps(results, separators=(",", ":")).replace("],[", "],\n[")
    Path(f"{stem}.json").write_text(text + "\n")
    path = Path(f"{stem}.md")
    path.write_text("\n".join(markdown(facts, rows, graphs)).rstrip() + "\n")
    return path


def markdown(facts: dict[str, Any], rows: Sequence[Row], graphs: Sequence[str]) -> list[str]:
    """The report: the worst cell of each layer and graph, all losses, and means."""
    losses = sorted((row for row in rows if row.ratio < LOWEST), key=lambda row: row.ratio)
    lines = [
        "# Never slower",
        "",
        f"`{facts['command']}`; processor time of upstream over that of ours, medians of turns. "
        f"Cells below {LOWEST} were measured again, with more turns.",
        "",
        *(f"- {name}: {value}" for name, value in facts["machine"].items()),
        "",
        f"{len(rows):,} cells, {len(losses):,} of them below {LOWEST}.",
        "",
    ]
    if not rows:
        return lines
    lines += [
        "## The worst cell of each layer",
        "",
        "Channels, index and mode stand where it is below 1.",
        "",
        *_by_graph(rows, graphs, _worst),
        f"## Cells below {LOWEST}",
        "",
        *table(
            ["layer", "graph", "call", "upstream, us", "ours, us", "ratio"],
            ([*_loss(row)] for row in losses),
        ),
        "## Geometric means",
        "",
        *_means(rows, graphs),
    ]
    return lines


def _loss(row: Row) -> list[str]:
    cell = row.cell
    layer = f"{cell.library} {cell.layer}" + ("" if row.routed else " (not routed)")
    return [layer, cell.graph, cell.call, f"{row.plain:g}", f"{row.ours:g}", f"{row.ratio:.2f}"]


def _worst(rows: Sequence[Row]) -> str:
    row = min(rows, key=lambda row: row.ratio)
    cell = row.cell
    where = f" ({cell.channels}, {cell.index}, {cell.mode})" if row.ratio < 1 else ""
    text = f"{row.ratio:.2f}"
    return (f"**{text}**" if row.ratio < LOWEST else text) + where


def _grouped(rows: Iterable[Row], key: Callable[[Cell], Any]) -> dict[Any, list[Row]]:
    groups = defaultdict(list)
    for row in rows:
        groups[key(row.cell)].append(row)
    return groups


def _by_graph(
    rows: Sequence[Row], graphs: Sequence[str], text: Callable[[list[Row]], str]
) -> list[str]:
    shown = [graph for graph in graphs if any(row.cell.graph == graph for row in rows)]
    lines = []
    for (library, layer), of_layer in _grouped(rows, lambda c: (c.library, c.layer)).items():
        cells = _grouped(of_layer, lambda c: c.graph)
        found = (text(cells[graph]) if graph in cells else "" for graph in shown)
        lines.append([f"{library} {layer}", *found])
    return table(["layer", *shown], lines)


def _means(rows: Sequence[Row], graphs: Sequence[str]) -> list[str]:
    shown = [graph for graph in graphs if any(row.cell.graph == graph for row in rows)]
    lines = []
    for (library, index, mode), group in _grouped(
        rows, lambda c: (c.library, c.index, c.mode)
    ).items():
        cells = _grouped(group, lambda c: c.graph)
        means = (geometric_mean([row.ratio for row in cells.get(graph, [])]) for graph in shown)
        found = (f"{mean:.2f}" if mean == mean else "" for mean in means)
        lines.append([f"{library}, {index}, {mode}", *found])
    return table(["mode", *shown], lines)
