"""Attention of few rows, such as global tokens, to many, which may be on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Entries(NamedTuple):
    """Whom rows attend to, row by row, in plain tensors.

    Attributes:
        sources: rows of keys, int64 ``[entries]``.
        ptr: offsets of rows, int64 ``[rows + 1]``; the first may be above 0.
        types: of entries, with a table of biases.
        first: the number of the first entry, for dropout.
    """

    sources: Tensor
    ptr: Tensor
    types: Tensor | None
    first: int


ELSEWHERE: dict[type, Callable[..., Tensor | None]] = {}
"""By subclasses of tensors, what takes the place of :func:`fastgraph.ops.attention` for these.

A function takes queries ``[rows, heads, channels]``, keys and values, :class:`Entries`, a table of
biases or none, the rate of dropout and its seed, and gives the output; ``None`` where it would not
be less than the operator."""
