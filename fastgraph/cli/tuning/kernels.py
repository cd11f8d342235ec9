"""Measurements of the fastest kernel for each call on a GPU, where several can compute it."""

from __future__ import annotations

from typing import NamedTuple

from fastgraph import settings
from fastgraph.cli.tuning.measuring import Budget
from fastgraph.cli.tuning.recording import Program
from fastgraph.cli.tuning.replay import Replay, copied
from fastgraph.tune.fastest import Timed, recorded

_OPERATORS = ("spmm", "attention")
"""Whose kernels have rivals (:mod:`fastgraph.tune.fastest`)."""


class TimedCall(NamedTuple):
    """A call, its backward pass, and what each took.

    Attributes:
        layers: that make it in a step, once for each time.
        timed: products and attention forward, and products backward; empty where the budget was
            spent.
    """

    layers: list[str]
    timed: list[Timed]


def time_kernels(program: Program, budget: Budget, device: str = "cuda") -> list[TimedCall]:
    """Make the calls on one kind of device, each once by all kernels that may make it.

    Args:
        program: whose calls they are.
        budget: after which no further call is begun.
        device: as torch names its type.
    """
    found = []
    for call, layers in program.calls.items():
        if call.device != device or call.operator not in _OPERATORS:
            continue
        timed: list[Timed] = []
        if budget.left:
            replay = Replay(call, program.tensors)
            replay.named(copied(replay.names))  # of which nothing is known yet
            with settings.measuring(), recorded() as timed:
                replay.step()
        found.append(TimedCall(layers, timed))
    return found
