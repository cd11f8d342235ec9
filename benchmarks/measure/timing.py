"""Timing several contestants in turns, so that a slower minute of the machine hits all alike."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field

import numpy as np

# A contestant much faster than the slowest one is run this often in each of its turns.
_STEPS_IN_A_TURN = 3
_MUCH_FASTER = 0.1

_SECONDS_BETWEEN_COLLECTIONS = 2.0


@dataclass(frozen=True)
class Spread:
    """Milliseconds of the samples of one contestant."""

    median: float
    minimum: float
    lower_quartile: float
    upper_quartile: float
    samples: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        low, median, high = np.percentile(np.asarray(seconds) * 1e3, [25, 50, 75]).tolist()
        return cls(median, min(seconds) * 1e3, low, high, len(seconds))

    def to_json(self) -> dict[str, float]:
        return asdict(self)


@dataclass
class Contestant:
    """Something to be timed.

    Args:
        name: the column.
        step: what is timed.
        prepare: run before each step, untimed.
        context: entered around each turn, untimed.
        estimate: seconds of a step, if it ran already and needs no warm-up.
    """

    name: str
    step: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    estimate: float | None = None
    seconds: list[float] = field(default_factory=list)

    def turn(self, steps: int = 1) -> list[float]:
        """Run and time some steps."""
        seconds = []
        with self.context():
            for _ in range(steps):
                self.prepare()
                start = time.perf_counter()
                self.step()
                seconds.append(time.perf_counter() - start)
        return seconds

    @property
    def spread(self) -> Spread:
        return Spread.of(self.seconds)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect now, and not again before the end of the block."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def interleave(
    contestants: Sequence[Contestant], *, rounds: tuple[int, int], budget: float
) -> None:
    """Time all contestants in turns, filling ``contestant.seconds``.

    Contestants without an estimate run once to warm up. The estimates tell how many rounds fit into
    the budget.

    Args:
        rounds: fewest and most rounds.
        budget: seconds for all rounds together; the fewest rounds may exceed it.
    """
    with no_garbage_collection():
        estimates = [c.turn()[0] if c.estimate is None else c.estimate for c in contestants]
        slowest = max(estimates)
        steps = [_STEPS_IN_A_TURN if e < _MUCH_FASTER * slowest else 1 for e in estimates]
        cost = sum(e * s for e, s in zip(estimates, steps, strict=True))
        least, most = rounds
        collected = time.perf_counter()
        for _ in range(max(least, min(most, int(budget / cost)))):
            for contestant, count in zip(contestants, steps, strict=True):
                contestant.seconds += contestant.turn(count)
            if time.perf_counter() - collected > _SECONDS_BETWEEN_COLLECTIONS:
                gc.collect()
                collected = time.perf_counter()
