"""Cells in a process of their own, so that what crashes or hangs there loses its own cell only.

A GPU that has met an illegal access is lost to its process, and a segmentation fault or a kernel
that never ends would take all that is left to measure with it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from measure.cells import UPSTREAM, Bench, Cell, plan_left
from measure.output import Record

_STARTING = 300.0
"""Seconds until a process has to be there: more than torch takes to load on a busy machine."""

# Of memory, for sorted graphs: all that are measured stay known.
_CACHE_BYTES = 32 << 30


class LostError(RuntimeError):
    """The process has ended, or does not answer."""


class Apart:
    """A process with a device of its own, which is asked for rows.

    Args:
        device: where it measures.

    Raises:
        LostError: it does not come up.
    """

    def __init__(self, device: torch.device) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, str(device)))
        self._process.start()
        other.close()
        self._answer(_STARTING)

    def ask(self, method: str, arguments: tuple[Any, ...], seconds: float) -> Any:
        """The return value of a method of its bench.

        Raises:
            LostError: nothing after so many seconds, or never; the process is no more.
        """
        with contextlib.suppress(OSError):  # of the pipe, at whose other end nobody is any more
            self._connection.send((method, arguments))
        return self._answer(seconds)

    def _answer(self, seconds: float) -> Any:
        try:
            if not self._connection.poll(seconds):
                self.end()
                raise LostError(f"no answer within {seconds:.0f} s")
            answer, error = self._connection.recv()
        except (EOFError, OSError) as gone:
            self._process.join(5)
            code = self._process.exitcode
            self.end()
            how = f"by {signal.Signals(-code).name}" if code and code < 0 else f"with {code}"
            raise LostError(f"the process ended {how}") from gone
        if error is not None:
            self.end()
            raise LostError(error)
        return answer

    def end(self) -> None:
        """End it at once, and what it has started."""
        self._connection.close()
        if self._process.is_alive() and self._process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
        self._process.join()


def _serve(connection: Connection, device: str) -> None:
    """Say that it is there, then answer questions as long as somebody asks."""
    os.setsid()  # so that what compilers start ends with it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with Bench.opened(torch.device(device), _CACHE_BYTES) as bench:
        connection.send((None, None))
        while True:
            try:
                method, arguments = connection.recv()
            except EOFError:  # nobody asks any more
                return
            try:
                answer = getattr(bench, method)(*arguments), None
            except Exception as error:  # the device is lost, or the mistake is ours
                connection.send((None, f"{type(error).__name__}: {error}"))
                raise
            connection.send(answer)


def _end_with_parent() -> None:
    """A benchmark that is killed leaves nothing behind on the device, even in a cell that hangs."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)


class Running:
    """Measures cells one after another, and puts the rows into a record.

    Args:
        device: where.
        record: which may hold rows of an earlier run.
        tell: takes a line for each cell.
    """

    def __init__(self, device: torch.device, record: Record, tell: Callable[[str], None]) -> None:
        self._device, self._record, self._tell = device, record, tell
        self._apart: Apart | None = None
        self._beside: str | None = None

    def measure(self, cells: Sequence[Cell], deadline: float, timed: float, limit: float) -> None:
        """Put machine, bandwidths and the rows of all cells into the record.

        Cells that are there already are left out.

        Args:
            deadline: the ``time.monotonic()`` after which no cell is begun.
            timed: seconds in which the columns of a cell are timed, if there is time for all.
            limit: seconds after which a cell is given up.

        Raises:
            LostError: a process does not come up, or cannot even measure the bandwidth.
        """
        left = plan_left(cells, self._record.lines("row"))
        if left and time.monotonic() < deadline:
            for kind, value in self._asked(left[0].beside).ask("facts", (), limit).items():
                self._record.add(kind, value)
        for number, cell in enumerate(left):
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                self._record.add("left", [str(c) for c in left[number:]])
                return
            self._tell(str(cell))
            budget = min(timed, seconds / (len(left) - number))
            asked = self._asked(cell.beside)
            try:
                rows = asked.ask("rows", (cell, budget), limit)
            except LostError as error:
                self._apart = None
                rival = "ours" if cell.beside == UPSTREAM else cell.beside
                rows = [{**cell.to_json(), "rival": rival, "failed": str(error)}]
                self._tell(f"{cell}: {error}")
            for row in rows:
                self._record.add("row", row)
        self._record.add("left", [])

    def _asked(self, beside: str) -> Apart:
        """The process that measures what is beside us: one at a time is alive."""
        if self._apart is None or self._beside != beside:
            self.end()
            self._apart, self._beside = Apart(self._device), beside
        return self._apart

    def end(self) -> None:
        """End the process, if there is one."""
        if self._apart is not None:
            self._apart.end()
        self._apart = None
