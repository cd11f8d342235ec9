"""``merge``: one softmax from two over parts of the edges."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Function

from fastgraph.ops.heads import check_heads, is_without_share
from fastgraph.ops.library import Context
from fastgraph.plugins.backend import accumulator


def merge(
    out: Tensor, stats: Tensor, other_out: Tensor, other_stats: Tensor
) -> tuple[Tensor, Tensor]:
    r"""Join what attention gave for two disjoint sets of edges among the same nodes.

    The result is that of attention over all of these edges, to rounding, and so are its gradients:
    :math:`y = (S_1 y_1 + S_2 y_2) / (S_1 + S_2)`, where :math:`S_k` is the sum of the exponentials
    of the scores (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). For
    graphs whose edges are elsewhere, or too many for the memory at a time. It is associative, so
    more than two parts are joined one after another. A part whose scores at a node are all
    -infinity has no share there, unless all parts are so, where the output is NaN as anywhere and
    parts get no gradient.

    Args:
        out: an output of :func:`gat`, :func:`gatv2`, :func:`attention` or :func:`edge_attention`
            without ``addend``, ``[nodes, heads, channels]``.
        stats: what came with it, ``[nodes, heads, 2]``, of float64 for float64 and else of float32.
        other_out: the output for the other edges, like ``out``.
        other_stats: what came with that.

    Returns:
        ``(out, stats)`` for all edges, of the same shapes and dtypes; both are differentiable.

    Raises:
        ValueError: an argument has the wrong shape, dtype or device.
    """
    check_heads("out", out, ("nodes", "heads", "channels"), out)
    check_heads("other_out", other_out, list(out.shape), out)
    wide = out.new_empty(0, dtype=accumulator(out.dtype))
    check_heads("stats", stats, [*out.shape[:2], 2], wide)
    check_heads("other_stats", other_stats, [*out.shape[:2], 2], wide)

    given = torch.stack([stats, other_stats])
    shares, joined = joined_statistics(given)
    own, other = (
        share.unsqueeze(-1) * with_shares(share, of_part, part)
        for share, of_part, part in zip(shares, given, (out, other_out), strict=True)
    )
    return without_shares((own + other).to(out.dtype), joined), joined


def joined_statistics(stats: Tensor) -> tuple[Tensor, Tensor]:
    """The statistics of one softmax from those over disjoint parts of its edges.

    Args:
        stats: ``[parts, nodes, heads, 2]``; the largest scores get no gradient.

    Returns:
        By what the output of each part is to be multiplied, ``[parts, nodes, heads]``, and the
        statistics of all edges, ``[nodes, heads, 2]``. Both are differentiable.
    """
    # The largest scores are constants here, as they are in the gradients of the statistics.
    largest = _largest(stats)
    highest = largest.amax(0)
    origin = torch.where(highest == -torch.inf, 0, highest)  # no part has edges
    sums = _sum_relative_to(origin, stats)
    total = sums.sum(0)
    is_empty = total == 0
    inverse = torch.where(is_empty, 0, 1 / torch.where(is_empty, 1, total))
    is_lost = is_without_share(stats).any(0) & is_empty
    # By numbers: a tensor of both would be copied to a device, for which the host waits.
    lost = origin.masked_fill(is_lost, -torch.inf), inverse.masked_fill(is_lost, torch.inf)
    return sums * inverse, torch.stack(lost, dim=-1)


def with_shares(shares: Tensor, stats: Tensor, parts: Tensor) -> Tensor:
    """The outputs of parts with 0 in place of the NaN of scores that are all -infinity.

    Args:
        shares: of the parts, ``[..., heads]``.
        stats: of the parts, ``[..., heads, 2]``.
        parts: outputs, ``[..., heads, channels]``, or weights ``[..., heads]``.
    """
    is_zero = is_without_share(stats) & (shares.detach() == 0)
    return parts.masked_fill(is_zero if parts.dim() == shares.dim() else is_zero[..., None], 0)


def without_shares(out: Tensor, stats: Tensor) -> Tensor:
    """A joined output, NaN where no part has a share though there are scores.

    Args:
        out: ``[nodes, heads, channels]``.
        stats: the joined statistics, ``[nodes, heads, 2]``.
    """
    return _Lost.apply(out, is_without_share(stats).unsqueeze(-1))  # type: ignore[no-any-return,no-untyped-call]


class _Lost(Function):
    """NaN where a softmax is none; its gradient is NaN, too, but 0 where nobody asks for it."""

    @staticmethod
    def forward(ctx: Context, out: Tensor, is_lost: Tensor) -> Tensor:
        ctx.save_for_backward(is_lost)
        return out.masked_fill(is_lost, torch.nan)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None]:
        (is_lost,) = ctx.saved_tensors
        return grad.masked_fill(is_lost & (grad != 0), torch.nan), None


def _largest(stats: Tensor) -> Tensor:
    """The largest scores, -infinity for nodes without edges."""
    largest, inverse = stats.detach().unbind(-1)
    return torch.where(inverse == 0, -torch.inf, largest)


def _sum_relative_to(origin: Tensor, stats: Tensor) -> Tensor:
    """The sums of ``exp(score - origin)``, 0 for nodes without edges."""
    largest, inverse = stats[..., 0].detach(), stats[..., 1]
    is_empty = inverse == 0
    return torch.where(is_empty, 0, (largest - origin).exp() / torch.where(is_empty, 1, inverse))
