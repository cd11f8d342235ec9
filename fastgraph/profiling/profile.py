"""A profile: its rows, its parts, and the calls under way in each thread.

Time is exclusive: that of a call within another listed one counts for the inner one alone, so that
all parts of the thread that began the profile add up to its total.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

from fastgraph.machine.forks import lock_across_forks
from fastgraph.routing.observing import ignore, observe
from fastgraph.upstream import PACKAGES

_LIBRARIES = ("fastgraph", "torch", "wrapt", *PACKAGES)

SAMPLING = "sampling"
GATHERING = "gathering"
BACKWARD = "backward"
MOST_EVENTS = 200_000
"""Of a trace, in memory; what comes later is left out of it, and counted."""


class Key(NamedTuple):
    """The calls of a row.

    Attributes:
        layer: the name under which they are counted.
        line: file and line of the program that led to them.
        route: ``"operator"``, ``"edge program"``, or the reason why they run upstream's own code.
        is_routed: true for the first two.
    """

    layer: str
    line: str
    route: str
    is_routed: bool


@dataclass
class Row:
    """Calls of one layer from one line by one route.

    Attributes:
        key: which calls.
        calls: their number.
        timed: those whose time is known: a layer's, and DGL's ``update_all`` and ``apply_edges``.
        forward: seconds of wall time.
        processor: seconds of the process's processors, forward.
        backward: seconds of wall time in backward passes.
        backward_processor: seconds of the process's processors in backward passes.
        memory: bytes by which these calls raised the peak of the process, forward.
    """

    key: Key
    calls: int = 0
    timed: int = 0
    forward: float = 0.0
    processor: float = 0.0
    backward: float = 0.0
    backward_processor: float = 0.0
    memory: int = 0


class Event(NamedTuple):
    """A bar of the trace: its name and kind, begin and length in seconds, thread, and facts."""

    name: str
    kind: str
    begin: float
    seconds: float
    thread: int
    facts: dict[str, Any]


class Mark(NamedTuple):
    """A moment, by both clocks."""

    wall: float
    processor: float


def now() -> Mark:
    """The moment of now."""
    return Mark(time.perf_counter(), time.process_time())


@dataclass
class Span:
    """A call under way.

    Attributes:
        kind: ``"layer"``, ``"function"``, ``"sampling"``, ``"gathering"`` or ``"backward"``.
        name: of a layer or function.
        begin: when it began.
        peak: of the process then, in bytes.
        key: of its row, once it is decided.
        inner: wall and processor seconds of listed calls within it.
    """

    kind: str
    name: str
    begin: Mark
    peak: int
    key: Key | None = None
    inner: list[float] = field(default_factory=lambda: [0.0, 0.0])


@dataclass
class BackwardPass:
    """A backward pass under way.

    Attributes:
        span: that of the whole pass.
        thread: in which it was begun; nodes may run in others, while that one waits.
        since: when it came to :attr:`key`.
        inner: wall and processor seconds since then of listed calls, as checkpoints make them.
        outer: the pass that runs this one, as checkpoints do.
        key: the layer at which it is; ``None`` between layers.
    """

    span: Span
    thread: int
    since: Mark
    outer: BackwardPass | None
    key: Key | None = None
    inner: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def at(self, key: Key | None, moment: Mark) -> None:
        """The pass comes to a layer, or to what is between layers."""
        self.key, self.since, self.inner = key, moment, [0.0, 0.0]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.spans: list[Span] = []


class Profile:
    """Calls of a program while it is profiled. Printed, it is a table.

    Attributes:
        parts: seconds of wall time of the thread that began it, by ``"sampling"``,
            ``"gathering"``, ``"layers, forward"``, ``"layers, backward"``, ``"other, backward"``;
            what is left of :attr:`seconds` is the program's own.
        seconds: from its begin to its end, or to now.
        events: the bars of its trace.
        dropped: bars that the trace had no room for.
        is_running: true between its begin and its end.
    """

    def __init__(self) -> None:
        self._rows: dict[Key, Row] = {}
        self._lock = lock_across_forks()
        self._threads = _Thread()
        self._own = threading.get_ident()
        self._begin: Mark | None = None
        self._end: Mark | None = None
        self._backward: BackwardPass | None = None
        self.parts = dict.fromkeys(
            (SAMPLING, GATHERING, "layers, forward", "layers, backward", "other, backward"), 0.0
        )
        self.events: list[Event] = []
        self.dropped = 0
        self.is_running = False

    @property
    def rows(self) -> list[Row]:
        """Rows, those that took longest first."""
        return sorted(self._rows.values(), key=lambda row: -(row.forward + row.backward))

    @property
    def seconds(self) -> float:
        """Wall time from begin to end, or to now."""
        begin, end = self._begin or now(), self._end or now()
        return end.wall - begin.wall

    @property
    def processor_seconds(self) -> float:
        """Time of all the process's processors from begin to end, or to now."""
        begin, end = self._begin or now(), self._end or now()
        return end.processor - begin.processor

    def start(self) -> None:
        """Begin to count."""
        self.is_running = True
        self._begin, self._end = now(), None
        observe(self.decided)

    def stop(self) -> None:
        """Count no more."""
        self.is_running = False
        ignore(self.decided)
        self._end = now()

    def enter(self, kind: str, name: str) -> Span:
        """A call begins in this thread."""
        span = Span(kind, name, now(), _peak())
        self._threads.spans.append(span)
        return span

    def outer(self) -> list[Span]:
        """Calls of modules that have led to the one under way in this thread, outermost first."""
        return [span for span in self._threads.spans[:-1] if span.kind == "layer"]

    def leave(self, span: Span) -> None:
        """A call has ended, well or not."""
        end = now()
        spans = self._threads.spans
        spans.pop()
        wall, processor = end.wall - span.begin.wall, end.processor - span.begin.processor
        own_wall, own_processor = wall - span.inner[0], processor - span.inner[1]
        is_listed = span.key is not None or span.kind in (SAMPLING, GATHERING, BACKWARD)
        if spans:  # of calls that are not listed, those within them are handed on
            outer = spans[-1].inner
            outer[0] += wall if is_listed else span.inner[0]
            outer[1] += processor if is_listed else span.inner[1]
        if not is_listed:
            return
        passed = self._backward
        if passed is not None and passed.span is not span and passed.key is not None:
            # Checkpoints run forward again within the backward pass of a layer.
            passed.inner[0] += own_wall
            passed.inner[1] += own_processor
        if span.key is not None:
            with self._lock:
                row = self._rows[span.key]
                row.timed += 1
                row.forward += own_wall
                row.processor += own_processor
                row.memory += max(_peak() - span.peak, 0)
            self._add("layers, forward", own_wall)
            facts = {"route": span.key.route, "line": span.key.line}
            self._bar(span.key.layer, "forward", span.begin.wall, wall, facts)
        else:
            part = "other, backward" if span.kind == BACKWARD else span.kind
            self._add(part, own_wall)
            self._bar(span.name or span.kind, span.kind, span.begin.wall, wall, {})

    def decided(self, layer: str, route: str, is_routed: bool) -> None:
        """A call was counted, in the thread in which it runs."""
        key = Key(layer, _line(sys._getframe(1)), route, is_routed)
        with self._lock:
            self._rows.setdefault(key, Row(key)).calls += 1
        for span in reversed(self._threads.spans):
            if span.key is None and (span.kind == "function" or span.name == layer):
                span.key = key
                break
            if span.kind == "layer" and span.key is not None:
                break

    def backward_at(self, key: Key | None) -> None:
        """A backward pass comes to a layer, or leaves it."""
        under_way = self._backward
        if under_way is not None:
            moment = now()
            self._close_segment(under_way, moment)
            under_way.at(key, moment)

    def backward_begins(self) -> BackwardPass:
        """A backward pass begins in this thread, maybe within another one."""
        span = self.enter(BACKWARD, "")
        outer = self._backward
        if outer is not None:
            self._close_segment(outer, span.begin)
        self._backward = BackwardPass(span, threading.get_ident(), span.begin, outer)
        return self._backward

    def backward_ends(self, passed: BackwardPass) -> None:
        """A backward pass has ended."""
        self._close_segment(passed, now())
        self.leave(passed.span)
        self._backward = passed.outer
        if passed.outer is not None:
            passed.outer.at(passed.outer.key, now())

    def _close_segment(self, passed: BackwardPass, moment: Mark) -> None:
        key, begin = passed.key, passed.since
        if key is None:
            return
        length = moment.wall - begin.wall
        wall = length - passed.inner[0]
        processor = moment.processor - begin.processor - passed.inner[1]
        with self._lock:
            row = self._rows[key]
            row.backward += wall
            row.backward_processor += processor
        passed.span.inner[0] += wall
        passed.span.inner[1] += processor
        self._add("layers, backward", wall, passed.thread)
        self._bar(key.layer, BACKWARD, begin.wall, length, {"route": key.route, "line": key.line})

    def _add(self, part: str, seconds: float, thread: int | None = None) -> None:
        if (threading.get_ident() if thread is None else thread) == self._own:
            self.parts[part] += seconds

    def _bar(self, name: str, kind: str, begin: float, wall: float, facts: dict[str, Any]) -> None:
        if len(self.events) >= MOST_EVENTS:
            self.dropped += 1
            return
        origin = self._begin.wall if self._begin else begin
        thread = threading.get_native_id()
        self.events.append(Event(name, kind, begin - origin, wall, thread, facts))

    def __str__(self) -> str:
        from fastgraph.profiling.tables import as_text

        return as_text(self)

    __repr__ = __str__


def _peak() -> int:
    """The most memory that the process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _line(frame: FrameType | None) -> str:
    """File and line of the innermost frame that is the program's own."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _LIBRARIES:
            return f"{os.path.relpath(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
