"""Two ways to compute the same, in turns: processor time, and which of them takes less.

Wall time would be that of whatever else the machine does. Samples are few where the answer is
clear, and many where it is close.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from statistics import median

CLEAR = 1.5
"""A ratio beyond which few samples are enough."""

LOWEST = 0.95
"""A ratio below this is a loss. It is measured again before it counts."""

_AGAIN = 4
"""Times as many samples, for that."""


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Args:
        turn: seconds of a turn, unless one step takes longer.
        samples: turns of each side, where the ratio is not clear.
        steps: the most in one turn.
    """

    turn: float = 0.01
    samples: int = 4
    steps: int = 40


@dataclass
class Side:
    """One way to compute.

    Args:
        step: what is timed.
        prepare: run before each step, untimed.
        context: entered around each turn, untimed.

    Attributes:
        seconds: the median step of each turn.
    """

    step: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    seconds: list[float] = field(default_factory=list)

    def turn(self, steps: int, *, warm_up: bool) -> float:
        """Seconds of the median of some steps, after one that is not timed if asked for."""
        taken = []
        with self.context():
            for number in range(-1 if warm_up else 0, steps):
                self.prepare()
                start = time.process_time()
                self.step()
                if number >= 0:
                    taken.append(time.process_time() - start)
        return median(taken)


@dataclass(frozen=True)
class Beside:
    """How long both took.

    Attributes:
        plain: seconds of a step of upstream's.
        ours: seconds of a step of ours.
        again: true if it was measured again, since it looked like a loss.
    """

    plain: float
    ours: float
    again: bool = False

    @property
    def ratio(self) -> float:
        """How many times faster ours is."""
        return self.plain / self.ours


def measure(plain: Side, ours: Side, effort: Effort) -> Beside:
    """Time both in turns, more often where ours seems to lose."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        steps = [_steps(side, effort) for side in (plain, ours)]
        found = _sampled(plain, ours, steps, effort.samples, 2)
        if found.ratio < LOWEST:
            plain.seconds, ours.seconds = [], []
            again = _sampled(plain, ours, steps, _AGAIN * effort.samples, effort.samples)
            found = Beside(again.plain, again.ours, again=True)
        return found
    finally:
        if was_enabled:
            gc.enable()


def _steps(side: Side, effort: Effort) -> int:
    """Steps of a turn, after two that warm up: the first may build what others find."""
    side.turn(1, warm_up=False)
    return max(1, min(effort.steps, int(effort.turn / max(side.turn(1, warm_up=False), 1e-9))))


def _sampled(plain: Side, ours: Side, steps: list[int], most: int, least: int) -> Beside:
    for number in range(1, most + 1):
        for side, count in zip((plain, ours), steps, strict=True):
            side.seconds.append(side.turn(count, warm_up=count > 1))
        if number >= least and _is_clear(plain.seconds, ours.seconds):
            break
    return Beside(median(plain.seconds), median(ours.seconds))


def _is_clear(plain: list[float], ours: list[float]) -> bool:
    """True if all samples say that ours is much faster, or that it loses."""
    return min(plain) > CLEAR * max(ours) or max(plain) < LOWEST * min(ours)
