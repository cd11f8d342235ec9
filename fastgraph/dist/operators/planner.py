"""The choice of the mode of a call: the one that was asked for, or the fastest for the layer.

The fastest by :mod:`fastgraph.dist.operators.cost`; rows are those of the halo's plan. All that is
asked is the same in every run on such devices, as links and work are kept
(:mod:`fastgraph.dist.operators.links`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastgraph.dist.operators import cost, links
from fastgraph.dist.operators.cost import Cluster, Cost, Distribution, Layer
from fastgraph.dist.operators.halo.graph import Neighbourhoods, neighbourhoods
from fastgraph.dist.operators.modes import AUTO, BY_NAME, HALO
from fastgraph.dist.operators.protocol import Mode, Operation, Relation
from fastgraph.dist.operators.rank_graph import part_of
from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.counts import COUNTS
from fastgraph.dist.ranks.mesh import GRID, Mesh, holder, meshes
from fastgraph.dist.ranks.own_device import HOST
from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.tensor.memo import cached
from fastgraph.dist.tensor.sharded import is_sharded
from fastgraph.registry.operators import Size


def mode_of(
    operation: Operation, relation: Relation, layer: Callable[[], Layer] | None = None
) -> Mode:
    """The mode in which an operation is computed; all ranks come to the same answer.

    It is counted for attention, and for others where another mode than the halo is asked for.

    Args:
        operation: which.
        relation: the edges.
        layer: gives what it costs, asked where the mode is ``"auto"``; without it that is by halo.
    """
    is_attention = operation.name == "attention"
    counter = COUNTS.attention if is_attention else COUNTS.aggregation
    name, mesh = _asked(operation, relation)
    if name == HALO.name:
        if is_attention:
            counter[name] += 1
        return HALO
    if name == AUTO:
        able = [
            mode.name
            for mode in BY_NAME.values()
            if operation.name in mode.operations and mode.why_not(operation) is None
        ]
        if layer is None or len(able) == 1:
            return HALO
        name, mesh, why = _fastest(relation, layer(), able)
        counter[f"{name}: {why}"] += 1
        return BY_NAME[name].on(mesh)
    mode = BY_NAME[name]
    why_not = mode.why_not(operation)
    if why_not is not None:
        counter[f"{HALO.name}: {why_not}"] += 1
        return HALO
    counter[name] += 1
    return mode.on(mesh)


def _asked(operation: Operation, relation: Relation) -> tuple[str, Mesh | None]:
    """The mode that layouts ask for, and its mesh: aggregating nodes, unless they want the halo."""
    if WORLD.size > 1:
        for rows in (relation.destinations, relation.sources):
            is_there = rows.mode == AUTO or operation.name in BY_NAME[rows.mode].operations
            if is_there and rows.mode != HALO.name:
                return rows.mode, rows.mesh
    return HALO.name, None


class Choice(NamedTuple):
    """The cost of a layer in each mode.

    Attributes:
        modes: by name.
        cluster: what it runs on.
        layer: which.
    """

    modes: Mapping[str, Cost]
    cluster: Cluster
    layer: Layer

    @property
    def name(self) -> str:
        """The name of the fastest mode for which there is memory."""
        return cost.chosen(self.layer, self.modes, self.cluster)

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of a step in each mode."""
        return {name: self.layer.seconds(mode, self.cluster) for name, mode in self.modes.items()}

    def __str__(self) -> str:
        def described(name: str) -> str:
            mode = self.modes[name]
            grid = "" if mode.mesh is None else f" on {mode.mesh[0]}x{mode.mesh[1]}"
            what = f"{1e3 * seconds[name]:.3g} ms ({mode.sent / 1e6:.3g} MB sent) by {name}{grid}"
            more = mode.memory - self.modes[HALO.name].memory
            if more <= cost.allowance(self.cluster):
                return what
            return f"{what}, for whose {more / 2**20:,.0f} MiB beyond halo's is no memory"

        seconds = self.seconds
        order = sorted(seconds, key=seconds.__getitem__)
        return f"{self.name}: {', '.join(map(described, order))}"


class _Fastest(NamedTuple):
    """The mode that was found for a layer.

    Attributes:
        name: of the mode.
        mesh: of the ranks, if it has one.
        why: by what it was chosen.
    """

    name: str
    mesh: Mesh | None
    why: str


_said: set[tuple[Hashable, ...]] = set()


def _fastest(relation: Relation, layer: Layer, names: Sequence[str]) -> _Fastest:
    """The mode that is fastest for a layer, and its mesh; all ranks come to the same answer.

    It is cached with the index, and the first rank says why on standard error, once for layers
    of one shape. Of layers that are too small to gain anything nothing is asked or said.

    Args:
        relation: the edges, as the layer got them.
        layer: see :func:`layer_of`.
        names: of the modes to choose from.
    """

    def make() -> _Fastest:
        graph = neighbourhoods(*relation)
        if cost.is_small(layer, WORLD.size, graph.plan.busiest, graph.excess):
            return _Fastest(HALO.name, None, "small")
        choice = compared(layer, graph, names)
        if WORLD.rank == 0 and (layer, choice.name) not in _said:
            _said.add((layer, choice.name))
            print(f"fastgraph.dist: {_described(layer)} by {choice}", file=sys.stderr)
        return _Fastest(choice.name, choice.modes[choice.name].mesh, "fastest")

    index, key = relation.index, ("mode", *names, layer, *relation[1:])
    found: _Fastest = cached(part_of(index), key, make, is_part=is_sharded(index))
    return found


def _described(layer: Layer) -> str:
    if layer.is_sum:
        return f"sums or extrema of {layer.channels} channels"
    return "attention with " + ("1 head" if layer.heads == 1 else f"{layer.heads} heads")


def layer_of(
    shapes: Sequence[Sequence[Size]],
    inputs: Sequence[Tensor | None],
    num_heads: int,
    made: Sequence[Sequence[Size]] = (),
) -> Layer:
    """A call of fused attention on sharded tensors; see :mod:`fastgraph.dist.operators.cost`."""
    return cost.attention_layer(
        shapes, [None if x is None else part_of(x) for x in inputs], num_heads, made
    )


def layer_of_sum(x: Tensor, *, is_extremum: bool) -> Layer:
    """The same for a sum, mean, maximum or minimum."""
    return cost.sum_layer(part_of(x), is_extremum=is_extremum)


def compared(layer: Layer, graph: Neighbourhoods, names: Sequence[str] = tuple(BY_NAME)) -> Choice:
    """Some modes of a layer, from the halo of each rank; all ranks ask for it together."""
    rows = distribution(graph, meshes(WORLD.size) if GRID in names else [])
    found = links.of_ranks()
    modes = {name: BY_NAME[name].cost(layer, rows, found) for name in names}
    return Choice({name: mode for name, mode in modes.items() if mode}, found, layer)


def distribution(graph: Neighbourhoods, meshes: Sequence[Mesh]) -> Distribution:
    """How a graph is shared out, with the blocks of some grids; all ranks ask for it together."""
    plan = graph.plan
    own = torch.tensor([[graph.edges.mine, sum(plan.sends), sum(plan.receives)]], device=HOST)
    edges, sends, receives = transport.all_gather(own, [1] * WORLD.size).T.tolist()
    blocks = {}
    if meshes:
        of_meshes = transport.all_reduce(
            torch.stack([_edges_of_blocks(graph, mesh) for mesh in meshes])
        )
        blocks = dict(zip(meshes, of_meshes.amax(1).tolist(), strict=True))
    sources, destinations = graph.sources.counts, graph.destinations.counts
    return Distribution(sources, destinations, edges, sends, receives, blocks)


def _edges_of_blocks(graph: Neighbourhoods, mesh: Mesh) -> Tensor:
    """int64 ``[ranks]``: how many of the edges of this rank each block of a grid has."""
    sources = torch.full((graph.sources.mine,), WORLD.rank, device=HOST)
    owner = torch.cat([sources, graph.sources.held(graph.plan.halo).owner])
    own = torch.full_like(graph.plan.place, WORLD.rank)
    return torch.bincount(holder(owner[graph.plan.place], own, mesh), minlength=WORLD.size)
