"""Training steps whose gradients are summed over ranks one by one, and together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import fastgraph
import fastgraph.dist as fgd
from fastgraph.dist.ranks import gradients, transport
from measure.dist_steps import Training, features
from measure.timing import Spread, no_garbage_collection

WAYS = {"one by one": 0, "together": gradients.SMALL}
"""Bytes of a gradient that waits for others at most; without, gloo sums each in its ring."""


def measure(graph: str, layers: Sequence[str], channels: int, rounds: int) -> dict[str, Any]:
    """Steps of both kinds in turns, on all ranks.

    Args:
        graph: its name.
        layers: kinds of layers, whose models take turns of their own.
        channels: of all layers.
        rounds: how many turns.

    Returns:
        By kind of layers and way: the losses of the first steps, times, and sums over ranks in a
        step.
    """
    fastgraph.enable()
    data = fgd.shard(features(graph, channels), mode="halo")
    return {layer: _of_layer(layer, data, channels, rounds) for layer in layers}


def _of_layer(layer: str, data: Any, channels: int, rounds: int) -> dict[str, Any]:
    trainings = {way: Training(layer, data, channels) for way in WAYS}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    found: dict[str, Any] = {way: {"losses": []} for way in WAYS}
    for way, training in trainings.items():
        gradients.SMALL = WAYS[way]
        for _ in range(3):
            found[way]["losses"].append(training.step())
        fgd.COUNTS.reset()
        training.step()
        found[way]["sums"] = fgd.COUNTS.calls["all_reduce"]
    with no_garbage_collection():
        for _ in range(rounds):
            for way, training in trainings.items():
                gradients.SMALL = WAYS[way]
                transport.barrier()
                started = time.perf_counter()
                training.step()
                seconds[way].append(time.perf_counter() - started)
    for way in WAYS:
        found[way]["spread"] = Spread.of(seconds[way]).to_json()
    return found
