"""Training of a graph transformer on shards, under a limit of each rank's memory."""

from __future__ import annotations

import gc
from typing import Any

import torch

import fastgraph
import fastgraph.dist as fgd
from fastgraph.dist.ranks.world import CollectiveError
from measure.dist_memory_steps import sizes, under_limit
from measure.dist_transformer_steps import Training, features

ENDED_BY_OTHERS = "another rank ended"

_FIRST = "communities-2000", 64
"""Graph and channels of what is trained before the limit, so that nothing is used first there."""


def write(name: str, channels: int, ranks: int, folder: str) -> dict[str, Any]:
    """Shards of a graph, by a process that is none of the ranks.

    Returns:
        How many edges it has, and the largest halo.
    """
    written = fgd.write_shards(features(name, channels), folder, ranks)
    return {"edges": written.edges, "halo": max(part.halo for part in written.parts)}


def train(folder: str, channels: int, mode: str, more: int, steps: int) -> Any:
    """Losses and peaks of some steps with Adam.

    Args:
        folder: of shards.
        channels: of all heads, and of the features.
        mode: of attention.
        more: bytes of private memory that a rank may have, besides those that it has once it has
            trained something small.
        steps: how many.

    Returns:
        As :func:`measure.dist_memory_steps.under_limit`, with the bytes of the parameters; or
        :data:`ENDED_BY_OTHERS`.
    """
    torch.set_num_threads(1)
    fastgraph.enable()
    first, of_first = _FIRST
    _steps(fgd.shard(features(first, of_first), mode=mode), of_first, 1)
    gc.collect()

    def work() -> list[float]:
        return _steps(fgd.load_shards(folder, checksums=False, mode=mode), channels, steps)

    try:
        return under_limit(sizes()[0] + more, work)
    except CollectiveError:
        return ENDED_BY_OTHERS


def _steps(data: Any, channels: int, steps: int) -> list[float]:
    training = Training(data, channels, optimizer=torch.optim.Adam)
    return [training.step() for _ in range(steps)]
