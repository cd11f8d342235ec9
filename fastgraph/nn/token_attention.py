"""Attention of tokens to each other, by torch's kernels, which store no scores."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def split_heads(x: Tensor, heads: int) -> Tensor:
    """``[M, tokens, heads * channels]`` to ``[M, heads, tokens, channels]``."""
    out: Tensor = x.unflatten(2, (heads, -1)).transpose(1, 2)
    return out


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Attention of heads that stand side by side in the channels.

    Args:
        q: ``[M, tokens, channels]``, a multiple of ``heads``.
        k: ``[M, others, channels]``.
        v: the same.
        heads: how many.

    Returns:
        ``[M, tokens, channels]``.
    """
    q, k, v = (split_heads(x, heads) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
