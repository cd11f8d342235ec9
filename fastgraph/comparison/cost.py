"""Time and memory of forward and backward passes."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from fastgraph.comparison.memory import release_freed, resident, restart_peak

MEMORY_MEASURE = (
    "largest resident set during the pass above what was resident before it, this process"
)
CUDA_MEMORY_MEASURE = "largest allocation on the device during the pass above that before it"


@dataclass(frozen=True)
class Cost:
    """Cost of one forward and backward pass.

    Attributes:
        seconds: the median.
        samples: how many passes were timed.
        peak_bytes: the largest memory during a pass, above that before it; ``None`` where the
            operating system does not tell.
    """

    seconds: float
    samples: int
    peak_bytes: int | None


@dataclass(frozen=True)
class Contestant:
    """A step to be measured, and the context that it runs in."""

    step: Callable[[], object]
    context: Callable[[], AbstractContextManager[None]]


def measure(contestants: list[Contestant], *, budget: float, device: torch.device) -> list[Cost]:
    """Measure steps in turns, so that a slower moment of the machine hits all alike.

    Every step must have run before. The first pass of each turn is not timed: it finds the caches
    as another contestant left them.

    Args:
        contestants: what to measure.
        budget: seconds for all timed passes; three of each run in any case, thirty at most.
        device: where they compute.
    """
    peaks: list[int | None] = []
    estimates = []
    for contestant in contestants:
        with contestant.context():
            peaks.append(_peak(contestant.step, device))
            estimates.append(_seconds(contestant.step, device))
    rounds = max(3, min(30, int(budget / (2 * sum(estimates) or 1e-9))))
    seconds: list[list[float]] = [[] for _ in contestants]
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            for contestant, samples in zip(contestants, seconds, strict=True):
                with contestant.context():
                    contestant.step()
                    samples.append(_seconds(contestant.step, device))
    finally:
        if was_enabled:
            gc.enable()
    return [
        Cost(statistics.median(samples), len(samples), peak)
        for samples, peak in zip(seconds, peaks, strict=True)
    ]


def _seconds(step: Callable[[], object], device: torch.device) -> float:
    _synchronize(device)
    start = time.perf_counter()
    step()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak(step: Callable[[], object], device: torch.device) -> int | None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    release_freed()
    if not restart_peak():
        return None
    resident_before = resident()
    step()
    peak = resident("VmHWM")
    return None if resident_before is None or peak is None else max(0, peak - resident_before)
