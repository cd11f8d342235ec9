"""Timing several contestants in turns, so that a slower minute of the machine hits all alike."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

# A turn of a fast contestant lasts about this long, so that it runs as it would in training, not in
# the caches and the heap that another contestant left behind.
_TURN_SECONDS = 0.05

# Its first step is not timed, for the same reason. A longer step does not notice what came before.
_WARMED_BELOW = 0.2

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


def spreads(seconds: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, dict[str, Any]]:
    """The spread of each kind of pass of each contestant, as JSON."""
    return {
        name: {kind: Spread.of(of).to_json() for kind, of in passes.items()}
        for name, passes in seconds.items()
    }


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

    def turn(self, steps: int = 1, *, warm_up: bool = False) -> list[float]:
        """Run and time some steps, after an untimed one if asked for."""
        seconds = []
        with self.context():
            if warm_up:
                self.prepare()
                self.step()
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
        warmed = [e < _WARMED_BELOW for e in estimates]
        steps = [max(1, min(20, int(_TURN_SECONDS / e))) for e in estimates]
        cost = sum(e * (s + w) for e, s, w in zip(estimates, steps, warmed, strict=True))
        least, most = rounds
        collected = time.perf_counter()
        for _ in range(max(least, min(most, int(budget / cost)))):
            for contestant, count, warm_up in zip(contestants, steps, warmed, strict=True):
                contestant.seconds += contestant.turn(count, warm_up=warm_up)
            if time.perf_counter() - collected > _SECONDS_BETWEEN_COLLECTIONS:
                gc.collect()
                collected = time.perf_counter()
