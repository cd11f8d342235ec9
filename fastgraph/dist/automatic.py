"""Shares of work for a script that knows nothing of ranks.

Scores of devices, or what a run before has measured; then measured in the first epochs, and
corrected once.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from fastgraph.dist import transport
from fastgraph.dist.balance import Balance, Measurement, by_speed
from fastgraph.dist.devices import devices, identities, scores
from fastgraph.dist.phases import RECORDER
from fastgraph.dist.rebalancing import THRESHOLD, by_work, highest_shares, partition_anew
from fastgraph.dist.relayout import Placement, obstacle
from fastgraph.dist.sharding import capped
from fastgraph.dist.world import WORLD, RanksDivergedError
from fastgraph.machine import cache

_WARM_UP = 5
"""Steps that make plans, sort graphs and choose kernels."""

_FEWEST = 5
_SECONDS = 1.0
"""Steps are measured until there are so many, in so many seconds."""

_KIND = "speeds"


class Automatic:
    """The shares of the ranks of a script.

    Args:
        program: what the script's speed depends on, as text: itself and its arguments.
        method: see :func:`fastgraph.dist.partition`.

    Attributes:
        weights: the share of each rank to begin with.
    """

    def __init__(self, program: str, method: str) -> None:
        self._method = method
        self._names = identities(found := devices())
        digest = hashlib.sha256(program.encode()).hexdigest()
        self._identity = f"{digest} on {self._names[WORLD.rank]} of {WORLD.size} ranks"
        before = transport.gather_objects(_speed(cache.read(_KIND, self._identity)))
        known = [speed for speed in before if speed is not None]
        self.weights = by_speed(known) if len(known) == WORLD.size else scores(found)
        source = "a run before" if len(known) == WORLD.size else "the devices"
        _say(f"shares of the work by {source}: {_percentages(self.weights)}")
        self._placement: Placement | None = None
        self._measurement: Measurement | None = None
        self._steps = 0
        self._optimizer: Optimizer | None = None
        self._is_watching = self._is_over = False

    def watch(self, data: Any) -> None:
        """Measure a graph that was sharded; the largest one, if there are several."""
        if WORLD.size == 1 or self._steps or self._is_over:
            return
        placement = Placement.find(data)
        if placement is None:
            return
        if self._placement is None or _edges(placement) > _edges(self._placement):
            self._placement = placement
        if not self._is_watching:
            self._is_watching = True
            register_optimizer_step_post_hook(self._after_step)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_over:
            return
        if self._optimizer is None:
            self._optimizer = optimizer
        if optimizer is not self._optimizer:  # of another part of the same epoch
            return
        self._steps += 1
        if self._measurement is None:
            if self._steps == _WARM_UP:
                self._begin()
            return
        epochs = self._steps - _WARM_UP
        if epochs >= _FEWEST and transport.agree(self._measurement.seconds >= _SECONDS):
            self._end(epochs)

    def _begin(self) -> None:
        assert self._placement is not None
        if RECORDER.collectives is not None:  # the script measures by itself
            self._forget()
            return
        self._measurement = Measurement(self._placement)

    def _end(self, epochs: int) -> None:
        assert self._placement is not None and self._measurement is not None
        try:
            balance = self._measurement.finish(epochs)
        except RanksDivergedError as error:
            self._forget()
            _say(f"shares stay as they are: {error}")
            return
        placement = self._placement
        self._forget()
        self._keep(balance.speeds())
        self._correct(placement, balance)

    def _keep(self, speeds: Sequence[float]) -> None:
        """Ranks on like devices have one file, with what they do on average."""
        own = self._names[WORLD.rank]
        alike = [speed for speed, name in zip(speeds, self._names, strict=True) if name == own]
        cache.write(_KIND, self._identity, {"speed": sum(alike) / len(alike)})

    def _correct(self, placement: Placement, balance: Balance) -> None:
        found = f"the slowest rank computes {balance.imbalance:.2f}x as long as the mean"
        if balance.imbalance <= THRESHOLD:
            _say(f"balanced, {found}")
            return
        reason = obstacle(parameters=False)
        if reason is not None:
            _say(f"shares stay as they are, though {found}: {reason}")
            return
        limits = highest_shares(balance)
        if sum(limits) < 1:
            _say(f"shares stay as they are, though {found}: memory does not allow for others")
            return
        shares = capped(by_speed(balance.speeds()), limits)
        moved = partition_anew(placement, shares, self._method)
        before = _percentages(by_work(balance))
        _say(
            f"{found}: shares were {before}, and are {_percentages(shares)}; moved the rows of "
            f"{moved.tensors} tensors, left {moved.left}"
        )

    def _forget(self) -> None:
        """Leave the program alone from now on. The hook stays: it is being called."""
        self._is_over = True
        self._placement = self._measurement = self._optimizer = None


def _speed(measurements: Any) -> float | None:
    """The speed that was kept, if it is one."""
    speed = measurements.get("speed") if isinstance(measurements, dict) else None
    return float(speed) if isinstance(speed, (int, float)) and 0 < speed < float("inf") else None


def _edges(placement: Placement) -> int:
    return sum(index.rows.n for index in placement.edges)


def _say(text: str) -> None:
    if WORLD.rank == 0:
        print(f"fastgraph.dist: {text}", file=sys.stderr)


def _percentages(shares: Sequence[float]) -> str:
    return ", ".join(f"{share:.1%}" for share in shares)
