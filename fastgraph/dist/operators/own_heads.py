"""torch's attention of the heads that a rank has, differentiable as often on all ranks.

torch's fused kernels have no second derivative, and which kernel it takes depends on shapes; a rank
that has no head needs none. So a gradient that is differentiated again is that of the formula, by
torch's operations, on all ranks: they go on together, and nobody waits for one that has failed.
"""

from __future__ import annotations

import weakref

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from fastgraph.dist.tensor.collectives import applied, records_gradient
from fastgraph.ops.library import Context, needs_torch_operations


class _OfKernel(Context):
    inputs: tuple[Tensor, Tensor, Tensor]
    out: Tensor  # by torch's kernel, with a graph whose tensors this function saves
    unpacked: tuple[Tensor, ...]  # those, while its backward pass runs
    mask: Tensor | None
    scale: float


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: _OfKernel,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scale: float,
    ) -> Tensor:
        ctx.mask, ctx.scale = mask, scale
        kept: list[Tensor] = []
        node = weakref.ref(ctx)

        def keep(x: Tensor) -> int:
            kept.append(x.detach())
            return len(kept) - 1

        def kept_one(number: int) -> Tensor:
            of_node = node()
            assert of_node is not None  # its backward pass is running
            return of_node.unpacked[number]

        with torch.enable_grad(), saved_tensors_hooks(keep, kept_one):
            first, second, third = (x.detach().requires_grad_() for x in (query, key, value))
            ctx.inputs = first, second, third
            ctx.out = _by_kernel(*ctx.inputs, mask, scale)
        ctx.save_for_backward(query, key, value, *kept)
        return ctx.out.detach()

    @staticmethod
    def backward(ctx: _OfKernel, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *kept = ctx.saved_tensors  # at once, as checkpoints give them once
        found: tuple[Tensor, ...]
        if needs_torch_operations(grad):
            found = _by_formula(query, key, value, ctx.mask, ctx.scale, grad.to(query.dtype))
        elif query.numel():
            ctx.unpacked = tuple(kept)
            found = torch.autograd.grad(ctx.out, ctx.inputs, grad, retain_graph=True)
            ctx.unpacked = ()
        else:
            found = tuple(map(torch.zeros_like, (query, key, value)))
        return *found, None, None


def _by_kernel(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    if query.numel():
        return F.scaled_dot_product_attention(query, key, value, mask, scale=scale)
    return query @ key.transpose(-2, -1) @ value  # nothing, in the dtype of autocast


def _by_formula(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values."""
    scores = scale * query @ key.transpose(-2, -1)
    weights = (scores if mask is None else scores + mask).softmax(-1)
    of_weights = grad @ value.transpose(-2, -1)
    expected = (of_weights * weights).sum(-1, keepdim=True)
    of_scores = scale * weights * (of_weights - expected)
    return (
        of_scores @ key,
        of_scores.transpose(-2, -1) @ query,
        weights.transpose(-2, -1) @ grad,
    )


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """``scaled_dot_product_attention`` of the heads of this rank, of which there may be none.

    Args:
        query: ``[batch, heads of this rank, n, channels]``.
        key: ``[batch, heads of this rank, m, channels]``.
        value: ``[batch, heads of this rank, m, value channels]``.
        mask: that is added to scores, has no gradient, and can be broadcast; or ``None``.
        scale: of the scores.

    Returns:
        ``[batch, heads of this rank, n, value channels]``, with as many derivatives as are asked
        for; those from the second on need memory for all pairs.
    """
    given = query, key, value, mask, scale
    if not any(map(records_gradient, (query, key, value))):
        return _by_kernel(*given)
    return applied(_Attention, *given)
