"""Balance for a script that knows nothing of ranks.

Shares of work are scores of devices, or what a run before has measured, and corrected by what is
measured in the first epochs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from fastgraph.dist.balance.balance import Balance, by_speed
from fastgraph.dist.balance.first_epochs import say
from fastgraph.dist.balance.rebalancing import by_work, highest_shares, partition_anew
from fastgraph.dist.balance.shares import capped, within_memory
from fastgraph.dist.graphs.protocols import AnyGraph
from fastgraph.dist.graphs.relayout import Placement, obstacle
from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.devices import devices, identities, scores
from fastgraph.dist.ranks.phases import THRESHOLD
from fastgraph.dist.ranks.world import WORLD
from fastgraph.machine import cache

_KIND = "speeds"


class Automatic:
    """The shares of the ranks of a script.

    Args:
        program: what the script's speed depends on, as text: itself and its arguments.
        method: see :func:`fastgraph.dist.partition`.

    Attributes:
        weights: the share of each rank to begin with, of a graph that any of them has memory for.
    """

    def __init__(self, program: str, method: str) -> None:
        self._method = method
        self._devices = found = devices()
        self._names = identities(found)
        digest = hashlib.sha256(program.encode()).hexdigest()
        self._identity = f"{digest} on {self._names[WORLD.rank]} of {WORLD.size} ranks"
        before = transport.gather_objects(_speed(cache.read(_KIND, self._identity)))
        known = [speed for speed in before if speed is not None]
        self.weights = by_speed(known) if len(known) == WORLD.size else scores(found)
        source = "a run before" if len(known) == WORLD.size else "the devices"
        say(f"shares of the work by {source}: {_percentages(self.weights)}")

    def shares(self, data: AnyGraph) -> list[float]:
        """The share of each rank of a graph, as far as there is memory for it.

        Raises:
            MemoryError: the ranks together have too little memory for the graph.
        """
        return within_memory(self.weights, self._devices, data)

    def correct(self, placement: Placement, balance: Balance) -> None:
        """Give the rows of a graph to other ranks, if it was measured that these take too long."""
        self._keep(balance.speeds())
        self._correct(placement, balance)

    def _keep(self, speeds: Sequence[float]) -> None:
        """Ranks on like devices have one file, with what they do on average."""
        own = self._names[WORLD.rank]
        alike = [speed for speed, name in zip(speeds, self._names, strict=True) if name == own]
        cache.write(_KIND, self._identity, {"speed": sum(alike) / len(alike)})

    def _correct(self, placement: Placement, balance: Balance) -> None:
        found = _imbalance(balance)
        if balance.imbalance <= THRESHOLD:
            say(f"balanced, {found}")
            return
        reason = placement.fixed or obstacle(parameters=False)
        if reason:
            say(f"shares stay as they are, though {found}: {reason}")
            return
        limits = highest_shares(balance)
        if sum(limits) < 1:
            say(f"shares stay as they are, though {found}: memory does not allow for others")
            return
        shares = capped(by_speed(balance.speeds()), limits)
        moved = partition_anew(placement, shares, self._method)
        before = _percentages(by_work(balance))
        say(
            f"{found}: shares were {before}, and are {_percentages(shares)}; moved the rows of "
            f"{moved.tensors} tensors, left {moved.left}"
        )


def _imbalance(balance: Balance) -> str:
    return f"the slowest rank computes {balance.imbalance:.2f}x as long as the mean"


def _speed(measurements: object) -> float | None:
    """The speed that was kept, if it is one."""
    speed = measurements.get("speed") if isinstance(measurements, dict) else None
    return float(speed) if isinstance(speed, (int, float)) and 0 < speed < float("inf") else None


def _percentages(shares: Sequence[float]) -> str:
    return ", ".join(f"{share:.1%}" for share in shares)
