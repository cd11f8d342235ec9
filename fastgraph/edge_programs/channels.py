"""Channels along one dimension of a value, whose numbers stand behind each other in a program."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastgraph.edge_programs.broadcasting import Channels
from fastgraph.edge_programs.calls import Call, aten
from fastgraph.edge_programs.recorded import Refused


@dataclass(frozen=True)
class Part:
    """Some channels along a dimension.

    Attributes:
        dim: the dimension, that of edges not counted.
        start: the first of them.
        count: how many there are.
        is_dropped: true if the dimension is left out, as there is one of them.
    """

    dim: int
    start: int
    count: int
    is_dropped: bool

    @classmethod
    def of(cls, call: Call, own: Channels) -> Part:
        """The part that ``select`` or ``slice`` takes of a value of edges.

        Raises:
            Refused: it takes some edges, or channels that are no neighbours.
        """
        given = call.given
        dim = given["dim"] % (len(own) + 1) - 1
        if dim < 0:
            raise Refused(f"it works across edges ({call.func})")
        if call.operation is aten.select:
            return cls(dim, given["index"] % own[dim], 1, is_dropped=True)
        start, stop, step = slice(given["start"], given["end"], given["step"]).indices(own[dim])
        if step != 1:
            raise Refused("it takes channels that are no neighbours")
        return cls(dim, start, stop - start, is_dropped=False)

    def channels(self, own: Channels) -> Channels:
        """The shape of the part of a value."""
        count = () if self.is_dropped else (self.count,)
        return (*own[: self.dim], *count, *own[self.dim + 1 :])

    def step(self, tensor: object) -> tuple[Any, tuple[Any, ...]]:
        """The operator and its arguments that take it of a tensor of nodes or edges."""
        if self.is_dropped:
            return aten.select.int, (tensor, self.dim + 1, self.start)
        stop = self.start + self.count
        return aten.slice.Tensor, (tensor, self.dim + 1, self.start, stop)

    def place(self, own: Channels) -> tuple[int, int, int]:
        """The numbers that it has, the heads of which it has some channels, and the first one."""
        heads, inner = math.prod(own[: self.dim]), math.prod(own[self.dim + 1 :])
        return heads * self.count * inner, heads, self.start * inner


def dims_of(call: Call) -> Sequence[int] | None:
    """The dimensions along which an operator works; ``None`` for one that has none."""
    given = call.given
    if "normalized_shape" in given:
        return range(-len(given["normalized_shape"]), 0)
    if "dim" not in given:
        return None
    dim = given["dim"]
    return (dim,) if isinstance(dim, int) else tuple(dim or ())


def channel_dims(own: Channels, dims: Sequence[int]) -> set[int]:
    """Dimensions of channels, the first of which is 0.

    Args:
        own: the shape of a value of edges.
        dims: as torch counts them, that of edges, too.

    Raises:
        Refused: one of them, or none, is that of edges.
    """
    found = {dim % (len(own) + 1) - 1 for dim in dims}
    if not found or -1 in found or len(dims) > len(own):
        raise Refused("it works across edges")
    return found


def heads_of(own: Channels, dims: Sequence[int]) -> int:
    """The number of heads along all channels of which something is reduced.

    Args:
        own: the shape of a value.
        dims: as torch counts them for a tensor of edges.

    Raises:
        Refused: dimensions of edges are reduced, or others than the last ones.
    """
    reduced = channel_dims(own, dims)
    is_reduced = [k in reduced for k, size in enumerate(own) if size > 1]
    if is_reduced != sorted(is_reduced):
        raise Refused("it reduces heads between other dimensions")
    return math.prod(size for k, size in enumerate(own) if k not in reduced)
