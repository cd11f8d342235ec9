"""The choice of the fastest mode for a layer, by :mod:`fastgraph.dist.operators.cost`.

Rows are those of the plan. All that is asked is the same in every run on such devices, as links and
work are kept (:mod:`fastgraph.dist.operators.links`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgraph.dist.operators import cost, links
from fastgraph.dist.operators.cost import MODES, Layer, Machine, Mode, Rows
from fastgraph.dist.operators.halo.graph import Neighbourhoods
from fastgraph.dist.operators.modes import Chosen
from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.mesh import Mesh, holder
from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.tensor.memo import remembered
from fastgraph.dist.tensor.sharded import ShardedTensor
from fastgraph.registry.operators import Size


class Choice(NamedTuple):
    """The cost of a layer in each mode.

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
        """The name of the fastest mode for which there is memory."""
        return cost.chosen(self.layer, self.modes, self.machine)

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of a step in each mode."""
        return {name: self.layer.seconds(mode, self.machine) for name, mode in self.modes.items()}

    def __str__(self) -> str:
        def described(name: str) -> str:
            mode = self.modes[name]
            grid = "" if mode.mesh is None else f" on {mode.mesh[0]}x{mode.mesh[1]}"
            what = f"{1e3 * seconds[name]:.3g} ms ({mode.sent / 1e6:.3g} MB sent) by {name}{grid}"
            more = mode.memory - self.modes["halo"].memory
            if more <= cost.allowance(self.machine):
                return what
            return f"{what}, for whose {more / 2**20:,.0f} MiB beyond halo's is no memory"

        seconds = self.seconds
        order = sorted(seconds, key=seconds.__getitem__)
        return f"{self.name}: {', '.join(map(described, order))}"


_said: set[tuple[Hashable, ...]] = set()


def choose(
    index: Tensor,
    layer: Layer,
    key: tuple[Hashable, ...],
    plan: Callable[[], Neighbourhoods],
    names: Sequence[str],
) -> Chosen:
    """The mode that is fastest for a layer, and its mesh; all ranks come to the same answer.

    It is remembered with the index, and the first rank says why on standard error, once for layers
    of one shape. Of layers that are too small to gain anything nothing is asked or said.

    Args:
        index: ``edge_index``, as the layer got it.
        layer: see :func:`layer_of`.
        key: tells the plan from others for this index.
        plan: gives the edges of this rank and its halo.
        names: of the modes to choose from.
    """

    def make() -> Chosen:
        graph = plan()
        if cost.is_small(layer, WORLD.size, graph.plan.busiest, graph.excess):
            return Chosen("halo", None, "small")
        choice = compared(layer, graph, names)
        if WORLD.rank == 0 and (layer, choice.name) not in _said:
            _said.add((layer, choice.name))
            print(f"fastgraph.dist: {_described(layer)} by {choice}", file=sys.stderr)
        return Chosen(choice.name, choice.modes[choice.name].mesh, "fastest")

    found: Chosen = remembered(_part(index), ("mode", *names, layer, *key), make)
    return found


def _described(layer: Layer) -> str:
    if layer.is_sum:
        return f"sums or extrema of {layer.channels} channels"
    return "attention with " + ("1 head" if layer.heads == 1 else f"{layer.heads} heads")


def layer_of(
    shapes: Sequence[Sequence[Size]], inputs: Sequence[Tensor | None], num_heads: int
) -> Layer:
    """A call of fused attention on sharded tensors; see :mod:`fastgraph.dist.operators.cost`."""
    return cost.of_attention(shapes, list(map(_part, inputs)), num_heads)


def layer_of_sum(x: Tensor, *, is_extremum: bool) -> Layer:
    """The same for a sum, mean, maximum or minimum."""
    return cost.of_sum(_part(x), is_extremum=is_extremum)


def _part(x: Any) -> Any:
    """The local rows of a sharded tensor, to inspect without rules; else the value itself."""
    return x.local if isinstance(x, ShardedTensor) else x


def compared(layer: Layer, graph: Neighbourhoods, names: Sequence[str] = tuple(MODES)) -> Choice:
    """Some modes of a layer, from the halo of each rank; all ranks ask for it together."""
    rows = rows_of(graph, cost.meshes(WORLD.size) if "2d" in names else [])
    found = links.of_ranks()
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
