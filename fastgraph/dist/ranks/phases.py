"""Times of a rank: seconds in which it computes, exchanges and waits.

Ranks leave a collective together, but come to it one after the other. The one that comes last does
not wait: the shortest time of all ranks in a collective is what the exchange takes, and what others
spend in it beyond that, they wait. So no clocks of several machines need to be compared, and
nothing is sent that is not sent anyway. What a rank computes while a collective goes on is
computing: only the time in which it does nothing else is the collective's.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

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


class Recorder:
    """The collectives of this rank while somebody wants to know them.

    Attributes:
        collectives: the bytes that this rank sent in each, and the seconds that it took; ``None``
            while nobody does.
    """

    def __init__(self) -> None:
        self.collectives: list[tuple[int, float]] | None = None

    def begin(self) -> list[tuple[int, float]]:
        """Record from now on.

        Raises:
            RuntimeError: somebody else records.
        """
        if self.collectives is not None:
            raise RuntimeError("measurements must not be nested")
        self.collectives = []
        return self.collectives

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
    inside = torch.tensor([list(found) for found in collectives], dtype=torch.float64)
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


def overloaded(phases: Sequence[Phases], threshold: float = THRESHOLD) -> list[int]:
    """The ranks that compute more than ``threshold`` times as long as the mean of all."""
    mean = statistics.fmean(one.compute for one in phases)
    return [rank for rank, one in enumerate(phases) if one.compute > threshold * mean]
