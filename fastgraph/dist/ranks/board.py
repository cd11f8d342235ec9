"""A board where ranks that wait, have failed or have ended say so, beside all collectives.

A collective that another rank will never join does not end before the time-out. So a rank that
has waited for some seconds looks at what the others have said, and each that waits says for what.
"""

from __future__ import annotations

import itertools
import json
import time
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from fastgraph.dist.ranks.world import (
    DEFAULT_TIMEOUT,
    WORLD,
    CollectiveError,
    RanksDivergedError,
    line_of_program,
)

_SECONDS_OF_THE_LAST = 3.0
"""For which rank 0, which may hold the store, waits at its end until the others have read it."""

_SECONDS_BETWEEN_LOOKS = 0.02

ADVICE = (
    "the script has done something else on a rank, as by the time, a file of its own or a "
    "generator without a seed"
)

_FAILED, _ENDED, _WAITS = "failed", "ended", "waits"

_OF_DEVICE = "device "

SECONDS_OF_SILENCE = 30.0
"""After which people are told what a rank waits for; then after twice as long, and so on."""

_REMEMBERED = 512
"""Collectives, of which there are fewer between two in which each rank waits for all: so far can a
rank that exchanges rows with some alone be ahead of another.
"""


class Rows(NamedTuple):
    """The rows that a rank exchanges with those of its group.

    Attributes:
        ranks: of the group.
        sent: to each of them.
        received: from each of them.
    """

    ranks: Sequence[int]
    sent: Sequence[int]
    received: Sequence[int]

    def among(self, rank: int) -> tuple[int, int] | None:
        """Those sent to a rank and received from it; ``None`` if it is not in the group."""
        if rank not in self.ranks:
            return None
        place = self.ranks.index(rank)
        return self.sent[place], self.received[place]


class Asked(NamedTuple):
    """A collective that this rank has asked for.

    Attributes:
        number: how many it had asked for before.
        what: its kind, shape and dtype, which all ranks have alike.
        is_of_host: whether this process waits for its end; for that of others its device does.
        rows: of an exchange.
    """

    number: int
    what: str
    is_of_host: bool = True
    rows: Rows | None = None


class Board:
    """The messages of ranks; none where there is no store of a process group.

    Attributes:
        number: of collectives that this rank has asked for.
        digest: of all of them, in their order.
        is_over: whether this rank has failed or ended.
    """

    def __init__(self) -> None:
        self.number = self.digest = 0
        self.is_over = self._has_ended = False
        self._asked: list[Asked | None] = [None] * _REMEMBERED

    def ask(self, what: str, is_of_host: bool = True, rows: Rows | None = None) -> Asked:
        """Count a collective, of which all ranks ask for the same."""
        asked = Asked(self.number, what, is_of_host, rows)
        self._asked[asked.number % _REMEMBERED] = asked
        self.number += 1
        self.digest = zlib.crc32(what.encode(), self.digest)
        return asked

    def look(self, asked: Asked, line: str = "") -> None:
        """Say what this rank has waited for, and see what the others have said.

        Args:
            asked: what it waits for.
            line: of the program; default: the one that runs in this thread.

        Raises:
            RanksDivergedError: another rank waits for another than this one, which is as far or
                was there, or for other rows of it; or its script has come to its end.
            CollectiveError: another rank has failed.
        """
        line = line or line_of_program()
        # A thread says what a device waits for, and knows nothing of the program's own word.
        kind = "" if asked.is_of_host else _OF_DEVICE
        rows = json.dumps([*map(list, asked.rows)]) if asked.rows else ""
        self._say(f"{_WAITS}\n{asked.number}\n{asked.what}\n{rows}\n{line}", kind)
        for rank, state, rest in self._others() or []:
            mine = f"rank {WORLD.rank} of {WORLD.size} waits for {asked.what}"
            if state == _FAILED:
                raise CollectiveError(f"{mine} at {line}, but {self.gone()}")
            if state == _ENDED and int(rest[0]) <= asked.number:
                raise RanksDivergedError(f"{mine} at {line}, but {self.gone()}: {ADVICE}")
            if state == _WAITS:
                self._compare(asked, line, rank, rest)

    def _compare(self, asked: Asked | None, line: str, rank: int, said: list[str]) -> None:
        """Refuse what another rank waits for, if this one asks or has asked for something else.

        A collective of some rows ends on ranks that exchange none with the one that is missing. So
        ranks can wait for the same one in vain, or for others that do not have the same number.

        Args:
            asked: what this rank waits for; ``None``: nothing, as its script has ended.
            line: where, of the program.
            rank: the other one.
            said: the number, the name, the rows and the line of what it waits for.
        """
        number, what, listed, there = said
        is_here = asked is not None and asked.number == int(number)
        mine = asked if is_here else self._asked[int(number) % _REMEMBERED]
        if mine is None or mine.number != int(number):
            return
        place = f"at {line}" if is_here else f"before {line}"
        if mine.what != what:
            raise RanksDivergedError(
                "ranks ask for different collectives:\n"
                f"  rank {WORLD.rank}: {mine.what} {place}\n"
                f"  rank {rank}: {what} at {there}\n{ADVICE}"
            )
        if mine.rows is None or not listed:
            return
        ours, theirs = mine.rows.among(rank), Rows(*json.loads(listed)).among(WORLD.rank)
        if ours is not None and theirs is not None and ours != theirs[::-1]:
            raise RanksDivergedError(
                f"ranks exchange different rows in {what}:\n"
                f"  rank {WORLD.rank} sends {ours[0]} to rank {rank} and receives {ours[1]}, "
                f"{place}\n  rank {rank} receives {theirs[1]} and sends {theirs[0]}, at {there}\n"
                f"{ADVICE}"
            )

    def missing(self, asked: Asked) -> list[int]:
        """The ranks that do not wait for a collective, nor for a later one, as far as they say.

        Nobody, if a lower rank than this one waits: it tells people.
        """
        waiting = {
            rank for rank, state, rest in self._others() or []
            if state == _WAITS and int(rest[0]) >= asked.number
        }  # fmt: skip
        if any(rank < WORLD.rank for rank in waiting):
            return []
        return [rank for rank in range(WORLD.size) if rank not in {*waiting, WORLD.rank}]

    def beat(self, text: str) -> None:
        """Say that this rank lives, and anything else."""
        self._say(text, "beat ")

    def beats(self) -> dict[int, str]:
        """The last beats of the other ranks; empty ones of those without."""
        store, found = _store(), {}
        for rank in range(WORLD.size) if store is not None else ():
            if rank != WORLD.rank:
                try:
                    key = f"beat {rank}"
                    found[rank] = store.get(key).decode() if store.check([key]) else ""
                except (RuntimeError, ConnectionError):  # with the rank that had the store
                    return found
        return found

    def fail(self, error: BaseException) -> None:
        """Say that this rank has failed."""
        self.is_over = True
        self._say(f"{_FAILED}\n{type(error).__name__}: {error}")

    def end(self) -> None:
        """Say that the script of this rank has come to its end."""
        if not self._has_ended:
            self._say(f"{_ENDED}\n{self.number}")
            self.is_over = self._has_ended = True

    def meet(self, *further: int) -> list[list[int]]:
        """Say that the script has come to its end, and wait until those of all ranks have.

        Args:
            further: facts of this rank.

        Returns:
            For each rank its number and digest of collectives and these; nothing if they cannot be
            known.

        Raises:
            RanksDivergedError: another rank waits for this one.
            CollectiveError: another rank has failed.
        """
        self.is_over = self._has_ended = True
        facts = [self.number, self.digest, *further]
        self._say("\n".join([_ENDED, *map(str, facts)]))
        found = {WORLD.rank: facts}
        deadline = time.monotonic() + DEFAULT_TIMEOUT.total_seconds()
        while len(found) < WORLD.size:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
            others = self._others()
            if others is None or time.monotonic() > deadline:
                return []
            for rank, state, rest in others:
                if state == _ENDED and len(rest) != len(facts):
                    return []
                if state == _ENDED:
                    found[rank] = [int(fact) for fact in rest]
                elif state == _FAILED:
                    raise CollectiveError(self.gone())
                elif state == _WAITS and int(rest[0]) >= self.number:
                    raise RanksDivergedError(
                        f"the script has come to its end on rank {WORLD.rank}, and rank {rank} "
                        f"waits for {rest[1]} at {rest[3]}: {ADVICE}"
                    )
                elif state == _WAITS:
                    self._compare(None, "the end of the script", rank, rest)
        _leave_together()
        return [found[rank] for rank in range(WORLD.size)]

    def gone(self) -> str:
        """The ranks that have said that they failed or ended, and why; or nothing."""
        said = []
        for rank, state, rest in self._others() or []:
            if state == _FAILED:
                said.append(f"rank {rank} has failed: {rest[0]}")
            elif state == _ENDED:
                said.append(f"rank {rank} has come to the end of its script")
        return ", ".join(said)

    def _others(self) -> list[tuple[int, str, list[str]]] | None:
        """Ranks and what they or their devices have said: of which kind it is, and the rest of it.

        ``None`` where the store is gone.
        """
        store, found = _store(), []
        if store is None:
            return None
        for rank, kind in itertools.product(range(WORLD.size), ("", _OF_DEVICE)):
            key = f"{kind}{rank}"
            try:
                if rank == WORLD.rank or not store.check([key]):
                    continue
                state, *rest = store.get(key).decode().split("\n", 4)
            except (RuntimeError, ConnectionError):  # with the rank that had the store
                return None
            found.append((rank, state, rest))
        return found

    def _say(self, text: str, kind: str = "") -> None:
        store = _store()
        if store is not None:
            try:
                store.set(f"{kind}{WORLD.rank}", text)
            except (RuntimeError, ConnectionError):
                return  # with the rank that had the store, which the others know of


BOARD = Board()


def _leave_together() -> None:
    """Have rank 0, which may hold the store, go on when the others have read it."""
    store, deadline = _store(), time.monotonic() + _SECONDS_OF_THE_LAST
    if WORLD.rank != 0:
        store.set(f"has read {WORLD.rank}", "")
        return
    keys = [f"has read {rank}" for rank in range(1, WORLD.size)]
    while not store.check(keys) and time.monotonic() < deadline:
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def _store() -> Any:
    if WORLD.size == 1 or not dist.is_initialized():
        return None
    c10d: Any = dist.distributed_c10d
    try:
        return c10d.PrefixStore("fastgraph", c10d._get_default_store())
    except ValueError:  # ranks have left the group, while a thread beside the program asked
        return None
