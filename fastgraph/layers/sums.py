"""Adding to a layer's result in its own memory.

Where nodes have few neighbours a fresh tensor can cost as much as the aggregation, because the
system zeroes its pages. Upstream writes ``out = out + term``; if nothing else can see ``out``, the
sum may take its place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastgraph.ops.library import needs_torch_operations


def add_to(out: Tensor, term: Tensor) -> Tensor:
    """``out + term``, in the memory of ``out`` where the sum has its shape and dtype."""
    fits = out.shape[out.dim() - term.dim() :] == term.shape
    in_place = fits and torch.promote_types(out.dtype, term.dtype) == out.dtype
    return out.add_(term) if in_place else out + term


def first_rows(x: Tensor, num_rows: int) -> Tensor:
    """``x[:num_rows]``, or ``x`` itself where these are all."""
    return x if num_rows == len(x) else x[:num_rows]


def with_first_rows(x: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """``x`` and ``x[:num_rows]``, whose gradients are added up in the memory of the first.

    torch would make a tensor of zeros for that of the second, and then their sum. The gradient of
    the first must be one that an operator or a product made, which nothing else refers to.
    """
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x, x[:num_rows]
    return _WithFirstRows.apply(x, num_rows)  # type: ignore[no-any-return,no-untyped-call]


class _WithFirstRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        ctx.num_rows = num_rows
        return x.view_as(x), x[:num_rows]

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_first: Tensor) -> tuple[Tensor, None]:
        if needs_torch_operations(grad, grad_first):
            rest = grad_first.new_zeros(len(grad) - ctx.num_rows, *grad.shape[1:])
            return grad + torch.cat([grad_first, rest]), None
        grad[: ctx.num_rows] += grad_first
        return grad, None
