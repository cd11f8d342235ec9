"""Several ways to compute the same, without gradients or with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from measure.turns import Effort, Side, measure_all

Way = Callable[[], tuple[Any, Sequence[Tensor]]]
"""Gives a result, and the tensors that have gradients."""


def step(way: Way, training: bool) -> Callable[[], object]:
    """A forward pass that records nothing, or both passes."""

    def infer() -> None:
        with torch.no_grad():
            way()

    def train() -> None:
        out, leaves = way()
        torch.autograd.grad(out.sum(), leaves)

    return train if training else infer


def milliseconds(ways: Mapping[str, Way], training: bool, effort: Effort) -> dict[str, float]:
    """Processor time of each, in turns; the first is beside all others."""
    sides = [Side(step(way, training)) for way in ways.values()]
    found = measure_all(sides[0], sides[1:], effort)
    seconds = [found[0].plain, *(beside.ours for beside in found)]
    return dict(zip(ways, (1000 * s for s in seconds), strict=True))
