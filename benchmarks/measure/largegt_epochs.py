"""Epochs of LargeGT and of the models that it is compared with, by some of their batches."""

from __future__ import annotations

import contextlib
import itertools
import time
from typing import Any

import torch
import torch.nn.functional as F

import fastgraph
from fastgraph.pyg import fix_sampling
from measure.largegt_models import MESSAGE_PASSING, MODELS, Sizes, Source, Way, way_of


def steps(way: Way, count: int) -> float:
    """Processor seconds of a training step, of so many."""
    optimizer = torch.optim.Adam(way.model.parameters())
    way.model.train()
    began = time.process_time()
    for given, y in itertools.islice(way.batches(), count):
        optimizer.zero_grad()
        F.cross_entropy(way.model(*given)[: len(y)], y).backward()
        optimizer.step()
    return (time.process_time() - began) / min(count, way.steps)


def measured(name: str, sizes: Sizes, batches: int, rounds: int, threads: int) -> list[Any]:
    """Of all models the processor seconds of an epoch.

    Models that PyG can train are measured on both sides in turns, with our sampler on both.

    Args:
        name: of a graph of the example.
        sizes: of models and batches.
        batches: that a measurement takes.
        rounds: of which the least counts.
        threads: of torch.
    """
    import graphs

    torch.set_num_threads(threads)
    fix_sampling()
    source = Source(graphs.load(name), 0)
    sides: dict[str, Any] = {"ours": fastgraph.enabled, "plain": contextlib.nullcontext}
    found = []
    for model in MODELS:
        torch.manual_seed(0)
        way = way_of(model, source, sizes)
        times: dict[str, list[float]] = {}
        for number in range(rounds + 1):
            for side in sides if model in MESSAGE_PASSING else ("ours",):
                torch.manual_seed(number)
                with sides[side]():
                    taken = steps(way, batches if number else 1)
                if number:  # the first warms up
                    times.setdefault(side, []).append(taken)
        cell: dict[str, Any] = {"model": model, "steps": way.steps}
        cell["parameters"] = sum(p.numel() for p in way.model.parameters())
        found.append(cell | {side: min(taken) * way.steps for side, taken in times.items()})
    return found
