"""Rows that are read often, in memory: a sample of local nodes says how often each will be."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

_BLOCK = 1 << 22
"""How many values are looked at together."""
_MOST_COUNT = 1 << 16
"""Rows that are read more often than this are ranked alike."""


class LocalNodes(Protocol):
    """Rows of local nodes, as a :class:`TokenStore` has them.

    Attributes:
        num_nodes: of the graph.
        k: how many nodes a row has.
        nodes: those that have rows, int64, ascending; ``None``: all.
    """

    num_nodes: int
    k: int
    nodes: Tensor | None

    def lookup(self, nodes: Tensor) -> Tensor:
        """The rows of some nodes, int32 ``[len(nodes), k]``."""


class RowCache(NamedTuple):
    """Copies of some rows of a table.

    Attributes:
        bits: int64 ``[ceil(rows of the table / 64)]``, one bit for each row, the lowest first.
        before: int32, how many rows are held before those of each word of bits.
        rows: ``[held, ...]``, in ascending order.
    """

    bits: Tensor
    before: Tensor
    rows: Tensor

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.nbytes for tensor in self)


def count_reads(local: LocalNodes, nodes: Tensor) -> Tensor:
    """How often an epoch over some nodes reads the row of each node, int32 ``[num_nodes]``.

    Raises:
        IndexError: a local node is not in the graph.
    """
    counts = torch.zeros(local.num_nodes, dtype=torch.int32)
    one = torch.ones((), dtype=torch.int32)
    for part in nodes.split(max(1, _BLOCK // local.k)):
        read = local.lookup(part).reshape(-1).long()
        low, high = map(int, read.aminmax())
        if low < 0 or high >= local.num_nodes:
            wrong = low if low < 0 else high
            raise IndexError(f"local nodes hold {wrong}, expected 0 <= node < {local.num_nodes}")
        counts.scatter_add_(0, read, one.expand(len(read)))
    return counts


def most_read(table: Tensor, counts: Tensor, budget: int) -> RowCache | None:
    """The rows that are read most often, as many as a number of bytes allows.

    Of rows that are read as often, the first are taken; those that are never read are not.

    Args:
        table: ``[rows, ...]``, contiguous, which may be mapped.
        counts: int32 ``[rows]``, see :func:`count_reads`.
        budget: bytes of all tensors of the cache.

    Returns:
        ``None`` if not one row fits, or rows have no channels.
    """
    words = -(-len(counts) // 64)
    row_bytes = table[0].numel() * table.element_size()
    if row_bytes == 0:
        return None
    most = min((budget - 12 * words) // row_bytes, int((counts > 0).sum()))
    if most < 1:
        return None
    ranks = counts.clamp(max=_MOST_COUNT)
    numbers = torch.bincount(ranks, minlength=_MOST_COUNT + 1)
    at_least = numbers.flip(0).cumsum(0).flip(0)  # rows that are read so often or more
    least = int((at_least >= most).nonzero()[-1])
    chosen = ranks > least
    rest = (ranks == least).nonzero().squeeze(1)[: most - int(chosen.sum())]
    chosen[rest] = True
    kept = chosen.nonzero().squeeze(1)
    rows = table.new_empty((len(kept), *table.shape[1:]))
    for begin in range(0, len(kept), max(1, _BLOCK // row_bytes)):
        part = kept[begin : begin + max(1, _BLOCK // row_bytes)]
        rows[begin : begin + len(part)] = table[part]
    padded = torch.zeros(64 * words, dtype=torch.bool)
    padded[: len(chosen)] = chosen
    per_word = padded.view(words, 64)
    bits = torch.zeros(words, dtype=torch.int64)
    for bit in range(64):
        bits |= per_word[:, bit].long() << bit
    before = torch.zeros(words, dtype=torch.int32)
    torch.cumsum(per_word.sum(1)[:-1], 0, out=before[1:])
    return RowCache(bits, before, rows)
