"""The ways in which a value of a few channels is one of more, as torch broadcasts it.

Channels of several dimensions stand behind each other in programs: those of the last one first. So
a number that is repeated along last dimensions is one for consecutive channels, and what is
repeated along first ones is repeated as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from fastgraph.edge_programs.builder import Value
from fastgraph.edge_programs.calls import Call

Channels = tuple[int, ...]


def is_consecutive(own: Channels, channels: Channels) -> bool:
    """True if each number is repeated for consecutive channels of another shape, or for one."""
    same = [a == b for a, b in zip(own, channels, strict=True)]
    return all(same) or all(size == 1 for size in own[same.index(False) :])


def is_tiled(own: Channels, channels: Channels) -> bool:
    """True if all numbers together are repeated, or are there once."""
    same = [a == b for a, b in zip(own, channels, strict=True)]
    count = len(same) if all(same) else len(same) - same[::-1].index(False)
    return all(size == 1 for size in own[:count])


def broadcast(value: Value, own: Channels, channels: Channels) -> Value | None:
    """A value with a number for each of consecutive channels, or ``None`` where that is no one.

    Args:
        value: of the shape ``own``.
        own: as many dimensions as ``channels``, of which some are 1.
        channels: the shape that it is to have.
    """
    if is_consecutive(own, channels):
        return value
    if is_tiled(own, channels):
        return value.builder.tile(value, math.prod(channels))
    return None


def summed(value: Value, own: Channels, dims: Iterable[int]) -> Value | None:
    """The sum over some dimensions, or ``None`` where they are neither the last nor the first ones.

    Args:
        value: of the shape ``own``.
        own: its dimensions.
        dims: those that are summed, from 0 on.
    """
    is_summed = [k in set(dims) for k, size in enumerate(own) if size > 1]
    width = math.prod(size for k, size in enumerate(own) if k not in set(dims))
    if is_summed == sorted(is_summed):
        return value.builder.fold(value, width)
    if is_summed == sorted(is_summed, reverse=True):
        return value.builder.sum_tiles(value, width)
    return None


def kept_channels(call: Call, own: Channels) -> Channels:
    """The channels of values of edges that a sum keeps, and 1 for those that it sums over."""
    dims = {dim % (len(own) + 1) - 1 for dim in call.given["dim"] or range(len(own) + 1)}
    return tuple(1 if k in dims else size for k, size in enumerate(own))
