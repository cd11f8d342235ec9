"""The overhead of a profile, and of torch's own profiler, on steps of training on the CPU.

    python benchmarks/profiling.py [--repeats 30]

Steps are interleaved: plain, under ``fastgraph.profile()``, under ``torch.profiler`` as it is by
default. Medians of processor time, since other programs may share the machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch_geometric.nn import GAT

import fastgraph

WAYS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "plain": nullcontext,
    "fastgraph.profile": fastgraph.profile,
    "torch.profiler": lambda: torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU]
    ),
}


def seconds_of_steps(step: Callable[[], None], steps: int) -> float:
    """Processor seconds of a step."""
    started = time.process_time()
    for _ in range(steps):
        step()
    return (time.process_time() - started) / steps


def measured(nodes: int, edges: int, channels: int, steps: int, repeats: int) -> list[float]:
    """Median processor milliseconds of a training step of a GAT of two layers, by way."""
    torch.manual_seed(0)
    x, index = torch.randn(nodes, channels), torch.randint(nodes, (2, edges))
    model = GAT(channels, channels, num_layers=2, out_channels=8, heads=2)
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(x, index).square().mean().backward()
        optimizer.step()

    seconds_of_steps(step, 3)
    taken: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(repeats):
        for name, way in WAYS.items():
            with way():
                taken[name].append(seconds_of_steps(step, steps))
    return [1000 * statistics.median(values) for values in taken.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    fastgraph.enable(min_edges=0)
    print(f"| nodes | edges | channels | {' | '.join(f'{way} ms' for way in WAYS)} |")
    print(f"| {' | '.join(['---:'] * (3 + len(WAYS)))} |")
    for nodes, edges, channels, steps in (
        (100, 400, 16, 10),
        (2708, 10556, 64, 5),
        (20000, 400000, 64, 1),
    ):
        cells = measured(nodes, edges, channels, steps, options.repeats)
        others = (f"{ms:.2f} ({ms / cells[0]:.2f})" for ms in cells[1:])
        print(f"| {nodes:,} | {edges:,} | {channels} | {cells[0]:.2f} | {' | '.join(others)} |")


if __name__ == "__main__":
    main()
