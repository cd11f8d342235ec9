"""From shards of rows to shards of heads, and back: one all-to-all for several small tensors.

A shard of rows has all heads of the rows of this rank, ``[mine, heads, ...]``. A shard of heads has
this rank's heads of all rows, ``[n, heads of this rank, ...]``, in the order of ranks and, of each,
of its local rows: parts are put together as they come. A partition into clusters keeps clusters
together that way.

Each function is differentiable any number of times: the gradient of one is another one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.autograd import Function

from fastgraph.dist.operators.heads.cost import head_ranges
from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.own_device import HOST
from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.tensor.collectives import applied, records_gradient
from fastgraph.dist.tensor.layout import Layout
from fastgraph.dist.tensor.memo import Recent, cached
from fastgraph.ops.library import Context, wanted_gradients
from fastgraph.ops.topology import unflatten

_layouts = Recent()


def layout_of_heads(num_heads: int) -> Layout:
    """Which heads each rank computes: consecutive ones, as many as others have or one more.

    With fewer heads than ranks some have none.
    """

    def make() -> Layout:
        of_ranks = head_ranges(num_heads, WORLD.size)
        mine = torch.tensor(of_ranks[WORLD.rank], dtype=torch.int64, device=HOST)
        return Layout(mine, num_heads, [len(heads) for heads in of_ranks])

    return _layouts.get((num_heads, WORLD.size, WORLD.rank), make)


def to_heads(tensors: Sequence[Tensor], rows: Sequence[Layout], heads: Layout) -> list[Tensor]:
    """Shards of rows as shards of heads.

    Args:
        tensors: ``[mine, heads, ...]`` each, of one dtype.
        rows: the layout of the first dimension of each.
        heads: that of the second one.

    Returns:
        ``[n, heads of this rank, ...]`` each. This rank sends all but what it keeps: the bytes of
        ``tensors`` times the share of heads that others have.
    """
    return list(applied(_ToHeads, rows, heads, *tensors))


def to_rows(tensors: Sequence[Tensor], rows: Sequence[Layout], heads: Layout) -> list[Tensor]:
    """Shards of heads as shards of rows; the transpose of :func:`to_heads`."""
    return list(applied(_ToRows, rows, heads, *tensors))


def everywhere(x: Tensor, rows: Layout) -> Tensor:
    """The rows of all ranks on each of them, ``[n, ...]``, in the order of ranks.

    What has no gradient is sent once, and cached with ``x``. Backward: each rank adds up what
    all have for its rows, unlike a gather, after which all ranks have the same gradient.
    """
    if records_gradient(x):
        return applied(_Everywhere, x, rows)
    make = lambda: transport.all_gather(x, rows.counts)  # noqa: E731
    return cached(x, ("everywhere", rows), make, is_part=True)


Send = Callable[[Sequence[Tensor], Sequence[Layout], Layout], list[Tensor]]


class _OfHeads(Context):
    rows: Sequence[Layout]
    heads: Layout


class _OfLayout(Context):
    rows: Layout


class _ToHeads(Function):
    @staticmethod
    def forward(
        ctx: _OfHeads, rows: Sequence[Layout], heads: Layout, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.rows, ctx.heads = rows, heads
        return tuple(_in_turns(_sent_by_rows, tensors, rows, heads))

    @staticmethod
    def backward(ctx: _OfHeads, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_wanted(ctx, grads, to_rows)


class _ToRows(Function):
    @staticmethod
    def forward(
        ctx: _OfHeads, rows: Sequence[Layout], heads: Layout, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.rows, ctx.heads = rows, heads
        return tuple(_in_turns(_sent_by_heads, tensors, rows, heads))

    @staticmethod
    def backward(ctx: _OfHeads, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_wanted(ctx, grads, to_heads)


class _Everywhere(Function):
    @staticmethod
    def forward(ctx: _OfLayout, x: Tensor, rows: Layout) -> Tensor:
        ctx.rows = rows
        return transport.all_gather(x, rows.counts)

    @staticmethod
    def backward(ctx: _OfLayout, grad: Tensor) -> tuple[Tensor, None]:
        return applied(_SumAtOwners, grad, ctx.rows), None


class _SumAtOwners(Function):
    @staticmethod
    def forward(ctx: _OfLayout, x: Tensor, rows: Layout) -> Tensor:
        ctx.rows = rows
        parts = transport.all_to_all(x, rows.counts, [rows.mine] * WORLD.size)
        return parts.view(WORLD.size, rows.mine, *x.shape[1:]).sum(0)

    @staticmethod
    def backward(ctx: _OfLayout, grad: Tensor) -> tuple[Tensor, None]:
        return applied(_Everywhere, grad, ctx.rows), None


def _wanted(ctx: _OfHeads, grads: Sequence[Tensor], send: Send) -> list[Tensor | None]:
    """The gradients that somebody waits for; all ranks wait for the same ones."""
    wanted = [i for i, needed in enumerate(wanted_gradients(ctx)[2:]) if needed]
    found: list[Tensor | None] = [None] * len(grads)
    sent = send([grads[i] for i in wanted], [ctx.rows[i] for i in wanted], ctx.heads)
    for i, grad in zip(wanted, sent, strict=True):
        found[i] = grad
    return found


def _in_turns(
    send: Callable[..., list[Tensor]],
    tensors: Sequence[Tensor],
    rows: Sequence[Layout],
    heads: Layout,
) -> list[Tensor]:
    """Large tensors one after the other, others together; all ranks come to the same answer."""
    pairs = list(zip(tensors, rows, strict=True))
    sizes = [of.n * heads.n * x.shape[2:].numel() * x.element_size() for x, of in pairs]
    if transport.sends_in_turns(sizes, WORLD.size):
        return [send([x], [of], heads)[0] for x, of in pairs]
    return send(tensors, rows, heads)


def _sent_by_rows(tensors: Sequence[Tensor], rows: Sequence[Layout], heads: Layout) -> list[Tensor]:
    flat = tensors[0].new_empty(sum(x.numel() for x in tensors))
    start = 0
    for own in _slices(heads.counts):
        for x in tensors:
            part = x[:, own]
            flat[start : start + part.numel()].view(part.shape).copy_(part)
            start += part.numel()
    sends = [sum(_per_head(x) * count for x in tensors) for count in heads.counts]
    sizes = [
        [(of.counts[rank], heads.mine, *x.shape[2:]) for x, of in zip(tensors, rows, strict=True)]
        for rank in range(WORLD.size)
    ]
    received = transport.all_to_all(flat, sends, [_numel(of_rank) for of_rank in sizes])
    if len(tensors) == 1:  # which has come as it must be
        return [unflatten(received, rows[0].n, heads.mine, *tensors[0].shape[2:])]
    return [torch.cat(parts) for parts in _unpacked(received, sizes)]


def _sent_by_heads(
    tensors: Sequence[Tensor], rows: Sequence[Layout], heads: Layout
) -> list[Tensor]:
    if len(tensors) == 1:  # which is as it must be sent
        flat = tensors[0].reshape(-1)
    else:
        cuts = [_slices(of.counts) for of in rows]
        flat = torch.cat(
            [
                x[cut[rank]].reshape(-1)
                for rank in range(WORLD.size)
                for x, cut in zip(tensors, cuts, strict=True)
            ]
        )
    sends = [
        sum(x.shape[1:].numel() * of.counts[rank] for x, of in zip(tensors, rows, strict=True))
        for rank in range(WORLD.size)
    ]
    sizes = [
        [(of.mine, count, *x.shape[2:]) for x, of in zip(tensors, rows, strict=True)]
        for count in heads.counts
    ]
    received = transport.all_to_all(flat, sends, [_numel(of_rank) for of_rank in sizes])
    return [torch.cat(parts, 1) for parts in _unpacked(received, sizes)]


def _per_head(x: Tensor) -> int:
    return len(x) * x.shape[2:].numel()


def _numel(sizes: Sequence[Sequence[int]]) -> int:
    return sum(math.prod(size) for size in sizes)


def _slices(counts: Sequence[int]) -> list[slice]:
    return [slice(start, stop) for start, stop in pairwise(accumulate(counts, initial=0))]


def _unpacked(
    received: Tensor, sizes: Sequence[Sequence[tuple[int, ...]]]
) -> list[tuple[Tensor, ...]]:
    """The values received from the ranks for each tensor, given its shapes by rank and tensor."""
    parts = iter(received.split([math.prod(size) for of_rank in sizes for size in of_rank]))
    of_ranks = [[next(parts).view(size) for size in of_rank] for of_rank in sizes]
    return list(zip(*of_ranks, strict=True))
