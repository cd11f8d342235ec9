"""Comparing means over several seeds, where two runs draw different random numbers by design."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from fastgraph.comparison.runs import Call
from fastgraph.routing.status import recording

SEEDS = 16

# Chance alone exceeds twice its expectation now and then, but hardly ever this multiple of it.
_CHANCE = 2.0


@dataclass(frozen=True)
class MeanDifference:
    """Means of one tensor over the seeds, as Euclidean norms relative to upstream's mean.

    Attributes:
        name: as in :class:`fastgraph.comparison.errors.TensorError`.
        difference: between the mean of ours and that of upstream.
        by_chance: what the spread over the seeds lets expect if the distributions are the same.
        limit: what the difference may be.
    """

    name: str
    difference: float
    by_chance: float
    limit: float

    @property
    def ok(self) -> bool:
        """True if the difference is within the limit."""
        return self.difference <= self.limit


class _Moments:
    """Running mean and sum of squared deviations (Welford)."""

    def __init__(self) -> None:
        self.count = 0
        self.mean: dict[str, Tensor] = {}
        self.squares: dict[str, Tensor] = {}

    def add(self, values: dict[str, Tensor]) -> None:
        self.count += 1
        for name, value in values.items():
            value = value.double()
            mean = self.mean.setdefault(name, torch.zeros_like(value))
            deviation = value - mean
            mean += deviation / self.count
            squares = self.squares.setdefault(name, torch.zeros_like(value))
            squares += deviation * (value - mean)

    def variance_of_mean(self, name: str) -> float:
        return float(self.squares[name].sum()) / (self.count - 1) / self.count


def compare_means(
    calls: Sequence[Call],
    sides: Sequence[Callable[[], AbstractContextManager[None]]],
    *,
    seeds: int,
    factor: float,
) -> tuple[MeanDifference, ...]:
    """Outputs and gradients of upstream's and our call, averaged over ``seeds`` random seeds.

    Args:
        calls: upstream's and ours.
        sides: the context of each.
        seeds: how many runs of each, at least 2.
        factor: the limit is twice this multiple of the difference expected by chance.
    """
    moments = [_Moments(), _Moments()]
    with recording():
        for seed in range(seeds):
            for call, side, moment in zip(calls, sides, moments, strict=True):
                with side():
                    torch.manual_seed(seed)
                    results = call.run()
                moment.add(
                    results.outputs
                    | {f"gradient of {k}": v for k, v in results.input_gradients.items()}
                    | {f"gradient of {k}": v for k, v in results.parameter_gradients.items()}
                )
    theirs, own = moments
    differences = []
    for name, mean in theirs.mean.items():
        scale = float(mean.norm()) or 1.0
        variance = theirs.variance_of_mean(name) + own.variance_of_mean(name)
        by_chance = variance**0.5 / scale
        differences.append(
            MeanDifference(
                name=name,
                difference=float((own.mean[name] - mean).norm()) / scale,
                by_chance=by_chance,
                limit=_CHANCE * factor * by_chance + 1e-5,
            )
        )
    return tuple(differences)
