"""Timing on a GPU: by its own clock, with inputs that its cache has not kept."""

from __future__ import annotations

import itertools
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar

import torch
from torch import Tensor

from fastgraph.tune.fastest import head_start

# A turn of a contestant lasts about this long, in steps of which there are at most so many.
_TURN_MILLISECONDS = 50.0
_MOST_STEPS = 20
_TURNS_BY_HOST = 3

# A longer step does not notice that another contestant ran before it.
_WARMED_BELOW = 200.0

Step = Callable[[int], object]
T = TypeVar("T")


class DeviceLostError(RuntimeError):
    """The GPU does not answer this process any more."""


def failure(error: Exception, device: torch.device) -> str:
    """The text for a row about an error in what it measures.

    Raises:
        DeviceLostError: nothing can be measured after this error.
    """
    text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    if not _is_gpu(device):
        return text
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        raise DeviceLostError(text) from error
    if isinstance(error, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
        return "out of memory"
    return text


@dataclass
class Contestant:
    """Something to be timed.

    Args:
        name: the column.
        step: what is timed, given the number of the set of inputs to use.
        copies: how many sets of inputs there are; steps take them in turn.
        context: entered around each turn, untimed.

    Attributes:
        milliseconds: of each step, by the clock of the GPU.
        wall: milliseconds of a step by that of the host, each the mean of some steps in a row.
        failed: why it is not timed any more.
    """

    name: str
    step: Step
    copies: int = 1
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    milliseconds: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    failed: str | None = None
    _steps: int = 0

    @property
    def median(self) -> float:
        return statistics.median(self.milliseconds)

    def turn(self, device: torch.device) -> None:
        """Time some steps, as many as fit into a turn by what is known."""
        estimate = self.median if self.milliseconds else None
        count = 1 if estimate is None else int(_TURN_MILLISECONDS / max(estimate, 1e-6))
        try:
            with self.context():
                warm_up = estimate is None or estimate < _WARMED_BELOW
                self.milliseconds += self._timed(device, max(1, min(_MOST_STEPS, count)), warm_up)
        except Exception as error:
            self.failed = failure(error, device)

    def turn_by_host(self, device: torch.device) -> None:
        """Time some steps in a row by the host's clock, as a program that does nothing else."""
        count = max(1, min(_MOST_STEPS, int(_TURN_MILLISECONDS / max(self.median, 1e-6))))
        try:
            with self.context():
                self._next()
                torch.cuda.synchronize(device)
                start = time.perf_counter()
                for _ in range(count):
                    self._next()
                torch.cuda.synchronize(device)
                self.wall.append(1e3 * (time.perf_counter() - start) / count)
        except Exception as error:
            self.failed = failure(error, device)

    def _next(self) -> None:
        self.step(self._steps % self.copies)
        self._steps += 1

    def _timed(self, device: torch.device, count: int, warm_up: bool) -> list[float]:
        start = time.perf_counter()
        if warm_up:
            self._next()
        if not _is_gpu(device):
            times = [time.perf_counter()]
            for _ in range(count):
                self._next()
                times.append(time.perf_counter())
            return [1e3 * (b - a) for a, b in itertools.pairwise(times)]
        head_start((time.perf_counter() - start) * (count + 1))
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for mark in marks[1:]:
            self._next()
            mark.record()
        torch.cuda.synchronize(device)
        return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]


def copies_beyond_cache(device: torch.device, num_bytes: int) -> int:
    """How many sets of inputs of this size do not fit into the last cache together."""
    return max(2, 2 * cache_bytes(device) // max(1, num_bytes) + 1)


def interleave(contestants: Sequence[Contestant], device: torch.device, budget: float) -> None:
    """Time all contestants in turns for about ``budget`` seconds, one turn at least."""
    end = time.perf_counter() + budget
    while True:
        running = [c for c in contestants if c.failed is None]
        for contestant in running:
            contestant.turn(device)
        if not running or time.perf_counter() >= end:
            return


def by_host(contestants: Sequence[Contestant], device: torch.device) -> None:
    """Time all contestants by the host's clock, in turns; where there is a GPU to wait for."""
    for _ in range(_TURNS_BY_HOST if _is_gpu(device) else 0):
        for contestant in contestants:
            if contestant.failed is None:
                contestant.turn_by_host(device)


def peak_bytes(
    forward: Callable[[], Tensor], backward: Callable[[Tensor], object], device: torch.device
) -> dict[str, int] | None:
    """Most memory that is allocated during each pass, above what was there before both.

    So that of the backward pass includes what the forward pass has kept for it.
    """
    if not _is_gpu(device):
        return None
    before = torch.cuda.memory_allocated(device)

    def peak(run: Callable[[], T]) -> tuple[T, int]:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = run()
        torch.cuda.synchronize(device)
        return result, torch.cuda.max_memory_allocated(device) - before

    out, in_forward = peak(forward)
    _, in_backward = peak(lambda: backward(out))
    return {"forward": in_forward, "backward": in_backward}


def bandwidth(device: torch.device) -> dict[str, float]:
    """GB/s: of a copy from memory to memory, and of reading rows that stay in the last cache."""
    num_bytes = 2**30 if _is_gpu(device) else 2**24
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    rows = torch.ones(8192, 256, device=device)  # 8 MiB
    index = torch.randint(8192, (num_bytes // 1024,), device=device)
    bags = torch.arange(0, index.numel(), 64, device=device)  # so that little is written

    def gather(_: int) -> Tensor:
        return torch.nn.functional.embedding_bag(index, rows, bags, mode="sum")

    copying = Contestant("copy", lambda _: target.copy_(source))
    gathering = Contestant("gather", gather)
    interleave([copying, gathering], device, 0.5)
    return {
        "copy_gb_per_s": 2 * num_bytes / copying.median / 1e6,  # reads and writes
        "cached_gather_gb_per_s": num_bytes / gathering.median / 1e6,
    }


def facts(device: torch.device) -> dict[str, str]:
    """GPU, versions and date, as text."""
    import fastgraph

    found = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fastgraph": fastgraph.__version__,
    }
    if _is_gpu(device):
        properties = torch.cuda.get_device_properties(device)
        found["GPU"] = properties.name
        found["memory"] = f"{properties.total_memory / 2**30:.0f} GiB"
        found["multiprocessors"] = str(properties.multi_processor_count)
        found["L2 cache"] = f"{properties.L2_cache_size / 2**20:.0f} MiB"
        found["CUDA of torch"] = str(torch.version.cuda)
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        shown = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        found["driver"] = shown.strip().partition("\n")[0]
    return found


def cache_bytes(device: torch.device) -> int:
    """The size of the last cache; 0 on the CPU, where nothing is compared with it."""
    return torch.cuda.get_device_properties(device).L2_cache_size if _is_gpu(device) else 0


def summary(contestant: Contestant) -> dict[str, Any]:
    times = sorted(contestant.milliseconds)
    found = {"median": contestant.median, "minimum": times[0], "samples": len(times)}
    if contestant.wall:
        found["wall"] = statistics.median(contestant.wall)
    return found


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"
