"""Load balancing by the times of the first epochs of a script."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from fastgraph.dist.balance.balance import Balance, Measurement
from fastgraph.dist.graphs.protocols import AnyGraph
from fastgraph.dist.graphs.relayout import Placement
from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.own_device import HOST
from fastgraph.dist.ranks.phases import RECORDER
from fastgraph.dist.ranks.world import WORLD, RanksDivergedError

Action = Callable[[Placement, Balance], None]
"""Gets the graph that was measured, and what was."""

_WARM_UP = 5
"""Steps that make plans, sort graphs and choose kernels."""

_FEWEST = 5
_SECONDS = 1.0
"""Steps are measured until there are so many, in so many seconds."""


class FirstEpochs:
    """Measures a script between the steps of its first optimizer.

    Args:
        actions: taken one after the other, each after a measurement of its own.
    """

    def __init__(self, actions: Sequence[Action]) -> None:
        self._actions = list(actions)
        self._placement: Placement | None = None
        self._measurement: Measurement | None = None
        self._steps = self._epochs = 0
        self._optimizer: Optimizer | None = None
        self._is_watching = False

    def watch(self, data: AnyGraph) -> None:
        """Measure a graph that was sharded; the largest one, if there are several."""
        if WORLD.size == 1 or self._optimizer is not None or not self._actions:
            return
        placement = Placement.find(data)
        if placement is None:
            return
        if self._placement is None or _edges(placement) > _edges(self._placement):
            self._placement = placement
        if not self._is_watching:
            self._is_watching = True
            register_optimizer_step_post_hook(self._after_step)

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        if not self._actions:
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
        if self._epochs:  # a device has come by its events since
            self._end(self._epochs)
            return
        epochs = self._steps - _WARM_UP
        if epochs >= _FEWEST and transport.agree(self._measurement.seconds >= _SECONDS):
            self._measurement.close()
            if WORLD.device == HOST:
                self._end(epochs)
            else:
                self._epochs = epochs

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
            say(f"nothing is done about the balance of ranks: {error}")
            return
        self._measurement, self._steps, self._epochs = None, 0, 0
        action, *self._actions = self._actions
        placement = self._placement
        if not self._actions:
            self._forget()
        action(placement, balance)

    def _forget(self) -> None:
        """Leave the program alone from now on. The hook stays: it is being called."""
        self._actions.clear()
        self._placement = self._measurement = self._optimizer = None


def _edges(placement: Placement) -> int:
    return sum(index.rows.n for index in placement.edges)


def say(text: str) -> None:
    """Print a message on the first rank, for whoever has started the program."""
    if WORLD.rank == 0:
        print(f"fastgraph.dist: {text}", file=sys.stderr)
