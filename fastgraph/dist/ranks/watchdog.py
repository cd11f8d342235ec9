"""A thread that says which collective a device waits for, and what the other ranks asked for last.

Where the device waits, no host does: a rank whose peer has died, or asks for something else, stands
still at whatever reads the device next, and NCCL ends it after the time-out, by a number. So each
rank notes the collectives that its device has not gone beyond, and tells the board of the last.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from fastgraph.dist.ranks import board, ending
from fastgraph.dist.ranks.board import BOARD, Asked
from fastgraph.dist.ranks.own_device import HOST
from fastgraph.dist.ranks.world import (
    BEGINNING,
    WORLD,
    CollectiveError,
    RanksDivergedError,
    line_of_program,
)

_SECONDS_BETWEEN_LOOKS = 3.0


@dataclass
class Watched:
    """A collective that the device was told to wait for.

    Attributes:
        asked: which one.
        line: of the program.
        since: seconds of the host's clock.
        passed: where the device is after it; ``None`` while the host is told to wait itself.
    """

    asked: Asked
    line: str
    since: float = field(default_factory=time.monotonic)
    passed: Any = None


class Watchdog:
    """The collectives of this rank that its device has not gone beyond."""

    def __init__(self) -> None:
        self._waiting: deque[Watched] = deque()
        self._last = ""
        self._beats = 0
        self._heard: dict[int, tuple[str, float]] = {}
        self._told_at = 0.0
        self._stop: threading.Event | None = None

    def begin(self) -> None:
        """Watch from now on, where devices wait for collectives, and nothing of ranks before."""
        if self._stop is not None:
            self._stop.set()
            self._stop = None
        self._waiting.clear()
        self._last, self._told_at = "", 0.0
        self._heard.clear()
        if WORLD.size == 1 or WORLD.device == HOST or WORLD.through == "gloo":
            return
        self._stop = threading.Event()
        thread = threading.Thread(target=self._run, args=(self._stop,), daemon=True)
        thread.start()
        atexit.register(_end, self._stop, thread)

    def waits(self, asked: Asked) -> Watched:
        """The device is about to wait for a collective."""
        one = Watched(asked, line_of_program())
        while self._waiting and _is_over(self._waiting[0]):
            self._waiting.popleft()
        self._waiting.append(one)
        return one

    def was_told(self, one: Watched) -> None:
        """The device waits by itself from now on."""
        event = torch.get_device_module(WORLD.device).Event()
        event.record()
        one.passed = event

    def look(self) -> None:
        """Tell the others what this rank asked for last, and see what has become of its oldest one.

        Raises:
            RanksDivergedError: from the board.
            CollectiveError: likewise.
        """
        newest = self._waiting[-1] if self._waiting else None
        if newest is not None:
            self._last = f"{newest.asked.what} (collective {newest.asked.number}) at {newest.line}"
        self._beats += 1
        BOARD.beat(f"{self._beats}\n{self._last}")
        oldest = next((one for one in list(self._waiting) if not _is_over(one)), None)
        now = time.monotonic()
        if oldest is None or now - oldest.since < _SECONDS_BETWEEN_LOOKS:
            self._told_at = 0.0
            self._heard.clear()
            return
        others = self._listen(now)
        BOARD.look(oldest.asked, oldest.line)
        waited = now - oldest.since
        if waited >= max(board.SECONDS_OF_SILENCE, 2 * self._told_at):
            self._told_at = waited
            print(
                f"fastgraph.dist: the device of rank {WORLD.rank} of {WORLD.size} has waited "
                f"{waited:.0f} s for {oldest.asked.what} (collective {oldest.asked.number}) at "
                f"{oldest.line}; {'; '.join(others)}",
                file=sys.stderr,
                flush=True,
            )

    def _listen(self, now: float) -> list[str]:
        """The last words of the other ranks."""
        said = []
        for rank, text in BOARD.beats().items():
            before, since = self._heard.get(rank, ("", now))
            if text != before:
                since = now
            self._heard[rank] = text, since
            _, _, last = text.partition("\n")
            silence = now - since
            is_silent = silence > 2 * _SECONDS_BETWEEN_LOOKS
            said.append(
                f"rank {rank} has last asked its device to wait for {last or 'nothing'}"
                + (f", and has said nothing for {silence:.0f} s" if is_silent else "")
            )
        return said

    def _run(self, stop: threading.Event) -> None:
        torch.get_device_module(WORLD.device).set_device(WORLD.device)  # of each thread its own
        while not stop.wait(_SECONDS_BETWEEN_LOOKS) and not BOARD.is_over:
            try:
                self.look()
            except (RanksDivergedError, CollectiveError) as error:
                # The program's own thread may be held by the device for as long as NCCL waits.
                ending.end_by(error)
                return


WATCHDOG = Watchdog()

BEGINNING.append(WATCHDOG.begin)


def _is_over(one: Watched) -> bool:
    return one.passed is not None and bool(one.passed.query())


def _end(stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    thread.join(_SECONDS_BETWEEN_LOOKS)
