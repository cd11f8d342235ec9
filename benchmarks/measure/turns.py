"""Several ways to compute the same, in turns: processor time, and which of them takes less.

Wall time would be that of whatever else the machine does. Other programs take processor time, too,
by the caches and memory that they share, but never give any: so the lower quartile of all steps
counts. Of the same code on both sides, with fourteen programs on two cores, the ratio of quartiles
over sixteen rounds deviates by 2 % from 1, where that of medians deviates by 5 %. Rounds are few
where all of them say the same, and many where it is close.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

AHEAD = (3.0, 1.6, 1.25)
"""The least ratio of all rounds so far that ends a measurement, after one round, two, or more."""

BEHIND = 0.8
"""The greatest ratio of three rounds and more that ends a measurement."""

LOWEST = 0.95
"""A ratio below this is a loss. It is measured again before it counts."""

LONG = 1.0
"""Seconds of an upstream step whose memory no allocator keeps for the next one, so that nothing is
warmer then. Whether a graph is new is nothing beside it, either."""

FAR = 5.0
"""The ratio to a long step of upstream's that one step of each tells."""

_TURNS = 5
"""Times the length of a turn, a step needs no second one to tell that."""


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Args:
        turn: seconds of a turn, unless one step takes longer.
        rounds: turns of each side, where the ratio is not clear.
        steps: the most in one turn.
        again: times as many rounds for what looks like a loss; 0 where nothing is to be compared.
    """

    turn: float = 0.01
    rounds: int = 8
    steps: int = 80
    again: int = 2


@dataclass
class Side:
    """One way to compute.

    Args:
        step: what is timed.
        prepare: run before each step, untimed.
        context: entered around each turn, untimed.

    Attributes:
        turns: the seconds of each step, by turns.
    """

    step: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    turns: list[list[float]] = field(default_factory=list)

    def turn(self, steps: int, *, warm_up: bool) -> list[float]:
        """Seconds of some steps, after one that is not timed if asked for."""
        taken = []
        with self.context():
            for number in range(-1 if warm_up else 0, steps):
                self.prepare()
                start = time.process_time()
                self.step()
                if number >= 0:
                    taken.append(time.process_time() - start)
        return taken

    def seconds(self, turns: int) -> float:
        """The lower quartile of all steps of the first turns."""
        return lower_quartile([step for turn in self.turns[:turns] for step in turn])


def lower_quartile(values: Sequence[float]) -> float:
    """The value that a quarter of all do not reach; the least of few."""
    return sorted(values)[len(values) // 4]


@dataclass(frozen=True)
class Beside:
    """How long both took.

    Attributes:
        plain: seconds of a step of upstream's.
        ours: seconds of a step of ours.
        rounds: how often both were timed.
        again: true if it was measured again, since it looked like a loss.
    """

    plain: float
    ours: float
    rounds: int
    again: bool = False

    @property
    def ratio(self) -> float:
        """How many times faster ours is."""
        return self.plain / self.ours


def far_ahead(plain: float, ours: Side) -> Beside | None:
    """Ours beside one long step of upstream's, or ``None`` where more has to be measured.

    Args:
        plain: seconds of that step.
        ours: what it is compared with.
    """
    if plain < LONG:
        return None
    taken = ours.turn(1, warm_up=False)[0]
    return Beside(plain, taken, 1) if plain >= FAR * taken else None


def measure(plain: Side, ours: Side, effort: Effort) -> Beside:
    """Time both in turns, more often where it is close, and again where ours seems to lose."""
    return measure_all(plain, [ours], effort)[0]


def measure_all(plain: Side, others: Sequence[Side], effort: Effort) -> list[Beside]:
    """The same of several sides beside one, which takes its turn once in each round for all."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        sides = {id(side): _steps(side, effort) for side in (plain, *others)}
        found = _sampled(plain, others, sides, effort.rounds)
        lost = [k for k, beside in enumerate(found) if beside.ratio < LOWEST]
        if lost and effort.again:
            for side in (plain, *(others[k] for k in lost)):
                side.turns = []
            again = _sampled(plain, [others[k] for k in lost], sides, effort.again * effort.rounds)
            for k, beside in zip(lost, again, strict=True):
                found[k] = Beside(beside.plain, beside.ours, beside.rounds, again=True)
        return found
    finally:
        if was_enabled:
            gc.enable()


def _steps(side: Side, effort: Effort) -> int:
    """Steps of a turn, after those that warm up: the first may build what others find."""
    if side.turn(1, warm_up=False)[0] > _TURNS * effort.turn:
        return 1
    seconds = side.turn(1, warm_up=False)[0]
    return max(1, min(effort.steps, int(effort.turn / max(seconds, 1e-9))))


def _sampled(
    plain: Side, others: Sequence[Side], steps: dict[int, int], rounds: int
) -> list[Beside]:
    open_sides = list(others)
    while open_sides:
        for side in (plain, *open_sides):
            count = steps[id(side)]
            side.turns.append(side.turn(count, warm_up=count > 1))
        open_sides = [
            side
            for side in open_sides
            if len(side.turns) < rounds and not _is_settled(plain.turns, side.turns)
        ]
    counts = [len(side.turns) for side in others]
    return [
        Beside(plain.seconds(count), side.seconds(count), count)
        for side, count in zip(others, counts, strict=True)
    ]


def _is_settled(plain: Sequence[list[float]], ours: Sequence[list[float]]) -> bool:
    """True if all rounds say that ours is far ahead, or that it loses."""
    ratios = [lower_quartile(a) / lower_quartile(b) for a, b in zip(plain, ours, strict=True)]
    count = len(ratios)
    return min(ratios) >= AHEAD[min(count, len(AHEAD)) - 1] or (
        count >= len(AHEAD) and max(ratios) <= BEHIND
    )
