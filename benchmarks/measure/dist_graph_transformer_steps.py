"""Training steps of Graphormer on shards, with what they take of a rank's memory and processor."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch_geometric.transforms import Compose

import fastgraph.dist as fgd
from fastgraph.nn import Graphormer, Schedule
from fastgraph.transforms import AttentionPattern, Degrees
from measure.dist_memory_steps import under_limit
from measure.dist_transformer_steps import CLASSES, features

CHANNELS, LAYERS, HEADS = 64, 4, 8
_FIRST = "communities-2000"
"""The graph that is trained on before memory is looked at, so that nothing is used first there."""


def write_shards(name: str, ranks: int, folder: str) -> int:
    """Shards of a graph, by a process that is none of the ranks; gives how many pairs attend."""
    data = _ready(features(name, CHANNELS))
    fgd.write_shards(data, folder, ranks)
    return int(data.attn_index.shape[1])


def train(folder: str, mode: str, period: int | None, dropout: float, steps: int) -> Any:
    """Peaks of memory, seconds of processor and bytes sent of some steps.

    Args:
        folder: of shards.
        mode: of attention along edges.
        period: of layers, one attends to all pairs; ``None``: none does.
        dropout: of weights.
        steps: how many; seconds and bytes are the mean of all but the first two.

    Returns:
        As :func:`measure.dist_memory_steps.under_limit`.
    """
    torch.set_num_threads(1)
    _steps(fgd.shard(_ready(features(_FIRST, CHANNELS)), mode=mode), period, dropout, 2)
    gc.collect()

    def work() -> dict[str, float]:
        data = fgd.load_shards(folder, checksums=False, mode=mode)
        return _steps(data, period, dropout, steps)

    return under_limit(None, work)


def _ready(data: Any) -> Any:
    return Compose([AttentionPattern(), Degrees()])(data)


def _steps(data: Any, period: int | None, dropout: float, steps: int) -> dict[str, float]:
    torch.manual_seed(0)
    model = Graphormer(
        CHANNELS,
        CLASSES,
        CHANNELS,
        LAYERS,
        HEADS,
        hops=1,
        attention_dropout=dropout,
        schedule=Schedule("layer", period),
    )
    optimizer = torch.optim.Adam(model.parameters())
    seconds = sent = 0.0
    for step in range(steps):
        if step == 2:
            fgd.COUNTS.reset()
            seconds = time.process_time()
        optimizer.zero_grad()
        degrees = data.in_degree, data.out_degree
        out = model(data.x, data.attn_index, types=data.attn_type, degrees=degrees)
        loss = F.cross_entropy(out, data.y)
        loss.backward()
        optimizer.step()
    if steps > 2:
        seconds = (time.process_time() - seconds) / (steps - 2)
        sent = sum(fgd.COUNTS.sent.values()) / (steps - 2)
    return {"loss": float(loss.detach()), "seconds": seconds, "sent": sent}
