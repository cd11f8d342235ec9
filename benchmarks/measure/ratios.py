"""Cells in which ours must not be slower than upstream, and what their ratios say."""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from measure.report import geometric_mean, table
from measure.turns import AHEAD, BEHIND, FAR, LONG, LOWEST, Beside


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
        rounds: how often both were timed.
        again: true if it was measured again.
        routed: true if a route was taken in ours.
    """

    cell: Cell
    plain: float
    ours: float
    rounds: int
    again: bool
    routed: bool

    @classmethod
    def of(cls, cell: Cell, found: Beside, routed: bool) -> Row:
        """From seconds."""
        plain, ours = (float(f"{1e6 * seconds:.4g}") for seconds in (found.plain, found.ours))
        return cls(cell, plain, ours, found.rounds, found.again, routed)

    @classmethod
    def from_json(cls, line: Sequence[Any]) -> Row:
        """The row that :meth:`to_json` wrote."""
        size = len(Cell._fields)
        plain, ours, rounds, again, routed = line[size:]
        return cls(Cell(*line[:size]), plain, ours, rounds, bool(again), bool(routed))

    def to_json(self) -> list[Any]:
        """A list, since there are thousands."""
        numbers = self.rounds, int(self.again), int(self.routed)
        return [*self.cell, self.plain, self.ours, *numbers]

    @property
    def ratio(self) -> float:
        """How many times faster ours is."""
        return self.plain / self.ours


class Known(NamedTuple):
    """All results together, of each cell the newest.

    Attributes:
        ratios: how many times faster ours is, of each cell in the newest result that has it.
        others: cells that ask for nothing, and those that could not be measured.
    """

    ratios: dict[Cell, float]
    others: set[Cell]

    @classmethod
    def in_results(cls, folder: Path) -> Known:
        """Of a folder of results that :meth:`Table.write` wrote."""
        found = [json.loads(path.read_text()) for path in folder.glob("*never-slower*.json")]
        found.sort(key=lambda results: str(results["machine"]["date"]))
        size = len(Cell._fields)  # what follows times has changed since the first results
        ratios = {
            Cell(*line[:size]): line[size] / line[size + 1]
            for results in found
            for line in results["rows"]
        }
        others = {
            Cell(*line[:size])
            for results in found
            for kind in ("empty", "failed")
            for line in results.get(kind, ())
        }
        return cls(ratios, others - ratios.keys())

    @property
    def lost(self) -> set[Cell]:
        """The cells below :data:`LOWEST`."""
        return {cell for cell, ratio in self.ratios.items() if ratio < LOWEST}

    def totals(self, cells: Sequence[Cell]) -> list[str]:
        """A table in Markdown: how many of some cells were measured, are below, and are left."""
        lines = []
        for graph, group in itertools.groupby(cells, lambda cell: cell.graph):
            of_graph = list(group)
            found = [self.ratios[cell] for cell in of_graph if cell in self.ratios]
            below = sum(ratio < LOWEST for ratio in found)
            none = sum(cell in self.others for cell in of_graph)
            left = len(of_graph) - len(found) - none
            lines.append([graph, *(f"{n:,}" for n in (len(found), below, none, left))])
        return table(["graph", "measured", f"below {LOWEST}", "nothing to measure", "left"], lines)


class Table(NamedTuple):
    """All cells that were asked for.

    Attributes:
        facts: the command and the machine.
        graphs: names of graphs, in the order of columns.
        rows: the cells that were measured.
        empty: those of layers without parameters that would be the gradients of parameters.
        failed: those that could not be measured, and why.
        left: those that were not measured yet.
    """

    facts: dict[str, Any]
    graphs: Sequence[str]
    rows: Sequence[Row]
    empty: Sequence[Cell] = ()
    failed: Sequence[tuple[Cell, str]] = ()
    left: Sequence[Cell] = ()

    def write(self, stem: Path) -> Path:
        """Write ``<stem>.json``, a row in a line, and ``<stem>.md``; return the latter's path."""
        columns = [*Cell._fields, "plain us", "ours us", "rounds", "again", "routed"]
        results = {**self.facts, "columns": columns, "rows": [row.to_json() for row in self.rows]}
        results["empty"] = [list(cell) for cell in self.empty]
        results["failed"] = [[*cell, reason] for cell, reason in self.failed]
        results["left"] = [list(cell) for cell in self.left]
        text = json.dumps(results, separators=(",", ":")).replace("],[", "],\n[")
        Path(f"{stem}.json").write_text(text + "\n")
        path = Path(f"{stem}.md")
        path.write_text("\n".join(self.markdown()).rstrip() + "\n")
        return path

    def markdown(self) -> list[str]:
        """The report: the worst cell of each layer and graph, all losses, and means."""
        rows = self.rows
        losses = sorted((row for row in rows if row.ratio < LOWEST), key=lambda row: row.ratio)
        lines = [
            "# Never slower",
            "",
            f"`{self.facts['command']}`; processor time of upstream over that of ours, the "
            "lower quartile of the steps of each.",
            "",
            *(f"- {name}: {value}" for name, value in self.facts["machine"].items()),
            "",
            f"{len(rows):,} cells, {len(losses):,} of them below {LOWEST}; "
            f"{len(self.left) + len(self.failed):,} were not measured, and {len(self.empty):,} "
            "would be the gradients of parameters of layers without any.",
            "",
        ]
        if rows:
            lines += [
                "## The worst cell of each layer",
                "",
                "Channels, index and mode stand where it is below 1.",
                "",
                *_by_graph(rows, self.graphs, _worst),
                f"## Cells below {LOWEST}",
                "",
                *table(
                    ["layer", "graph", "call", "upstream, us", "ours, us", "ratio", "rounds"],
                    ([*_loss(row)] for row in losses),
                ),
                "## Geometric means",
                "",
                *_means(rows, self.graphs),
                "## How cells were judged",
                "",
                "Both sides take turns. A cell is settled when all rounds say that ours is ahead "
                f"by {AHEAD[0]}, two rounds by {AHEAD[1]}, three and more by {AHEAD[2]}, or when "
                f"three say that it is below {BEHIND}. A cell below {LOWEST} is measured again, "
                "with twice as many rounds, and only that counts. Where a step of upstream's takes "
                f"over {LONG:.0f} s, one step of it that is not warmed up, on a graph of either "
                f"kind, tells that ours is {FAR:.0f} times as fast.",
                "",
                *_judged(rows),
            ]
        if self.left or self.failed:
            lines += ["## Not measured", "", *self._not_measured()]
        return lines

    def _not_measured(self) -> list[str]:
        reasons = [(cell, "not begun") for cell in self.left] + list(self.failed)
        found: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for cell, reason in reasons:
            found[cell.graph, str(cell.channels), reason].append(f"{cell.library} {cell.layer}")
        return table(
            ["graph", "channels", "why", "cells", "of"],
            ([*key, str(len(of)), ", ".join(dict.fromkeys(of))] for key, of in found.items()),
        )


def _judged(rows: Sequence[Row]) -> list[str]:
    most = max((row.rounds for row in rows if not row.again), default=0)

    def kind(row: Row) -> str:
        if row.again:
            return f"again, as it seemed below {LOWEST}"
        if row.rounds == most:
            return f"all {most} rounds"
        return f"settled after {row.rounds} round" + ("s" if row.rounds > 1 else "")

    kinds = Counter(map(kind, rows))
    return table(["judged", "cells"], ([name, f"{kinds[name]:,}"] for name in sorted(kinds)))


def _loss(row: Row) -> list[str]:
    cell = row.cell
    layer = f"{cell.library} {cell.layer}" + ("" if row.routed else " (not routed)")
    numbers = f"{row.plain:g}", f"{row.ours:g}", f"{row.ratio:.2f}"
    return [layer, cell.graph, cell.call, *numbers, str(row.rounds)]


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
