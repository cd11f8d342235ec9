"""Being told of each decision on a call, as it is counted.

Counting itself asks nobody: while there are listeners, the rows of the process's counters are of a
class that tells them, and afterwards they are as they were.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from fastgraph.machine.forks import lock_across_forks
from fastgraph.routing.status import STATUS, Status, StatusRow

OPERATOR = "operator"
EDGE_PROGRAM = "edge program"

Listener = Callable[[str, str, bool], None]
"""Is told the name under which a call is counted, its route or the reason against one, and which
of both that is: true for a route."""

_listeners: list[Listener] = []
_lock = lock_across_forks()


class _Thread(threading.local):
    is_program = False


_THREAD = _Thread()


class _Reasons(Counter[str]):
    """Reasons of a row, counted by one at a time."""

    def __init__(self, layer: str, counts: Counter[str]) -> None:
        super().__init__(counts)
        self._layer = layer

    def __setitem__(self, reason: str, calls: int) -> None:
        super().__setitem__(reason, calls)
        _tell(self._layer, reason, False)


class _Row(StatusRow):
    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name == "programs":  # counted before the call as a whole
            _THREAD.is_program = True
        elif name == "routed":
            route = EDGE_PROGRAM if _THREAD.is_program else OPERATOR
            _THREAD.is_program = False
            _tell(self.layer, route, True)


class _ObservedStatus(Status):
    def named(self, layer: str) -> StatusRow:
        found = self._rows.get(layer)
        if found is None:
            found = self._rows.setdefault(layer, _observed(StatusRow(layer)))
        return found


def _observed(row: StatusRow) -> StatusRow:
    row.reasons = _Reasons(row.layer, row.reasons)
    row.__class__ = _Row
    return row


def _tell(layer: str, found: str, is_route: bool) -> None:
    for listener in tuple(_listeners):
        listener(layer, found, is_route)


def observe(listener: Listener) -> None:
    """Tell a listener of all decisions of this process from now on, in the thread of each call."""
    with _lock:
        _listeners.append(listener)
        if len(_listeners) == 1:
            STATUS.__class__ = _ObservedStatus
            for row in STATUS.rows:
                _observed(row)


def ignore(listener: Listener) -> None:
    """Tell a listener no more; without effect where it was told nothing."""
    with _lock:
        if listener not in _listeners:
            return
        _listeners.remove(listener)
        if not _listeners:
            STATUS.__class__ = Status
            for row in STATUS.rows:
                row.__class__ = StatusRow
                row.reasons = Counter(row.reasons)
