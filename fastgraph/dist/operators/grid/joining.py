"""Results of the nodes of a row of the grid, joined from those of its blocks.

Sums are added, means weighed by degrees, of extrema the most extreme is taken, and softmaxes are
joined by their statistics. Parts are ``[blocks, mine, ...]``, as :meth:`Block.parts` gives them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from fastgraph.backends.reference import num_shares
from fastgraph.dist.operators.grid.graph import Block
from fastgraph.dist.tensor.collectives import applied
from fastgraph.ops.library import Context
from fastgraph.ops.merge import joined_statistics
from fastgraph.plugins.backend import accumulator


def sums(parts: Tensor) -> Tensor:
    """The sums of all blocks."""
    return parts[0] if len(parts) == 1 else parts.sum(0)


def means(block: Block, parts: Tensor) -> Tensor:
    """Those over the edges of all blocks, given those of each; no sum may overflow meanwhile."""
    wide = accumulator(parts.dtype)
    shares = block.degrees.to(wide) / block.degrees.sum(0).clamp(min=1)
    return sums(parts * _beside(shares, parts).to(parts.dtype))


def extremum(
    block: Block, parts: Tensor, records: Tensor, reduce: str, ties: str = "split"
) -> tuple[Tensor, Tensor]:
    """The extremum, with its gradient, and the record of ties.

    Args:
        block: of this rank.
        parts: extrema.
        records: for ``"split"`` how many edges attain each, for ``"winner"`` the number of the edge
            that does among those of all ranks, -1 for none.
        reduce: ``"max"`` or ``"min"``.
        ties: as in :func:`fastgraph.ops.segment_reduce`.
    """
    function = _Winner if ties == "winner" else _Split
    found: tuple[Tensor, Tensor] = applied(function, block, parts, records, reduce)
    return found


def most_extreme(block: Block, parts: Tensor, reduce: str) -> Tensor:
    """Of the parts with edges; 0 where none has any."""
    has_edges = _has_edges(block, parts)
    start, function = (-torch.inf, torch.amax) if reduce == "max" else (torch.inf, torch.amin)
    found = function(parts.masked_fill(~has_edges, start), 0)
    return found.masked_fill(~has_edges.any(0), 0)


class Softmax(NamedTuple):
    """One softmax of those of blocks.

    Attributes:
        shares: of the weights of each block, ``[blocks, mine, heads]``.
        largest, inverse: its statistics, ``[mine, heads]`` each: the largest score, and 1 over the
            sum of exponentials relative to it.
    """

    shares: Tensor
    largest: Tensor
    inverse: Tensor


def softmax(block: Block, largest: Tensor, inverse: Tensor) -> Softmax:
    """The softmax over the edges of all blocks, given the statistics of each.

    A block whose scores are all minus infinity has that for the largest one, and any finite inverse
    that is not 0: it has no share unless all blocks are so, where the softmax is NaN as anywhere.

    Args:
        block: of this rank.
        largest: ``[blocks, mine, heads]``, without a gradient.
        inverse: likewise, 0 for rows without edges.
    """
    wide = accumulator(inverse.dtype)
    given = torch.stack([largest.detach().to(wide), inverse.to(wide)], -1)
    shares, joined = joined_statistics(given)
    largest, inverse = joined.unbind(-1)
    is_lost = (inverse == 0) & (block.degrees.sum(0) > 0).unsqueeze(-1)
    return Softmax(shares.masked_fill(is_lost, torch.nan), largest.detach(), inverse)


def _beside(of_nodes: Tensor, parts: Tensor) -> Tensor:
    """``[blocks, mine, 1, ...]``, as parts have dimensions."""
    return of_nodes.view(*of_nodes.shape, *[1] * (parts.dim() - 2))


def _has_edges(block: Block, parts: Tensor) -> Tensor:
    """True where edges of a block lead to a node."""
    return _beside(block.degrees > 0, parts)


class _OfShares(Context):
    pass


class _Split(Function):
    """Of the parts of a row, with the number of edges by which its gradient is divided.

    A part divides its gradient by the number that it recorded. So it gets that of the result times
    its share: the number of its edges that attain the extremum of all, over that of all parts.
    """

    @staticmethod
    def forward(
        ctx: _OfShares, block: Block, parts: Tensor, records: Tensor, reduce: str
    ) -> tuple[Tensor, Tensor]:
        out = most_extreme(block, parts, reduce)
        attains = (parts == out) & _has_edges(block, parts)
        recorded = num_shares(records) * attains
        # Each part counts the zeros that upstream's output starts from; they are there once.
        is_zero = (out == 0) & _has_edges(block, parts).any(0)
        ties = recorded.sum(0) - (attains.sum(0) - 1).clamp(min=0) * is_zero
        share = recorded.to(accumulator(out.dtype)) / ties.clamp(min=1)
        # A NaN equals nothing, so that upstream divides by 0: all of its neighbours get NaN.
        share.masked_fill_(out.isnan(), torch.nan)
        ctx.save_for_backward(share.to(out.dtype))
        record = ties.to(torch.int32)
        ctx.mark_non_differentiable(record)
        return out, record

    @staticmethod
    def backward(ctx: _OfShares, grad: Tensor, _: Tensor | None) -> tuple[None, Tensor, None, None]:
        (share,) = ctx.saved_tensors
        return None, grad * share, None, None


class _Winner(Function):
    """Of the parts of a row, with the number of the edge that alone has its gradient.

    It is the first that attains the extremum, the last of several NaNs; -1 for none.
    """

    @staticmethod
    def forward(
        ctx: _OfShares, block: Block, parts: Tensor, numbers: Tensor, reduce: str
    ) -> tuple[Tensor, Tensor]:
        out = most_extreme(block, parts, reduce)
        is_nan = parts.isnan()
        may_win = (numbers >= 0) & ((parts == out) | is_nan)
        # Where one part is NaN all others lose, as the extremum is NaN.
        last = numbers.masked_fill(~may_win, -1).amax(0)
        beyond = torch.iinfo(numbers.dtype).max
        first = numbers.masked_fill(~may_win, beyond).amin(0)
        winner = torch.where(out.isnan() | (last < 0), last, first)
        ctx.save_for_backward(may_win & (numbers == winner))
        ctx.mark_non_differentiable(winner)
        return out, winner

    @staticmethod
    def backward(ctx: _OfShares, grad: Tensor, _: Tensor | None) -> tuple[None, Tensor, None, None]:
        (wins,) = ctx.saved_tensors
        return None, torch.where(wins, grad, 0), None, None
