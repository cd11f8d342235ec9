"""Forecasts of the time and memory of a training step on numbers of devices.

By :mod:`fastgraph.dist.operators.cost`, from what one process computes in a step and the real
halos of METIS partitions. Where a partition would take too long, halos are those of fewer devices,
extrapolated.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from fastgraph.dist.forecast.dry_run import Step
from fastgraph.dist.graphs.partition import partition
from fastgraph.dist.operators import cost
from fastgraph.dist.operators.cost import BACKWARD, Cluster, Cost, Distribution, Layer
from fastgraph.dist.operators.grid.cost import largest_block
from fastgraph.dist.operators.modes import AUTO, BY_NAME, HALO
from fastgraph.dist.ranks.gradients import SMALL, bundles
from fastgraph.dist.ranks.mesh import Mesh, meshes
from fastgraph.dist.ranks.own_device import HOST
from fastgraph.machine import cache
from fastgraph.machine.cache import Json

_KIND = "rows"

_COPIES = 4
"""Of parameters on each device: themselves, gradients, and two of Adam."""


_FEWEST = 16
"""Parts before halos are extrapolated: of fewer, many lie at the rim of a mesh and have less."""


class Total(NamedTuple):
    """A step of a whole model, on the slowest device.

    Attributes:
        seconds: of it.
        sent: bytes.
        memory: bytes, without those that libraries and the allocator take.
        layers: the mode of each layer.
        meshes: of those on a grid.
    """

    seconds: float
    sent: float
    memory: float
    layers: list[str]
    meshes: list[Mesh]


class Forecast(NamedTuple):
    """The time and memory of a step on a number of devices.

    Attributes:
        devices: how many.
        has_extrapolated_halos: whether METIS would have taken too long for its halos.
        modes: by mode; layers that it cannot compute are by halo.
        auto: with the fastest mode for each layer, of those for which there is memory.
    """

    devices: int
    has_extrapolated_halos: bool
    modes: dict[str, Total]
    auto: Total


def forecasts(
    step: Step,
    cluster: Cluster,
    devices: Sequence[int],
    *,
    seconds: float = math.inf,
    report: Callable[[str], object] = lambda text: None,
) -> Iterator[Forecast]:
    """The forecasts of a step for some numbers of devices, in ascending order.

    Args:
        step: of the model.
        cluster: each device and its link.
        devices: their numbers.
        seconds: for partitions; those that would take longer are extrapolated.
        report: is told what is being done.

    Raises:
        PartitionError, ModuleNotFoundError: METIS failed, or there is none.
    """
    partitioned = _Partitioned(step, seconds)
    for number in sorted(set(devices)):
        report(f"partitioning for {number} devices")
        rows, has_extrapolated_halos = partitioned.rows(number)
        yield forecast(step, cluster, rows, number)._replace(
            has_extrapolated_halos=has_extrapolated_halos
        )


def forecast(step: Step, cluster: Cluster, rows: Sequence[Distribution], devices: int) -> Forecast:
    """The forecast of a step whose graphs are shared out like this.

    Args:
        step: of the model.
        cluster: each device and its link.
        rows: of each of the step's graphs.
        devices: how many.
    """
    layers = [layer for _, layer, _ in step.calls]
    found: dict[str, list[Cost]] = {name: [] for name in BY_NAME}
    names: dict[str, list[str]] = {name: [] for name in (*BY_NAME, AUTO)}
    best: list[Cost] = []
    for _, layer, graph in step.calls:
        possible = {
            name: mode
            for name, one in BY_NAME.items()
            if (mode := one.cost(layer, rows[graph], cluster)) is not None
        }
        for name in BY_NAME:
            names[name].append(name if name in possible else HALO.name)
            found[name].append(possible[names[name][-1]])
        is_small = cost.is_small(layer, devices, rows[graph].busiest, rows[graph].excess)
        names[AUTO].append(HALO.name if is_small else cost.chosen(layer, possible, cluster))
        best.append(possible[names[AUTO][-1]])
    rest = _rest(step, cluster, devices)
    total = {
        name: _total(layers, modes, cluster, rest)._replace(layers=names[name])
        for name, modes in (found | {AUTO: best}).items()
    }
    auto = total.pop(AUTO)
    return Forecast(devices, False, total, auto)


def _rest(step: Step, cluster: Cluster, devices: int) -> Total:
    """The cost that all modes share: of other operations on rows, and of the sums of gradients."""
    everything = sum(step.parameters)
    small = [size for size in step.parameters if size <= SMALL]
    sums = len(step.parameters) - len(small) + len(list(bundles(small)))
    messages = 2 * sums * (devices - 1)
    sent = 2 * everything * (devices - 1) / devices
    exchange = messages * cluster.latency + sent / cluster.bandwidth
    seconds = (1 + BACKWARD) * step.rest / devices + exchange
    return Total(seconds, sent, step.saved / devices + _COPIES * everything, [], [])


def _total(layers: Sequence[Layer], modes: Sequence[Cost], cluster: Cluster, rest: Total) -> Total:
    pairs = list(zip(layers, modes, strict=True))
    return Total(
        rest.seconds + sum(layer.seconds(mode, cluster) for layer, mode in pairs),
        rest.sent + sum(mode.sent for mode in modes),
        # What layers hold besides their rows is kept until the backward pass.
        rest.memory + sum(mode.memory for mode in modes),
        [],
        [mode.mesh for mode in modes if mode.mesh is not None],
    )


def by_pace(step: Step, work: float) -> Step:
    """A step as another device would do it, all of whose operations have its pace.

    Args:
        step: as it was seen.
        work: seconds of the device for an edge and a channel.
    """
    measured = [layer.work for _, layer, _ in step.calls if layer.work]
    ratio = work * len(measured) / sum(measured) if measured else 1.0
    calls = [(name, layer._replace(work=work), graph) for name, layer, graph in step.calls]
    return step._replace(calls=calls, rest=step.rest * ratio)


class _Partitioned:
    """The graphs of a step in parts; nodes of different kinds are told apart by their number."""

    def __init__(self, step: Step, seconds: float) -> None:
        self._graphs, self._left = step.graphs, seconds
        self._sizes = sorted({size for _, *sizes in step.graphs for size in sizes})
        starts = dict(zip(self._sizes, accumulate(self._sizes, initial=0), strict=False))
        joint = [
            ends + torch.tensor([[starts[sources]], [starts[destinations]]], device=HOST)
            for ends, sources, destinations in step.graphs
        ]
        self._edges = (
            torch.cat(joint, 1).unique(dim=1) if joint else torch.empty(2, 0, device=HOST).long()
        )
        digest = hashlib.sha256(self._edges.numpy().tobytes())
        for ends, *_ in step.graphs:
            digest.update(ends.numpy().tobytes())
        self._name = digest.hexdigest()
        self._known: dict[int, list[Distribution]] = {}
        self._took = 0.0

    def rows(self, devices: int) -> tuple[list[Distribution], bool]:
        """How each graph is shared out over some devices, and whether that is extrapolated."""
        identity = f"{self._name} in {devices} parts"
        kept = cache.read(_KIND, identity)
        if kept is not None:
            self._known[devices] = [_from_json(rows) for rows in kept]
            return self._known[devices], False
        # Twice as many parts are one more bisection of everything.
        known = [size for size in self._known if size > 1]
        can_go_on = len(known) > 1 and max(known) >= _FEWEST
        if can_go_on and 1.5 * self._took > self._left:
            return [larger_distribution(rows, devices) for rows in self._by_graph()], True
        started = time.perf_counter()
        parts = partition(self._edges, sum(self._sizes), devices)
        owners = dict(zip(self._sizes, parts.split(self._sizes), strict=True))
        found = [
            partition_distribution(ends, owners[sources], owners[destinations], devices)
            for ends, sources, destinations in self._graphs
        ]
        self._took = time.perf_counter() - started
        self._left -= self._took
        cache.write(_KIND, identity, [_to_json(rows) for rows in found])
        self._known[devices] = found
        return found, False

    def _by_graph(self) -> list[dict[int, Distribution]]:
        return [
            {devices: rows[graph] for devices, rows in self._known.items()}
            for graph in range(len(self._graphs))
        ]


def partition_distribution(
    ends: Tensor, sources: Tensor, destinations: Tensor, ranks: int
) -> Distribution:
    """How a graph is shared out.

    Args:
        ends: int64 ``[2, E]``, sources and destinations of its edges.
        sources: int64, the rank of each node that edges start from.
        destinations: the same for those that edges lead to.
        ranks: how many there are.
    """
    to = destinations[ends[1]]
    far = sources[ends[0]] != to
    wanted = torch.unique(to[far] * len(sources) + ends[0][far])

    def counted(owner: Tensor) -> list[int]:
        found: list[int] = torch.bincount(owner, minlength=ranks).tolist()
        return found

    return Distribution(
        counted(sources),
        counted(destinations),
        counted(to),
        counted(sources[wanted % max(len(sources), 1)]),
        counted(wanted // max(len(sources), 1)),
        {mesh: largest_block(ends, sources, destinations, mesh) for mesh in meshes(ranks)},
    )


def larger_distribution(known: Mapping[int, Distribution], ranks: int) -> Distribution:
    """How a graph would be shared out over more ranks, if its halos go on as they went.

    All halos together follow a power of the number of ranks, through the two largest numbers of
    which they are known; a halo has no more rows than others hold. What ranks have is as uneven as
    for the largest number.

    Args:
        known: by the number of ranks; two or more.
        ranks: another number.
    """
    first, last = sorted(size for size in known if size > 1)[-2:]
    small, large = known[first], known[last]
    sources, destinations = sum(large.sources), sum(large.destinations)
    unevenness = max(large.edges) * last / max(sum(large.edges), 1)
    edges = math.ceil(unevenness * sum(large.edges) / ranks)
    growth = max(sum(large.receives), 1) / max(sum(small.receives), 1)
    power = math.log(growth) / math.log(last / first) - 1  # of the halo of one rank
    halo = round(max(large.receives) * (ranks / last) ** power)
    halo = min(halo, sources - sources // ranks)
    even = [sources // ranks + (rank < sources % ranks) for rank in range(ranks)]
    aggregating = [destinations // ranks + (rank < destinations % ranks) for rank in range(ranks)]
    of_blocks = max(large.blocks.values()) * last / max(sum(large.edges), 1)
    block = math.ceil(of_blocks * sum(large.edges) / ranks)
    blocks = {mesh: edges if mesh[1] == 1 else block for mesh in meshes(ranks)}
    return Distribution(even, aggregating, [edges] * ranks, [halo] * ranks, [halo] * ranks, blocks)


def _to_json(rows: Distribution) -> dict[str, object]:
    blocks = [[*mesh, edges] for mesh, edges in rows.blocks.items()]
    return {**rows._asdict(), "blocks": blocks}


def _from_json(kept: Json) -> Distribution:
    blocks = {(height, width): edges for height, width, edges in kept["blocks"]}
    return Distribution(**{**kept, "blocks": blocks})
