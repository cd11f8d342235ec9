"""Whether attention is faster by its halo or by heads.

By a model of a step, forward and backward: the work of the slowest rank, the latency of each
collective, and its bytes over the bandwidth of an all-to-all. Work and links are measured once in a
process, rows of the halo are those of the plan. What overlaps, and what memory there is, is not in
it.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgraph.dist import transport
from fastgraph.dist.head_shards import shares
from fastgraph.dist.layout import Layout
from fastgraph.dist.memo import remembered
from fastgraph.dist.neighbourhoods import Neighbourhoods
from fastgraph.dist.sharded import ShardedTensor
from fastgraph.dist.world import WORLD
from fastgraph.ops.attention import ATTENTION
from fastgraph.registry.operators import Size

_SMALL, _LARGE = 2**10, 2**22  # bytes that a rank sends, to measure links
_REPETITIONS = 5
_BACKWARD = 2.0
"""Work of a backward pass, in forward passes: it computes attention again, twice."""


class Machine(NamedTuple):
    """What was measured; the slowest of all ranks.

    Attributes:
        latency: seconds of an all-to-all of next to nothing.
        bandwidth: bytes that a rank sends in a second of an all-to-all.
        work: seconds of a forward pass for an edge and a channel of a head.
    """

    latency: float
    bandwidth: float
    work: float


class Mode(NamedTuple):
    """A step of one layer in one mode, on the slowest rank.

    Attributes:
        collectives: how many it waits for.
        sent: bytes.
        work: edges times channels of the heads that are computed.
    """

    collectives: int
    sent: float
    work: float

    def seconds(self, machine: Machine) -> float:
        """How long it takes."""
        exchange = self.collectives * machine.latency + self.sent / machine.bandwidth
        return exchange + (1 + _BACKWARD) * self.work * machine.work


class Choice(NamedTuple):
    """Both modes of a layer.

    Attributes:
        halo, heads: what each needs.
        machine: what it runs on.
    """

    halo: Mode
    heads: Mode
    machine: Machine

    @property
    def is_by_heads(self) -> bool:
        """Whether heads are faster."""
        return self.heads.seconds(self.machine) < self.halo.seconds(self.machine)

    def __str__(self) -> str:
        def described(mode: Mode) -> str:
            return f"{1e3 * mode.seconds(self.machine):.3g} ms ({mode.sent / 1e6:.3g} MB sent)"

        chosen = "heads" if self.is_by_heads else "halo"
        return f"{chosen}: {described(self.heads)} by heads, {described(self.halo)} by halo"


_measured: dict[int, Machine] = {}
_said: set[tuple[Hashable, ...]] = set()


def machine() -> Machine:
    """What was measured at the first call, in which all ranks take part."""
    if WORLD.size not in _measured:
        small, large = _seconds_to_send(_SMALL), _seconds_to_send(_LARGE)
        bandwidth = (_LARGE - _SMALL) / max(large - small, 1e-9)
        own = torch.tensor([[small, 1 / bandwidth, _seconds_of_work()]], dtype=torch.float64)
        latency, per_byte, work = _slowest(own)
        _measured[WORLD.size] = Machine(latency, 1 / per_byte, work)
    return _measured[WORLD.size]


def choose(
    index: Tensor,
    shapes: Sequence[Sequence[Size]],
    inputs: Sequence[Tensor | None],
    num_heads: int,
    key: tuple[Hashable, ...],
    plan: Callable[[], Neighbourhoods],
) -> bool:
    """Whether a layer is faster by heads; all ranks come to the same answer.

    It is remembered with the index, and the first rank says why on standard error, once for layers
    of one shape.

    Args:
        index: ``edge_index``, as the layer got it.
        shapes: of the operands of its operator.
        inputs: the operands.
        num_heads: how many heads there are.
        key: tells the plan from others for this index.
        plan: gives the edges of this rank and its halo.
    """

    def make() -> bool:
        choice = compared(shapes, inputs, num_heads, plan())
        # Once for layers alike, whose edges may be others at each call.
        layer = (
            *(size for size, shape in zip(sizes, shapes, strict=True) if "edges" not in shape),
        )
        if WORLD.rank == 0 and (layer, choice.is_by_heads) not in _said:
            _said.add((layer, choice.is_by_heads))
            print(f"fastgraph.dist: attention with {num_heads} heads by {choice}", file=sys.stderr)
        return choice.is_by_heads

    local = index.local if isinstance(index, ShardedTensor) else index
    sizes = [None if x is None else (*x.shape, x.dtype, x.requires_grad) for x in inputs]
    found: bool = remembered(local, ("mode", *sizes, *key), make)
    return found


def compared(
    shapes: Sequence[Sequence[Size]],
    inputs: Sequence[Tensor | None],
    num_heads: int,
    graph: Neighbourhoods,
) -> Choice:
    """Both modes, from the shapes of the operands and the halo of each rank."""
    own = shares(num_heads).mine
    present = [(x, shape) for x, shape in zip(inputs, shapes, strict=True) if x is not None]
    layouts: dict[Size, Layout] = {
        "sources": graph.sources,
        "destinations": graph.destinations,
        "edges": graph.edges,
    }
    exchanges = [0, 2]
    sent = [0, 0]
    seen = set()
    for x, shape in present:
        if shape[0] not in layouts:
            continue
        rows, row = layouts[shape[0]], x.shape[1:].numel() * x.element_size()
        others = rows.n - rows.mine
        if shape[0] == "sources" and graph.plan.remote:
            exchanges[0] += 1
            sent[0] += row * (sum(graph.plan.sends) + sum(graph.plan.receives))
        # Sources and destinations may share one tensor, which is sent once by heads.
        tensor = id(x.local if isinstance(x, ShardedTensor) else x), id(rows)
        if "heads" in shape and tensor not in seen:
            seen.add(tensor)
            sent[1] += row * (rows.mine * (num_heads - own) + others * own) // num_heads
        elif "heads" not in shape and x.requires_grad:  # sent to all, and sums sent back
            exchanges[1] += 1
            sent[1] += row * (rows.mine * (WORLD.size - 1) + others)
    out = next(x for x, shape in present if shape[0] == "sources" and len(shape) == 3)
    rows, row = graph.destinations, out.shape[1:].numel() * out.element_size()
    others = rows.n - rows.mine
    sent[1] += row * (rows.mine * (num_heads - own) + others * own) // num_heads
    channels = out.shape[-1]
    work = graph.edges.mine * num_heads * channels, graph.edges.n * own * channels
    slowest = _slowest(torch.tensor([[*sent, *work]], dtype=torch.float64))
    halo = Mode(2 * exchanges[0], slowest[0], slowest[2])
    return Choice(halo, Mode(2 * exchanges[1], slowest[1], slowest[3]), machine())


def _slowest(own: Tensor) -> list[float]:
    found: list[float] = transport.all_gather(own, [1] * WORLD.size).amax(0).tolist()
    return found


def _seconds_to_send(size: int) -> float:
    per_rank = size // max(WORLD.size - 1, 1)
    sends = [0 if rank == WORLD.rank else per_rank for rank in range(WORLD.size)]
    given = torch.zeros(sum(sends), dtype=torch.uint8)
    return _median(lambda: transport.all_to_all(given, sends, sends))


def _seconds_of_work() -> float:
    nodes, edges, heads, channels = 2**11, 2**15, 4, 32
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(nodes, (2, edges), generator=generator)
    x = torch.zeros(nodes, heads, channels)
    options = (None, None, index, None, None, 0, False, 1.0, 0.0, False)
    return _median(lambda: ATTENTION(x, x, x, *options)) / (edges * heads * channels)


def _median(call: Callable[[], Any]) -> float:
    """Seconds of a call after a first one, in which ranks start together."""
    call()
    seconds = []
    for _ in range(_REPETITIONS):
        transport.barrier()
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
