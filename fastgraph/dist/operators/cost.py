"""A model of the time of a layer's step in each mode, from numbers of rows alone: nothing is run.

The one model behind ``mode="auto"``, which asks it with the partition that ranks have, and
``python -m fastgraph dist-plan``, which asks it beforehand. A step is the work of the slowest rank,
the latency of the messages that it waits for, and its bytes over the bandwidth of a rank. What
overlaps is not in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastgraph.dist.ranks.mesh import Mesh
from fastgraph.edge_programs.operations import OUTER
from fastgraph.edge_programs.program import Program
from fastgraph.plugins.backend import accumulator
from fastgraph.registry.operators import Size

BACKWARD = 2.0
"""Work of a backward pass, in forward passes: it computes attention again, twice.

So do linear layers, for what they are given and for their weights.
"""

_BACKWARD_OF_SUMS = 1.0
"""The same sum, the other way."""

TOPOLOGY = 16
"""Bytes that a rank keeps for an edge: its other end and its number, by either end."""

_MEMORY_SHARE = 1 / 32
"""Of a rank's memory, that a layer may hold beyond what it holds by halo.

Whoever shards a graph may do so for want of memory, and what layers hold stays until the backward
pass. Of ten layers that is less than a third.
"""

LEAST_BYTES, LEAST_WORK = 2**16, 2**16
"""Bytes that a rank sends in a step by halo, and edges times channels that it computes beyond the
mean of all: with less of both no other mode is asked for.

At 1 GB/s and 1 ns either takes 65 us, about as long as a message from one process to another, and
any other mode takes messages, too. What is left to gain is that these may be fewer.
"""

_FEW_RANKS = 8
"""By halo a rank waits for all others in an exchange; on more than these a grid saves much of it.
"""


class Cluster(NamedTuple):
    """The speed and memory of a rank and its link; the slowest of all ranks.

    Attributes:
        latency: seconds of a message of next to nothing; a collective waits for one from each of
            the others.
        bandwidth: bytes that a rank sends in a second.
        work: seconds of a forward pass of attention for an edge and a channel of a head.
        sums: the same of a sum over neighbourhoods.
        memory: bytes that a rank may use.
        paces: what each rank takes for its work, of what the slowest takes for as much; empty: all
            ranks take as long.
    """

    latency: float
    bandwidth: float
    work: float
    sums: float
    memory: float = math.inf
    paces: tuple[float, ...] = ()

    def slowest(self, work: Sequence[float]) -> float:
        """The work of the rank that takes longest for its own, as the slowest would have it."""
        paces = self.paces or [1.0] * len(work)
        return max(own * pace for own, pace in zip(work, paces, strict=True))


class RowOperand(NamedTuple):
    """A tensor with a row for each node or edge, which an operator takes.

    Attributes:
        place: ``"sources"``, ``"destinations"`` or ``"edges"``.
        has_heads: whether heads have a part of each row of their own.
        row: bytes of a row.
        wants_gradient: whether it does.
        tensor: operands of one number are one tensor.
    """

    place: str
    has_heads: bool
    row: int
    wants_gradient: bool
    tensor: int


class Layer(NamedTuple):
    """One call of a fused operator.

    Attributes:
        operands: those of nodes and edges.
        heads: of attention; 1 where there are none.
        channels: of the output, of one head.
        out: bytes of a row of the output.
        made: operands that the operator computes from rows of nodes, as scores.
        statistics: bytes of the statistics of a row that have a gradient.
        record: bytes of what else is known of a row: the edges that attain an extremum, or the
            largest score.
        learns: whether a gradient goes back through the output.
        is_sum: whether it is one, or an extremum, and no attention.
        work: seconds for an edge and a channel, if they were measured for this layer.
    """

    operands: tuple[RowOperand, ...]
    heads: int
    channels: int
    out: int
    made: tuple[RowOperand, ...] = ()
    statistics: int = 0
    record: int = 0
    learns: bool = False
    is_sum: bool = False
    work: float | None = None

    def seconds(self, cost: Cost, cluster: Cluster) -> float:
        """The seconds of a step of the layer, by its cost in a mode."""
        exchange = cost.messages * cluster.latency + cost.sent / cluster.bandwidth
        usual, backward = cluster.work, BACKWARD
        if self.is_sum:
            usual, backward = cluster.sums, _BACKWARD_OF_SUMS
        return exchange + (1 + backward) * cost.work * (usual if self.work is None else self.work)


class Distribution(NamedTuple):
    """How the graph of a layer is shared out; lists are by rank.

    Attributes:
        sources, destinations: how many rows of nodes each rank holds.
        edges: how many edges lead to its nodes.
        sends, receives: how many rows it gives others and gets from them as their and its halo.
        blocks: by the mesh of a grid, the edges of the largest block.
    """

    sources: list[int]
    destinations: list[int]
    edges: list[int]
    sends: list[int]
    receives: list[int]
    blocks: Mapping[Mesh, int]

    @property
    def busiest(self) -> int:
        """The largest number of rows that a rank sends and receives."""
        return max(map(sum, zip(self.sends, self.receives, strict=True)))

    @property
    def excess(self) -> int:
        """The edges of the rank with most of them, less the mean of all ranks."""
        return max(self.edges) - sum(self.edges) // len(self.edges)


class Cost(NamedTuple):
    """The cost of a step of one layer in one mode, on the slowest rank.

    Attributes:
        collectives: how many it waits for.
        messages: how many of other ranks it waits for in them.
        sent: bytes.
        work: edges times channels of the heads that are computed.
        memory: bytes that a rank holds for it besides its own rows.
        mesh: of the grid, if it is one.
    """

    collectives: int
    messages: int
    sent: float
    work: float
    memory: float = 0.0
    mesh: Mesh | None = None


def is_small(layer: Layer, ranks: int, busiest: int, excess: int) -> bool:
    """True if no mode can be faster than by halo by more than some messages.

    Args:
        layer: which.
        ranks: how many there are.
        busiest: see :class:`Distribution`.
        excess: likewise.
    """
    if ranks > _FEW_RANKS:
        return False
    row = sum(operand.row for operand in layer.operands if operand.place == "sources")
    work = excess * layer.heads * layer.channels
    return row * busiest < LEAST_BYTES and work < LEAST_WORK


_AS_FAST = 1.05
"""Modes are ordered by what they do besides what is modelled: in near-ties, earlier ones won."""


def allowance(cluster: Cluster) -> float:
    """Bytes that a layer may hold on a rank beyond what it holds by halo."""
    return _MEMORY_SHARE * cluster.memory


def chosen(layer: Layer, modes: Mapping[str, Cost], cluster: Cluster) -> str:
    """The name of the fastest mode of a layer for which there is memory.

    Args:
        layer: which.
        modes: that it has, by name, with ``"halo"``.
        cluster: what it runs on.
    """
    highest = modes["halo"].memory + allowance(cluster)
    fits = {name: mode for name, mode in modes.items() if mode.memory <= highest}
    return fastest({name: layer.seconds(mode, cluster) for name, mode in fits.items()})


def fastest(seconds: Mapping[str, float]) -> str:
    """The name of the mode that takes least; the first of those that take next to as much."""
    limit = _AS_FAST * min(seconds.values())
    return next(name for name, taken in seconds.items() if taken <= limit)


def attention_layer(
    shapes: Sequence[Sequence[Size]],
    inputs: Sequence[Tensor | None],
    num_heads: int,
    made: Sequence[Sequence[Size]] = (),
) -> Layer:
    """A call of fused attention, of whose operands nothing but shapes and dtypes is looked at.

    Args:
        shapes: of the operands of its operator.
        inputs: the operands.
        num_heads: how many heads there are.
        made: the shapes of what the operator computes first of each node, ``[nodes, heads]``.
    """
    present = [(x, shape) for x, shape in zip(inputs, shapes, strict=True) if x is not None]
    numbers: dict[int, int] = {}
    operands = tuple(
        RowOperand(
            str(shape[0]),
            "heads" in shape,
            x.shape[1:].numel() * x.element_size(),
            x.requires_grad,
            numbers.setdefault(id(x), len(numbers)),
        )
        for x, shape in present
        if shape[0] in ("sources", "destinations", "edges")
    )
    # Attention also adds up features of edges, beside the values: its output is that much wider.
    wide = max((x.shape[1:] for x, shape in present if len(shape) == 3 and _is_of_nodes(shape)))
    like = present[0][0]
    item = like.element_size()
    statistic = wide[0] * accumulator(like.dtype).itemsize
    learns = any(x.requires_grad for x, _ in present)
    of_nodes = any(x.requires_grad for x, shape in present if shape[0] != "edges")
    scores = tuple(
        RowOperand(str(shape[0]), True, wide[0] * item, of_nodes, len(numbers) + i)
        for i, shape in enumerate(made)
    )
    # The largest score of a node is a constant to gradients, the sum of exponentials is not.
    return Layer(
        operands, num_heads, wide[-1], wide.numel() * item, scores, statistic, statistic, learns
    )


def _is_of_nodes(shape: Sequence[Size]) -> bool:
    return shape[0] in ("sources", "destinations")


def sum_layer(x: Tensor, *, is_extremum: bool = False) -> Layer:
    """A sum, mean, maximum or minimum over neighbourhoods of ``x``, ``[nodes, *channels]``.

    An extremum says how many edges attain it if a gradient is wanted.
    """
    channels = math.prod(x.shape[1:])
    row = channels * x.element_size()
    record = channels * torch.int32.itemsize if is_extremum and x.requires_grad else 0
    operands = (RowOperand("sources", False, row, x.requires_grad, 0),)
    return Layer(operands, 1, channels, row, record=record, learns=x.requires_grad, is_sum=True)


def program_layer(program: Program, operands: Sequence[Tensor]) -> Layer:
    """A call of an edge program, with the records of its extrema and softmaxes.

    Args:
        program: as the operator gets it.
        operands: in the program's order, of one dtype.
    """
    places = {"row": "destinations", "gathered": "sources", "edge": "edges"}
    item = operands[0].element_size()
    given = tuple(
        RowOperand(places[operand.place], False, operand.width * item, x.requires_grad, i)
        for i, (operand, x) in enumerate(zip(program.operands, operands, strict=True))
        if operand.place in places
    )
    of_rows = [output for output in program.outputs if output.reduction not in _NOT_OF_ROWS]
    widths = [program.width(output.value) for output in of_rows]
    learned = [width for output, width in zip(of_rows, widths, strict=True) if output.has_gradient]
    others = [
        width * (torch.int32.itemsize if output.is_record else item)
        for output, width in zip(of_rows, widths, strict=True)
        if not output.has_gradient
    ]
    return Layer(
        given,
        1,
        max(map(program.width, range(program.num_values))),
        item * sum(learned),
        record=sum(others),
        learns=any(x.requires_grad for x in operands),
        is_sum=True,
    )


_NOT_OF_ROWS = ("edge", "total", OUTER)


def extrapolated_cluster(known: Mapping[int, Cluster], ranks: int) -> Cluster:
    """The cluster to expect with another number of ranks, from those known with two or more.

    Seconds of a message, of a byte and of work are taken for linear in the number of ranks: they do
    not change where each rank has its own cores and link, and grow in proportion where all share
    them. What more ranks did faster, as one connection alone does not fill a link, others will do
    as fast as the largest number did. Each has as much memory as with the number that leaves least,
    and all have one pace.

    Args:
        known: by the number of ranks.
        ranks: another one.

    Raises:
        ValueError: there are fewer than two.
    """
    if len(known) < 2:
        raise ValueError(f"known must have two numbers of ranks or more, got {sorted(known)}")
    seconds = {size: (of.latency, 1 / of.bandwidth, of.work, of.sums) for size, of in known.items()}
    largest = seconds[max(seconds)]
    latency, byte, work, sums = (
        max(line({size: of_one[i] for size, of_one in seconds.items()}, ranks), largest[i])
        for i in range(4)
    )
    return Cluster(latency, 1 / byte, work, sums, min(of.memory for of in known.values()))


def line(values: Mapping[int, float], at: int) -> float:
    """A least-squares line through values, which does not fall below half the least of them."""
    mean, centre = sum(values.values()) / len(values), sum(values) / len(values)
    spread = sum((x - centre) ** 2 for x in values)
    slope = sum((x - centre) * (y - mean) for x, y in values.items()) / spread
    return max(mean + slope * (at - centre), min(values.values()) / 2)
