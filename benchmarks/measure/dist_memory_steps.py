"""Training of one process or of a rank, under a limit of its memory."""

from __future__ import annotations

import itertools
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from torch import Tensor

import fastgraph
from fastgraph.comparison.memory import resident
from fastgraph.dist.files import allocator

CLASSES = 16
OUT_OF_MEMORY = "out of memory"
_LAYERS = 3
_SECONDS_BETWEEN_LOOKS = 0.005
_ERRORS_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "Cannot allocate",
    "std::bad_alloc",
)


class Peak(threading.Thread):
    """The largest sizes of this process's memory, looked at again and again.

    Attributes:
        data: bytes of private memory that can be written to, which ``RLIMIT_DATA`` limits.
        anonymous: bytes that are resident and not those of a file.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.data = self.anonymous = 0
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(_SECONDS_BETWEEN_LOOKS):
            data, anonymous = sizes()
            self.data, self.anonymous = max(self.data, data), max(self.anonymous, anonymous)

    def end(self) -> None:
        """Stop looking."""
        self._ended.set()
        self.join()


def sizes() -> tuple[int, int]:
    """Bytes of private memory of this process that can be written to; anonymous and resident."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    found = {words[0]: words[1] for words in lines if len(words) > 1}
    return int(found["VmData:"]) * 1024, int(found["RssAnon:"]) * 1024


def train(
    source: str,
    is_sharded: bool,
    limit: int | None,
    channels: int,
    steps: int,
    returns_freed: bool = True,
) -> Any:
    """Losses and peaks of some steps of graph convolutions; or :data:`OUT_OF_MEMORY`.

    Args:
        source: a file of ``torch.save``, or a folder of shards.
        is_sharded: which of them.
        limit: ``RLIMIT_DATA`` in bytes, from before the graph is loaded.
        channels: of all layers.
        steps: how many.
        returns_freed: whether shards do with freed memory what they do, or leave it to glibc.
    """
    torch.set_num_threads(1)
    if not returns_freed:
        allocator.return_freed_memory = lambda: False
    found = under_limit(limit, lambda: _train(source, is_sharded, channels, steps))
    if found == OUT_OF_MEMORY:
        return found
    return {"losses": found.pop("returned"), **found, "resident": resident()}


def under_limit(limit: int | None, work: Callable[[], Any]) -> Any:
    """The value that some work returned, and the peaks of memory in it; or :data:`OUT_OF_MEMORY`.

    Args:
        limit: ``RLIMIT_DATA`` in bytes, from here on.
        work: what is to be done.
    """
    before, anonymous = sizes()
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    peak = Peak()
    peak.start()
    try:
        returned = work()
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or is_of_memory(str(error)):
            return OUT_OF_MEMORY
        raise
    peak.end()
    return {
        "returned": returned,
        "before": before,
        "data": peak.data,
        "anonymous before": anonymous,
        "anonymous": peak.anonymous,
    }


def is_of_memory(message: str) -> bool:
    """True if an error says that there was not enough memory."""
    return any(text in message for text in _ERRORS_OF_MEMORY)


def _train(source: str, is_sharded: bool, channels: int, steps: int) -> list[float]:
    if is_sharded:
        import fastgraph.dist as fgd

        data = fgd.load_shards(source, checksums=False)
    else:
        data = torch.load(source, weights_only=False)
    fastgraph.enable()
    torch.manual_seed(0)
    sizes = [data.x.shape[1], *[channels] * (_LAYERS - 1), CLASSES]
    layers = torch.nn.ModuleList(gnn.GCNConv(*pair) for pair in itertools.pairwise(sizes))
    optimizer = torch.optim.Adam(layers.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        x: Tensor = data.x
        for layer in layers[:-1]:
            x = layer(x, data.edge_index).relu()
        loss = F.cross_entropy(layers[-1](x, data.edge_index), data.y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses
