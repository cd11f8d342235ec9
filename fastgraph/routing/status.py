"""What was routed and what was not, and why: counters, the table, the warnings."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


class FallbackWarning(UserWarning):
    """A layer ran upstream's own code; issued once for each reason in a process."""


class RouteRefusedError(RuntimeError):
    """Under ``strict=True``, a layer that has a route could not take it."""


@dataclass
class StatusRow:
    """One layer class: calls that ran our kernels, calls that ran upstream's code, and why."""

    layer: str
    routed: int = 0
    fell_back: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


class Status:
    """Calls seen while fastgraph was enabled, by layer class."""

    def __init__(self) -> None:
        self._rows: dict[str, StatusRow] = {}

    @property
    def rows(self) -> list[StatusRow]:
        """One row for each layer class seen, in order of first appearance."""
        return list(self._rows.values())

    def row(self, layer: str) -> StatusRow:
        """The row of a layer class, created on first use."""
        found = self._rows.get(layer)
        if found is None:
            found = self._rows[layer] = StatusRow(layer)
        return found

    def reset(self) -> None:
        """Forget all calls."""
        self._rows.clear()

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        table = Table(title="fastgraph status")
        for heading, justify in (
            ("layer", "left"),
            ("routed", "right"),
            ("fell back", "right"),
            ("reason", "left"),
            ("calls", "right"),
        ):
            table.add_column(heading, justify=justify)  # type: ignore[arg-type]
        for row in self.rows:
            reasons = row.reasons.most_common() or [("", row.routed)]
            for position, (reason, calls) in enumerate(reasons):
                counts = (row.layer, str(row.routed), str(row.fell_back))
                table.add_row(*(counts if position == 0 else ("", "", "")), reason, str(calls))
        if not self.rows:
            table.add_row("(no calls)", "", "", "", "")
        console = Console(width=120, color_system=None)
        with console.capture() as capture:
            console.print(table)
        return capture.get()

    __repr__ = __str__


STATUS = Status()
_recorders: list[Status] = [STATUS]
_warned: set[str] = set()
_counted: list[object] = []


@contextmanager
def recording() -> Iterator[Status]:
    """Count calls in a status of their own, without warnings, instead of the process's."""
    recorder = Status()
    _recorders.append(recorder)
    try:
        yield recorder
    finally:
        _recorders.remove(recorder)


@contextmanager
def counted_already(module: object) -> Iterator[None]:
    """What ``module`` does within is part of a call that has been counted."""
    _counted.append(module)
    try:
        yield
    finally:
        _counted.pop()


def is_counted(module: object) -> bool:
    """Whether the innermost call that was counted as a whole is one of this module."""
    return bool(_counted) and _counted[-1] is module


def count_routed(layer: str) -> None:
    """Count a call that runs our kernels."""
    _recorders[-1].row(layer).routed += 1


def count_refused(layer: str, reason: str) -> None:
    """Count a call that runs upstream's code, and say so once for each reason."""
    row = _recorders[-1].row(layer)
    row.fell_back += 1
    row.reasons[reason] += 1
    if reason not in _warned and len(_recorders) == 1:
        _warned.add(reason)
        warnings.warn(
            f"fastgraph: {layer} runs upstream's own code: {reason}",
            FallbackWarning,
            stacklevel=4,
        )
