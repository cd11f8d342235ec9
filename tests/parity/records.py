"""Files of JSON lines, one for each event of a case; the last one of a case counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple


class Event(NamedTuple):
    """A case that has begun, or ended.

    Attributes:
        case: its name: pytest's, or the path of a script.
        outcome: ``"begun"`` or how it ended.
        why: the reason of a skip, or the first line of a failure.
        output: of a script that ended well, without what differs from run to run.
    """

    case: str
    outcome: str
    why: str = ""
    output: str = ""


def read(path: Path) -> list[Event]:
    """The events of a file, none where there is no file; a line that was cut short counts not."""
    events = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            events.append(Event(**json.loads(line)))
        except json.JSONDecodeError:  # the process died while it wrote
            continue
    return events


def write(path: Path, event: Event) -> None:
    """Append an event, on a line of its own even where one before it was cut short."""
    with path.open("a+b") as file:
        file.seek(0, 2)
        if file.tell():
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(f"{json.dumps(event._asdict())}\n".encode())


def finished(events: list[Event]) -> dict[str, Event]:
    """The last event of each case that has ended."""
    last = {event.case: event for event in events}
    return {case: event for case, event in last.items() if event.outcome != "begun"}


def under_way(events: list[Event]) -> str | None:
    """The case that has begun and not ended, if there is one."""
    last = {event.case: event for event in events}
    return next((case for case, event in last.items() if event.outcome == "begun"), None)
