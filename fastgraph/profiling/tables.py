"""A profile as text, as a page of HTML and as a trace."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.table import Table

from fastgraph.rendering import rendered
from fastgraph.routing.status import NOT_COUNTED, has_compiled

if TYPE_CHECKING:
    from fastgraph.profiling.profile import Profile, Row

_MIB = 1 << 20


def as_text(profile: Profile) -> str:
    """The tables, 120 columns wide."""
    return rendered(*_tables(profile, os.path.basename))


def write_html(profile: Profile, path: Path) -> None:
    """Write the tables as a page that asks for nothing from elsewhere.

    Raises:
        OSError: the file cannot be written.
    """
    with open(os.devnull, "w") as nowhere:
        console = Console(width=160, record=True, file=nowhere)
        for table in _tables(profile, str):
            console.print(table)
    path.write_text(console.export_html(inline_styles=True), encoding="utf-8")


def write_trace(profile: Profile, path: Path) -> None:
    """Write the calls as a trace that chrome://tracing and Perfetto open.

    Raises:
        OSError: the file cannot be written.
    """
    events: list[dict[str, Any]] = [
        {
            "name": event.name,
            "cat": event.kind,
            "ph": "X",
            "ts": round(event.begin * 1e6, 3),
            "dur": round(event.seconds * 1e6, 3),
            "pid": os.getpid(),
            "tid": event.thread,
            "args": event.facts,
        }
        for event in profile.events
    ]
    content = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"left out": profile.dropped},
    }
    path.write_text(json.dumps(content), encoding="utf-8")


def _tables(profile: Profile, shown: Any) -> list[RenderableType]:
    return [_rows_table(profile, shown), _parts_table(profile)]


def _rows_table(profile: Profile, shown: Any) -> Table:
    table = Table(title="fastgraph profile: layers")
    for heading in ("layer", "line", "route, or why upstream's code"):
        table.add_column(heading, overflow="fold")
    for heading in ("calls", "forward ms", "cpu ms", "backward ms", "cpu ms", "peak MiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in profile.rows:
        table.add_row(row.key.layer, shown(row.key.line), row.key.route, *_figures(row))
    if not profile.rows:
        table.add_row("(no calls)", *[""] * 8)
    if has_compiled():
        table.caption, table.caption_justify = NOT_COUNTED, "left"
    return table


def _figures(row: Row) -> list[str]:
    if not row.timed:
        return [str(row.calls), *["-"] * 5]
    seconds = (row.forward, row.processor, row.backward, row.backward_processor)
    return [str(row.calls), *(f"{1000 * s:.1f}" for s in seconds), f"+{row.memory / _MIB:.0f}"]


def _parts_table(profile: Profile) -> Table:
    total = profile.seconds
    table = Table(title="fastgraph profile: time")
    table.add_column("part")
    table.add_column("s", justify="right")
    table.add_column("share", justify="right")
    parts = {**profile.parts, "the rest": total - sum(profile.parts.values())}
    for name, seconds in (*parts.items(), ("total", total)):
        table.add_row(name, f"{seconds:.3f}", f"{seconds / total:.1%}" if total else "")
    table.caption = f"processor time {profile.processor_seconds:.3f} s, of all threads"
    table.caption_justify = "left"
    return table
