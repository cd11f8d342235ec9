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
_SMALL_IN_A_ROW, _ATTENTION_IN_A_ROW, _SUMS_IN_A_ROW = 10, 10, 40
"""What takes less than a turn on a core that ranks share is repeated until it takes several.

Otherwise each rank has the core for itself while it is measured, and messages wait for one turn or
for none: four ranks on two cores came to 0.29 to 2.5 ms of a message, and now to 0.75 to 1.2.
"""


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
    def name(self) -> str:
        """Of the fastest."""
        return cost.fastest(self.seconds)

    @property
    def seconds(self) -> dict[str, float]:
        """Of a step in each mode."""
        return {name: self.layer.seconds(mode, self.machine) for name, mode in self.modes.items()}

    def __str__(self) -> str:
        def described(name: str) -> str:
            mode = self.modes[name]
            grid = "" if mode.mesh is None else f" on {mode.mesh[0]}x{mode.mesh[1]}"
            return f"{1e3 * seconds[name]:.3g} ms ({mode.sent / 1e6:.3g} MB sent) by {name}{grid}"

        seconds = self.seconds
        order = sorted(seconds, key=seconds.__getitem__)
        return f"{self.name}: {', '.join(map(described, order))}"


_measured: dict[int, Machine] = {}
_said: set[tuple[Hashable, ...]] = set()


def machine() -> Machine:
    """What was measured at the first call, in which all ranks take part.

    All of them work at once, so that what they share, as cores, is shared while it is measured.
    """
    if WORLD.size not in _measured:
        small, large = _seconds_to_send(_SMALL, _SMALL_IN_A_ROW), _seconds_to_send(_LARGE, 1)
        per_byte = max(large - small, 1e-9) / (_LARGE - _SMALL)
        of_message = small / max(WORLD.size - 1, 1)
        own = torch.tensor([[of_message, per_byte, *_seconds_of_work()]], dtype=torch.float64)
        found = transport.all_gather(own, [1] * WORLD.size)
        latency, per_byte, work, sums = found.amax(0).tolist()
        _measured[WORLD.size] = Machine(latency, 1 / per_byte, work, sums)
    return _measured[WORLD.size]


def choose(
    index: Tensor,
    layer: Layer,
    key: tuple[Hashable, ...],
    plan: Callable[[], Neighbourhoods],
    names: Sequence[str],
) -> tuple[str, Mesh | None]:
    """The mode that is fastest for a layer, and its mesh; all ranks come to the same answer.

    It is remembered with the index, and the first rank says why on standard error, once for layers
    of one shape.

    Args:
        index: ``edge_index``, as the layer got it.
        layer: see :func:`layer_of`.
        key: tells the plan from others for this index.
        plan: gives the edges of this rank and its halo.
        names: of the modes to choose from.
    """

    def make() -> tuple[str, Mesh | None]:
        choice = compared(layer, plan(), names)
        if WORLD.rank == 0 and (layer, choice.name) not in _said:
            _said.add((layer, choice.name))
            print(f"fastgraph.dist: {_described(layer)} by {choice}", file=sys.stderr)
        return choice.name, choice.modes[choice.name].mesh

    local = index.local if isinstance(index, ShardedTensor) else index
    found: tuple[str, Mesh | None] = remembered(local, ("mode", *names, layer, *key), make)
    return found


def _described(layer: Layer) -> str:
    if layer.is_sum:
        return f"sums or extrema of {layer.channels} channels"
    return "attention with " + ("1 head" if layer.heads == 1 else f"{layer.heads} heads")


def layer_of(
    shapes: Sequence[Sequence[Size]], inputs: Sequence[Tensor | None], num_heads: int
) -> Layer:
    """A call of fused attention on sharded tensors; see :mod:`fastgraph.dist.cost`."""

    def identity(x: Tensor) -> int:
        return id(x.local if isinstance(x, ShardedTensor) else x)

    return cost.of_attention(shapes, inputs, num_heads, identity)


def compared(layer: Layer, graph: Neighbourhoods, names: Sequence[str] = tuple(MODES)) -> Choice:
    """Some modes of a layer, from the halo of each rank; all ranks ask for it together."""
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
    owner = torch.cat([sources, graph.sources.held(graph.plan.halo).owner])
    own = torch.full_like(graph.plan.place, WORLD.rank)
    return torch.bincount(holder(owner[graph.plan.place], own, mesh), minlength=WORLD.size)


def _seconds_to_send(size: int, in_a_row: int) -> float:
    per_rank = size // max(WORLD.size - 1, 1)
    sends = [0 if rank == WORLD.rank else per_rank for rank in range(WORLD.size)]
    given = torch.zeros(sum(sends), dtype=torch.uint8)
    return _median(lambda: transport.all_to_all(given, sends, sends), in_a_row)


def _seconds_of_work() -> tuple[float, float]:
    """Of attention and of a sum, for an edge and a channel."""
    nodes, edges, heads, channels = 2**11, 2**15, 4, 32
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(nodes, (2, edges), generator=generator)
    x = torch.zeros(nodes, heads, channels)
    options = (None, None, index, None, None, 0, False, 1.0, 0.0, False)
    attention = _median(lambda: ATTENTION(x, x, x, *options), _ATTENTION_IN_A_ROW)
    of_sum = _median(lambda: SPMM(x, index, None, None, nodes, "sum", False), _SUMS_IN_A_ROW)
    size = edges * heads * channels
    return attention / size, of_sum / size


def _median(call: Callable[[], Any], in_a_row: int) -> float:
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
