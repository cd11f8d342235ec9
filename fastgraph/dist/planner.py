"""Which mode is fastest for a layer, by :mod:`fastgraph.dist.cost` and what ranks can do.

Work and links are measured once in a process, rows are those of the plan.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgraph.dist import cost, transport
from fastgraph.dist.cost import MODES, Layer, Machine, Mode, Rows
from fastgraph.dist.grid_volume import Mesh, holder
from fastgraph.dist.memo import remembered
from fastgraph.dist.neighbourhoods import Neighbourhoods
from fastgraph.dist.sharded import ShardedTensor
from fastgraph.dist.world import WORLD
from fastgraph.ops.attention import ATTENTION
from fastgraph.ops.spmm import SPMM
from fastgraph.registry.operators import Size

_SMALL, _LARGE = 2**10, 2**22  # bytes that a rank sends, to measure links
_REPETITIONS = 5


class Choice(NamedTuple):
    """What a layer takes in each mode.

    Attributes:
        modes: by name.
        machine: what it runs on.
        layer: which.
    """

    modes: Mapping[str, Mode]
    machine: Machine
    layer: Layer

    @property
    def mode(self) -> str:
        """The fastest."""
        return cost.fastest(self.modes, self.layer, self.machine)

    def __str__(self) -> str:
        def described(name: str) -> str:
            sent = self.modes[name].sent
            return f"{1e3 * seconds[name]:.3g} ms ({sent / 1e6:.3g} MB sent) by {name}"

        seconds = {
            name: self.layer.seconds(mode, self.machine) for name, mode in self.modes.items()
        }
        order = sorted(seconds, key=seconds.__getitem__)
        return f"{self.mode}: {', '.join(map(described, order))}"


_measured: dict[int, Machine] = {}
_said: set[tuple[Hashable, ...]] = set()


def machine() -> Machine:
    """What was measured at the first call, in which all ranks take part.

    All of them work at once, so that what they share, as cores, is shared while it is measured.
    """
    if WORLD.size not in _measured:
        small, large = _seconds_to_send(_SMALL), _seconds_to_send(_LARGE)
        per_byte = max(large - small, 1e-9) / (_LARGE - _SMALL)
        of_message = small / max(WORLD.size - 1, 1)
        own = torch.tensor([[of_message, per_byte, *_seconds_of_work()]], dtype=torch.float64)
        found = transport.all_gather(own, [1] * WORLD.size)
        latency, per_byte, work, sums = found.amax(0).tolist()
        _measured[WORLD.size] = Machine(latency, 1 / per_byte, work, sums)
    return _measured[WORLD.size]


def choose(
    index: Tensor,
    shapes: Sequence[Sequence[Size]],
    inputs: Sequence[Tensor | None],
    num_heads: int,
    key: tuple[Hashable, ...],
    plan: Callable[[], Neighbourhoods],
    names: Sequence[str] = ("halo", "heads"),
) -> str:
    """The mode that is fastest for a layer; all ranks come to the same answer.

    It is remembered with the index, and the first rank says why on standard error, once for layers
    of one shape.

    Args:
        index: ``edge_index``, as the layer got it.
        shapes: of the operands of its operator.
        inputs: the operands.
        num_heads: how many heads there are.
        key: tells the plan from others for this index.
        plan: gives the edges of this rank and its halo.
        names: of the modes to choose from.
    """

    def make() -> str:
        choice = compared(shapes, inputs, num_heads, plan(), names)
        # Once for layers alike, whose edges may be others at each call.
        layer = (
            *(size for size, shape in zip(sizes, shapes, strict=True) if "edges" not in shape),
        )
        if WORLD.rank == 0 and (layer, choice.mode) not in _said:
            _said.add((layer, choice.mode))
            print(f"fastgraph.dist: attention with {num_heads} heads by {choice}", file=sys.stderr)
        return choice.mode

    local = index.local if isinstance(index, ShardedTensor) else index
    sizes = [None if x is None else (*x.shape, x.dtype, x.requires_grad) for x in inputs]
    found: str = remembered(local, ("mode", *names, *sizes, *key), make)
    return found


def compared(
    shapes: Sequence[Sequence[Size]],
    inputs: Sequence[Tensor | None],
    num_heads: int,
    graph: Neighbourhoods,
    names: Sequence[str] = ("halo", "heads"),
) -> Choice:
    """Some modes, from the shapes of the operands and the halo of each rank."""

    def identity(x: Tensor) -> int:
        return id(x.local if isinstance(x, ShardedTensor) else x)

    layer = cost.of_attention(shapes, inputs, num_heads, identity)
    rows, found = rows_of(graph, cost.meshes(WORLD.size) if "2d" in names else []), machine()
    modes = {name: MODES[name](layer, rows, found) for name in names}
    return Choice({name: mode for name, mode in modes.items() if mode}, found, layer)


def rows_of(graph: Neighbourhoods, meshes: Sequence[Mesh]) -> Rows:
    """How a graph is shared out, with the blocks of some grids; all ranks ask for it together."""
    plan = graph.plan
    own = torch.tensor([[graph.edges.mine, sum(plan.sends), sum(plan.receives)]])
    edges, sends, receives = transport.all_gather(own, [1] * WORLD.size).T.tolist()
    blocks = {}
    if meshes:
        of_meshes = transport.all_reduce(
            torch.stack([_edges_of_blocks(graph, mesh) for mesh in meshes])
        )
        blocks = dict(zip(meshes, of_meshes.amax(1).tolist(), strict=True))
    sources, destinations = graph.sources.counts, graph.destinations.counts
    return Rows(sources, destinations, edges, sends, receives, blocks)


def _edges_of_blocks(graph: Neighbourhoods, mesh: Mesh) -> Tensor:
    """int64 ``[ranks]``: how many of the edges of this rank each block of a grid has."""
    sources = torch.full((graph.sources.mine,), WORLD.rank)
    owner = torch.cat([sources, graph.sources.owner[graph.plan.halo]])
    own = torch.full_like(graph.plan.place, WORLD.rank)
    return torch.bincount(holder(owner[graph.plan.place], own, mesh), minlength=WORLD.size)


def _seconds_to_send(size: int) -> float:
    per_rank = size // max(WORLD.size - 1, 1)
    sends = [0 if rank == WORLD.rank else per_rank for rank in range(WORLD.size)]
    given = torch.zeros(sum(sends), dtype=torch.uint8)
    return _median(lambda: transport.all_to_all(given, sends, sends))


def _seconds_of_work() -> tuple[float, float]:
    """Of attention and of a sum, for an edge and a channel."""
    nodes, edges, heads, channels = 2**11, 2**15, 4, 32
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(nodes, (2, edges), generator=generator)
    x = torch.zeros(nodes, heads, channels)
    options = (None, None, index, None, None, 0, False, 1.0, 0.0, False)
    attention = _median(lambda: ATTENTION(x, x, x, *options))
    of_sum = _median(lambda: SPMM(x, index, None, None, nodes, "sum", False))
    size = edges * heads * channels
    return attention / size, of_sum / size


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
