"""Times of a rank: seconds in which it computes, exchanges and waits.

Ranks leave a collective together, but come to it one after the other. The one that comes last does
not wait: the shortest time of all ranks in a collective is what the exchange takes, and what others
spend in it beyond that, they wait. So no clocks of several machines need to be compared, and
nothing is sent that is not sent anyway. What a rank computes while a collective goes on is
computing: only the time in which it does nothing else is the collective's.

Where a device waits for its collectives by itself, all times are the device's, between events that
it comes by: the host goes on, and reads them at the end.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from fastgraph.dist.ranks.own_device import HOST
from fastgraph.dist.ranks.world import WORLD

THRESHOLD = 1.1
"""Below this imbalance nothing is done about it."""


@dataclass(frozen=True)
class Phases:
    """Seconds of a rank in an epoch.

    Attributes:
        compute: between collectives, and while they go on by themselves.
        exchange: in collectives, once the last rank has come to them.
        wait: for that rank.
    """

    compute: float
    exchange: float
    wait: float

    @property
    def total(self) -> float:
        """Seconds of the epoch."""
        return self.compute + self.exchange + self.wait


class Clock(Protocol):
    """A clock of whoever computes."""

    def now(self) -> Any:
        """This moment of the program."""
        ...

    def seconds(self, first: Any, last: Any) -> float:
        """The seconds between two moments, for which the host may wait."""
        ...


class HostClock:
    """The clock of the host, which waits for what it has told the device of the rank before."""

    def now(self) -> float:
        """See :class:`Clock`."""
        if WORLD.device != HOST:
            torch.get_device_module(WORLD.device).current_stream(WORLD.device).synchronize()
        return time.perf_counter()

    def seconds(self, first: float, last: float) -> float:
        """See :class:`Clock`."""
        return last - first


class DeviceClock:
    """The clock of the device of this rank, for which nobody waits when a moment is noted."""

    def __init__(self) -> None:
        self._event = torch.get_device_module(WORLD.device).Event

    def now(self) -> Any:
        """See :class:`Clock`."""
        event = self._event(enable_timing=True)
        event.record()
        return event

    def seconds(self, first: Any, last: Any) -> float:
        """See :class:`Clock`."""
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3


def clock() -> Clock:
    """That of the device where it waits for collectives by itself, else that of the host."""
    return HostClock() if WORLD.device == HOST or WORLD.through == "gloo" else DeviceClock()


class Spent(NamedTuple):
    """The time of a collective.

    Attributes:
        sent: bytes of this rank.
        spans: beginnings and ends of when the rank did nothing else, by the recorder's clock.
    """

    sent: int
    spans: list[tuple[Any, Any]]


class Recorder:
    """The collectives of this rank while somebody wants to know them.

    Attributes:
        collectives: since it began; ``None`` while nobody wants them.
        clock: by which they are measured.
    """

    def __init__(self) -> None:
        self.collectives: list[Spent] | None = None
        self.clock: Clock = HostClock()

    def begin(self) -> list[Spent]:
        """Record from now on.

        Raises:
            RuntimeError: somebody else records.
        """
        if self.collectives is not None:
            raise RuntimeError("measurements must not be nested")
        self.collectives, self.clock = [], clock()
        return self.collectives

    def add(self, sent: int, since: Any) -> None:
        """Record a collective, if anybody still wants to know, in which the rank was up to now."""
        if self.collectives is not None:
            self.collectives.append(Spent(sent, [(since, self.clock.now())]))

    def end(self) -> None:
        """Record no longer."""
        self.collectives = None


RECORDER = Recorder()


def separated(seconds: Sequence[float], collectives: Sequence[Sequence[float]]) -> list[Phases]:
    """The phases of all ranks.

    Args:
        seconds: that each rank was measured for, collectives included.
        collectives: of each rank, the seconds of each collective.

    Raises:
        ValueError: ranks have not taken part in the same number of collectives.
    """
    counts = {len(found) for found in collectives}
    if len(counts) > 1:
        raise ValueError(f"ranks must issue as many collectives as each other, got {counts}")
    inside = torch.tensor([list(found) for found in collectives], dtype=torch.float64, device=HOST)
    exchange = float(inside.amin(0).sum()) if inside.numel() else 0.0
    return [
        Phases(max(total - spent, 0.0), exchange, max(spent - exchange, 0.0))
        for total, spent in zip(seconds, inside.sum(1).tolist(), strict=True)
    ]


def per_epoch(phases: Phases, epochs: int) -> Phases:
    """Phases of several epochs as those of one."""
    return Phases(phases.compute / epochs, phases.exchange / epochs, phases.wait / epochs)


def imbalance(phases: Sequence[Phases]) -> float:
    """The longest time that a rank computes, in means of all ranks; 1 is balanced."""
    mean = statistics.fmean(one.compute for one in phases)
    return max(one.compute for one in phases) / mean if mean > 0 else 1.0
