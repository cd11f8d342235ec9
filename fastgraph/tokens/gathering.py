"""InputTokens of LargeGT: what a mini-batch is made of."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from fastgraph.machine import native
from fastgraph.machine.memory import new_rows
from fastgraph.sampling.native_calls import check_tensors
from fastgraph.tokens.row_cache import RowCache


class Gathered(NamedTuple):
    """Tokens, and how many of their rows came from a cache."""

    tokens: Tensor
    hits: int


def gather_tokens(
    table: Tensor, nodes: Tensor, cache: RowCache | None = None, *, is_elsewhere: bool = False
) -> Gathered:
    """The input tokens of a mini-batch (Dwivedi et al., arXiv 2312.11109, algorithm 2).

    For each local node its own features, and then its context of one hop and more: the order of
    lines 4 to 6. In a worker of a ``DataLoader`` they are in shared memory, as those of torch's
    own ``collate`` are.

    Args:
        table: the features, ``[nodes, hops + 1, channels]``, contiguous, of any dtype, which may be
            mapped. See :class:`HopFeatures`.
        nodes: local nodes, int32 ``[batch, k]``, each row with its node first.
        cache: of the table.
        is_elsewhere: whether most of the table is in a file and not in memory: then all rows are
            asked for before the first is waited for.

    Returns:
        Tokens ``[batch, (hops + 1) * k, channels]``.

    Raises:
        TypeError: an argument has another dtype, or is no tensor.
        ValueError: a shape does not fit.
        IndexError: ``nodes`` names none of the table.
    """
    check_tensors(table=table, nodes=nodes)
    if table.dim() != 3 or nodes.dim() != 2:
        raise ValueError(
            "table and nodes must have shapes [nodes, hops + 1, channels] and [batch, k], got "
            f"{list(table.shape)} and {list(nodes.shape)}"
        )
    batch, k = nodes.shape
    _, parts, channels = table.shape
    out = _new_tokens(table, (batch, parts * k, channels))
    flat = batch * k, parts * channels
    held: tuple[Tensor | None, ...] = (None, None, None)
    if cache is not None:
        held = cache.bits, cache.before, cache.rows.flatten(1)
    hits = native.library().gather_tokens(
        table.flatten(1), is_elsewhere, *held, nodes.contiguous().flatten(), out.view(flat)
    )
    return Gathered(out, hits)


def _new_tokens(table: Tensor, shape: tuple[int, int, int]) -> Tensor:
    if get_worker_info() is None:
        return new_rows(table, shape)
    num_bytes = shape[0] * shape[1] * shape[2] * table.element_size()
    storage = torch.UntypedStorage._new_shared(num_bytes)
    out = table.new_empty(0)
    out.set_(storage, 0, torch.Size(shape))  # type: ignore[call-overload]  # not in the stubs
    return out
