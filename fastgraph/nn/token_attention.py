"""Attention of tokens to each other, of which no scores are stored."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgraph import ops
from fastgraph.ops.library import is_transformed


def split_heads(x: Tensor, heads: int) -> Tensor:
    """``[M, tokens, heads * channels]`` to ``[M, heads, tokens, channels]``."""
    out: Tensor = x.unflatten(2, (heads, -1)).transpose(1, 2)
    return out


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Attention of heads that stand side by side in the channels.

    On the CPU by ``ops.dense_attention`` in float32 and float64, which is faster on batches of
    tokens (``benchmarks/dense_attention.py``); else by torch's kernels.

    Args:
        q: ``[M, tokens, channels]``, a multiple of ``heads``.
        k: the same.
        v: the same.
        heads: how many.

    Returns:
        ``[M, tokens, channels]``.
    """
    if _has_kernel(q, k, v):
        ptr = torch.arange(len(q) + 1, device=q.device) * q.shape[1]
        by_head = [x.reshape(-1, heads, x.shape[2] // heads) for x in (q, k, v)]
        out, _ = ops.dense_attention(by_head[0], by_head[1], by_head[2], ptr)
        return out.view(q.shape)
    q, k, v = (split_heads(x, heads) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def _has_kernel(*tensors: Tensor) -> bool:
    first = tensors[0]
    if not first.is_cpu or first.dtype not in (torch.float32, torch.float64):
        return False
    return torch.compiler.is_compiling() or not is_transformed(*tensors)
