"""The speed of ranks and their links: measured once on such devices, and cached between runs.

Modes are chosen by it, and they add up in different orders. As it is kept, a run that is started
again, or another one, takes the modes of the one before, and comes to the same bits.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from fastgraph import settings
from fastgraph.dist.operators.cost import Cluster
from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.devices import Device, devices, identities, memory_of_a_rank, scores
from fastgraph.dist.ranks.own_device import HOST, usable_memory
from fastgraph.dist.ranks.world import WORLD
from fastgraph.machine import cache, native
from fastgraph.ops.attention import ATTENTION
from fastgraph.ops.spmm import SPMM

KIND = "ranks-1"
"""The folder in the cache directory; with another number where figures come to mean other things.
"""

KNOWN: dict[int, Cluster] = {}
"""Figures that this process has asked for, by the number of ranks."""

_KEPT = ("latency", "bandwidth", "work", "sums", "paces")

_SMALL, _LARGE = 2**10, 2**22  # bytes that a rank sends, to measure links
_REPETITIONS = 5
_SMALL_IN_A_ROW, _ATTENTION_IN_A_ROW, _SUMS_IN_A_ROW = 10, 10, 40
"""Repetitions, so that a short measurement takes several turns on a core that ranks share.

Otherwise each rank has the core for itself while it is measured, and messages wait for one turn or
for none: four ranks on two cores came to 0.29 to 2.5 ms of a message, and now to 0.75 to 1.2.
"""


def of_ranks() -> Cluster:
    """The cached figures of such devices, measured at the first call; the same on all ranks.

    All ranks must call it. Whoever wants other figures removes the folder :data:`KIND` of the cache
    directory.
    """
    if WORLD.size not in KNOWN:
        found = devices(bandwidth=False)
        cluster = transport.broadcast(_read(found) if WORLD.rank == 0 else None)
        if cluster is None:
            measured = measure()
            cluster = transport.broadcast(_keep(found, measured) if WORLD.rank == 0 else None)
        assert cluster is not None  # that of the first rank
        KNOWN[WORLD.size] = cluster._replace(memory=_memory(found))
    return KNOWN[WORLD.size]


def measure() -> Cluster:
    """Measure the speed of ranks and their links now. All ranks must call it.

    All of them work at once, so that what they share, as cores, is shared while it is measured.
    """
    small, large = _seconds_to_send(_SMALL, _SMALL_IN_A_ROW), _seconds_to_send(_LARGE, 1)
    per_byte = max(large - small, 1e-9) / (_LARGE - _SMALL)
    of_message = small / max(WORLD.size - 1, 1)
    own = torch.tensor(
        [[of_message, per_byte, *_seconds_of_work()]], dtype=torch.float64, device=HOST
    )
    latency, per_byte, work, sums = transport.all_gather(own, [1] * WORLD.size).amax(0).tolist()
    found = devices(bandwidth=False)
    speeds = scores(found)  # what takes moments does not feel a quota
    paces = tuple(min(speeds) / speed for speed in speeds)
    return Cluster(latency, 1 / per_byte, work, sums, _memory(found), paces)


def _memory(found: Sequence[Device]) -> float:
    """Bytes where operators compute, of the rank that has least. All ranks must call it."""
    if WORLD.device == HOST:
        return memory_of_a_rank(found)
    return float(min(transport.gather_objects(usable_memory(WORLD.device))))


def _identity(found: Sequence[Device]) -> str:
    """Everything on which the figures depend."""
    ranks = [
        f"{name}, {device.threads} threads"
        for name, device in zip(identities(found), found, strict=True)
    ]
    through = dist.get_backend() if dist.is_initialized() else "nothing"
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "any")
    kernels = native.cpu_digest() if native.is_available() else "none"
    computing = settings.current().backend or "the best backend"
    return (
        f"{WORLD.size} ranks: {'; '.join(ranks)}; {through} on interface {interface}; "
        f"torch {torch.__version__}; kernels {kernels}, {computing}"
    )


def _read(found: Sequence[Device]) -> Cluster | None:
    """The cached figures of these devices; ``None`` if there are none, or they are not valid."""
    kept = cache.read(KIND, _identity(found))
    if not isinstance(kept, dict) or kept.keys() != set(_KEPT):
        return None
    paces = kept["paces"]
    if not isinstance(paces, list) or len(paces) != WORLD.size:
        return None
    figures = [*(kept[name] for name in _KEPT if name != "paces"), *paces]
    if not all(isinstance(x, float) and 0 < x < math.inf for x in figures):
        return None
    return Cluster(**{**kept, "paces": tuple(paces)})


def _keep(found: Sequence[Device], measured: Cluster) -> Cluster:
    """Cache figures for these devices and return them, or those that another run cached first."""
    identity = _identity(found)
    with cache.locked(KIND, identity):
        before = _read(found)
        if before is not None:
            return before
        cache.write(KIND, identity, {name: getattr(measured, name) for name in _KEPT})
        if _read(found) is None:
            print(
                f"fastgraph.dist: {cache.path_of(KIND, identity)} cannot be written: other runs "
                "will measure links and work anew, and may take other modes",
                file=sys.stderr,
            )
    return measured


def _seconds_to_send(size: int, in_a_row: int) -> float:
    per_rank = size // max(WORLD.size - 1, 1)
    sends = [0 if rank == WORLD.rank else per_rank for rank in range(WORLD.size)]
    given = torch.zeros(sum(sends), dtype=torch.uint8, device=HOST)
    return _median(lambda: transport.all_to_all(given, sends, sends), in_a_row)


def _seconds_of_work() -> tuple[float, float]:
    """Of attention and of a sum, for an edge and a channel."""
    nodes, edges, heads, channels = 2**11, 2**15, 4, 32
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(nodes, (2, edges), generator=generator, device=HOST)
    x = torch.zeros(nodes, heads, channels, device=HOST)
    options = (None, None, index, None, None, 0, False, 1.0, 0.0, False)
    attention = _median(lambda: ATTENTION(x, x, x, *options), _ATTENTION_IN_A_ROW)
    of_sum = _median(lambda: SPMM(x, index, None, None, nodes, "sum", False), _SUMS_IN_A_ROW)
    size = edges * heads * channels
    return attention / size, of_sum / size


def _median(call: Callable[[], object], in_a_row: int) -> float:
    """Seconds of one of some calls in a row, which ranks start together, after a first one."""
    call()
    seconds = []
    for _ in range(_REPETITIONS):
        transport.barrier()
        start = time.perf_counter()
        for _ in range(in_a_row):
            call()
        seconds.append((time.perf_counter() - start) / in_a_row)
    return statistics.median(seconds)
