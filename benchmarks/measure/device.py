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
from typing import Any

import torch
from torch import Tensor

# Contestants run in turns of so many steps, after one that is not timed.
_STEPS_OF_TURN = 5

Step = Callable[[int], object]


@dataclass
class Contestant:
    """Something to be timed.

    Args:
        name: the column.
        step: what is timed, given the number of the set of inputs to use.
        context: entered around each turn, untimed.
    """

    name: str
    step: Step
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    milliseconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.milliseconds)


def copies_beyond_cache(device: torch.device, num_bytes: int) -> int:
    """How many sets of inputs of this size do not fit into the last cache together."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size if _is_gpu(device) else 0
    return max(2, min(16, 2 * cache // max(1, num_bytes) + 1))


def interleave(
    contestants: Sequence[Contestant], device: torch.device, copies: int, budget: float
) -> None:
    """Time all contestants in turns for about ``budget`` seconds, three turns at least."""
    turns, end = 0, time.perf_counter() + budget
    while turns < 3 or time.perf_counter() < end:
        for contestant in contestants:
            with contestant.context():
                contestant.milliseconds += _turn(contestant.step, device, copies)
        turns += 1


def _turn(step: Step, device: torch.device, copies: int) -> list[float]:
    step(copies - 1)
    if not _is_gpu(device):
        times = [time.perf_counter()]
        for number in range(_STEPS_OF_TURN):
            step(number % copies)
            times.append(time.perf_counter())
        return [1e3 * (b - a) for a, b in itertools.pairwise(times)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(_STEPS_OF_TURN + 1)]
    marks[0].record()
    for number, mark in enumerate(marks[1:]):
        step(number % copies)
        mark.record()
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]


def peak_bytes(step: Step, device: torch.device) -> int | None:
    """Most memory that a step allocates above what was there before."""
    if not _is_gpu(device):
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step(0)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def bandwidth(device: torch.device) -> dict[str, float]:
    """GB/s: of a copy from memory to memory, and of gathering rows that stay in the last cache."""
    num_bytes = 2**30 if _is_gpu(device) else 2**24
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    rows = torch.ones(8192, 256, device=device)  # 8 MiB
    index = torch.randint(8192, (num_bytes // 1024,), device=device)
    gathered = torch.empty(index.numel(), 256, device=device)

    def gather(_: int) -> Tensor:
        return torch.index_select(rows, 0, index, out=gathered)

    copying = Contestant("copy", lambda _: target.copy_(source))
    gathering = Contestant("gather", gather)
    interleave([copying, gathering], device, 1, 0.5)
    # A copy reads and writes; a gather that stays in the cache writes to memory only.
    return {
        "copy_gb_per_s": 2 * num_bytes / copying.median / 1e6,
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


def summary(contestant: Contestant) -> dict[str, Any]:
    times = sorted(contestant.milliseconds)
    return {"median": contestant.median, "minimum": times[0], "samples": len(times)}


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"
