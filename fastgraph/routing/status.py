"""Counters of routed calls and of refusals with their reasons, their table, and the warnings."""

from __future__ import annotations

import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastgraph.machine.forks import lock_across_forks
from fastgraph.rendering import rendered
from fastgraph.routing.sizes import TOO_SMALL
from fastgraph.upstream import PACKAGES

if TYPE_CHECKING:
    from rich.table import Table

NOT_COUNTED = "calls within torch.compile are not counted"


class FallbackWarning(UserWarning):
    """A layer ran upstream's own code; issued once for each reason in a process."""


class RouteRefusedError(RuntimeError):
    """Under ``strict=True``, a layer that has a route could not take it."""


@dataclass
class StatusRow:
    """One layer class: calls that ran our kernels, calls that ran upstream's code, and why.

    Attributes:
        layer: its name.
        routed: calls that ran our kernels.
        fell_back: calls that ran upstream's code.
        reasons: how often a call fell back, by the reason.
        programs: of the routed calls, those by an edge program.
    """

    layer: str
    routed: int = 0
    fell_back: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    programs: int = 0


class Status:
    """Calls seen while fastgraph was enabled, by layer class."""

    def __init__(self) -> None:
        self._rows: dict[str, StatusRow] = {}

    @property
    def rows(self) -> list[StatusRow]:
        """One row for each layer class seen, in order of first appearance."""
        return list(self._rows.values())

    def row(self, layer: str) -> StatusRow:
        """The row of a layer class; one without calls where there were none.

        Args:
            layer: as it stands in the table, or without ``dgl.`` where only one has that name.

        Returns:
            The row, whose ``routed``, ``fell_back``, ``programs`` and ``reasons`` are counts.
        """
        found = self._rows.get(layer)
        if found is None:
            same = [row for name, row in self._rows.items() if name.endswith(f".{layer}")]
            found = same[0] if len(same) == 1 else StatusRow(layer)
        return found

    def named(self, layer: str) -> StatusRow:
        """The row of exactly this name, created on first use."""
        found = self._rows.get(layer)
        if found is None:
            found = self._rows.setdefault(layer, StatusRow(layer))  # another thread may be first
        return found

    def reset(self) -> None:
        """Forget all calls."""
        self._rows.clear()

    def __str__(self) -> str:
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
            programs = [("edge program", row.programs)] if row.programs else []
            reasons = [*programs, *row.reasons.most_common()] or [("", row.routed)]
            for position, (reason, calls) in enumerate(reasons):
                counts = (row.layer, str(row.routed), str(row.fell_back))
                table.add_row(*(counts if position == 0 else ("", "", "")), reason, str(calls))
        if not self.rows:
            table.add_row("(no calls)", "", "", "", "")
        if self is STATUS and has_compiled():
            table.caption, table.caption_justify = NOT_COUNTED, "left"
        further = [t for tables in FURTHER_TABLES for t in tables()] if self is STATUS else []
        return rendered(table, *further)

    __repr__ = __str__


def has_compiled() -> bool:
    """True if torch has compiled anything in this process, layers or not.

    A counter in compiled code would have to be guarded, and the code compiled again at its change.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and dynamo.counters["frames"]["ok"] > 0


FURTHER_TABLES: list[Callable[[], list[Table]]] = []
"""Tables of other parts of fastgraph, shown after the table of the process's calls."""

STATUS = Status()
_warned: set[str] = set()
_TOO_SMALL = TOO_SMALL.reason

# Two threads may be refused for the same reason.
_lock = lock_across_forks()


class _Thread(threading.local):
    """Where a thread counts, and the calls under way in it that are counted as a whole.

    Attributes:
        recorders: those to count in, the last of them.
        counted: the modules and functions that are called, the innermost last.
        refused: those modules among them that are not too small, but cannot take their route.
    """

    def __init__(self) -> None:
        self.recorders = [STATUS]
        self.counted: list[object] = []
        self.refused: list[object] = []


THREAD = _Thread()
"""Of the thread that asks. A tiny call asks often, and would lose by a function around it."""


@contextmanager
def recording() -> Iterator[Status]:
    """Count this thread's calls in a status of their own, without warnings."""
    recorder = Status()
    recorders = THREAD.recorders
    recorders.append(recorder)
    try:
        yield recorder
    finally:
        recorders.pop()


@contextmanager
def counted_as_whole(call: object) -> Iterator[None]:
    """Count nothing of what runs in here but the calls of other layers.

    Args:
        call: the module or function that runs.
    """
    under_way = THREAD.counted
    under_way.append(call)
    try:
        yield
    finally:
        under_way.pop()


def is_counted(module: object) -> bool:
    """True if the innermost call that was counted as a whole is one of this module."""
    counted = THREAD.counted
    return bool(counted) and counted[-1] is module


def count_routed(layer: str) -> None:
    """Count a call that runs our kernels."""
    # Without the lock, which would take longer: python lets other threads run at calls and jumps
    # only, and between reading and writing this attribute there are none.
    THREAD.recorders[-1].named(layer).routed += 1


def count_program(layer: str) -> None:
    """Count a routed call that runs an edge program."""
    row = THREAD.recorders[-1].named(layer)  # without the lock, as in `count_routed`
    row.programs += 1  # first: who observes counts knows then by what the call is routed
    row.routed += 1


def count_refused(layer: str, reason: str) -> None:
    """Count a call that runs upstream's code, and say so once for each reason."""
    recorders = THREAD.recorders
    with _lock:
        row = recorders[-1].named(layer)
        row.fell_back += 1
        row.reasons[reason] += 1
        is_new = len(recorders) == 1 and reason not in _warned
        if is_new:
            _warned.add(reason)
    if is_new:
        warnings.warn(
            f"fastgraph: {layer} runs upstream's own code: {reason}",
            FallbackWarning,
            stacklevel=caller_level(),
        )


def warned(reason: str) -> None:
    """Say no more why calls run upstream's code, since the user has been told."""
    _warned.add(reason)


def count_separate(layer: str, reason: str) -> None:
    """Count a call that our own separate kernels run, of which nobody need be warned."""
    with _lock:
        row = THREAD.recorders[-1].named(layer)
        row.fell_back += 1
        row.reasons[reason] += 1


def count_too_small(layer: str) -> None:
    """Count a call that upstream's code computes faster, which nobody need be warned of."""
    recorder = THREAD.recorders[-1]  # without the lock, as in `count_routed`
    row = recorder._rows.get(layer) or recorder.named(layer)
    row.fell_back += 1
    row.reasons[_TOO_SMALL] += 1


def leave(layer: str, call: object) -> list[object]:
    """:func:`count_too_small` of a call that is left to upstream with all that it calls.

    Args:
        layer: its name.
        call: the module or function that runs.

    Returns:
        The calls under way in this thread, with this one, which is to be removed when it ends.
    """
    thread = THREAD
    recorder = thread.recorders[-1]  # as `count_too_small`, without the time of its call
    row = recorder._rows.get(layer) or recorder.named(layer)
    row.fell_back += 1
    row.reasons[_TOO_SMALL] += 1
    counted = thread.counted
    counted.append(call)
    return counted


_LIBRARIES = ("fastgraph", "torch", *PACKAGES)


def caller_level() -> int:
    """The ``stacklevel`` at which a warning of the calling function points at the user's line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        if frame.f_back is None:
            break
        level, frame = level + 1, frame.f_back
    return level
