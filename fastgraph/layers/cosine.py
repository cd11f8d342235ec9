"""Operands of attention by cosines, made in as few passes over all nodes as there can be.

torch's own operations keep a tensor each for their gradients, in new memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgraph.machine.memory import new_rows
from fastgraph.ops.library import DEFINING, needs_torch_operations, wanted_gradients

_EPSILON = 1e-12  # that of torch.nn.functional.normalize


class Cosine(NamedTuple):
    """Rows of the same nodes, ``[nodes, channels]`` each."""

    query: Tensor
    key: Tensor
    value: Tensor


def cosine_operands(x: Tensor, beta: Tensor) -> Cosine:
    r"""Operands whose scores are :math:`\beta \cos(x_i, x_j)`, and whose values are :math:`x_j`.

    Thekumparampil et al., "Attention-based graph neural network for semi-supervised learning",
    2018, equation 4. Rows that are shorter than 1e-12 are divided by that.

    Args:
        x: ``[nodes, channels]``.
        beta: ``[1]``, of the same dtype.
    """
    if type(x) in DEFINING:
        return Cosine(*_by_torch(x, beta))
    key, value = _Unit.apply(x)  # type: ignore[no-untyped-call]
    # A function of its own: what scores need is asked for by its node, and nothing by the others'.
    query = _Scaled.apply(key, beta)  # type: ignore[no-untyped-call]
    return Cosine(query, key, value)


def _by_torch(x: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    key = F.normalize(x, dim=-1, eps=_EPSILON)
    return key * beta, key, x.view_as(x)


class _Unit(torch.autograd.Function):
    """Rows divided by their length, and the rows as they are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min_(_EPSILON)
        key = torch.div(x, length, out=new_rows(x, x.shape))
        ctx.save_for_backward(x, key, length)
        # No view to autograd, which would refuse edits of `x` in its own words.
        return key, x.detach()

    @staticmethod
    def backward(ctx: Any, grad_key: Tensor, grad_value: Tensor) -> Tensor:
        x, key, length = ctx.saved_tensors
        if needs_torch_operations(grad_key, grad_value):
            with torch.enable_grad():
                (gradient,) = torch.autograd.grad(
                    F.normalize(x, dim=-1, eps=_EPSILON),
                    x,
                    grad_key,
                    create_graph=torch.is_grad_enabled(),
                )
            total: Tensor = gradient + grad_value
            return total
        # Of what was divided by its length, then of all places of `x`.
        along = torch.bmm(key.unsqueeze(1), grad_key.unsqueeze(2)).squeeze(2)
        along.masked_fill_(length <= _EPSILON, 0)
        out: Tensor = torch.addcmul(grad_key, key, along, value=-1, out=new_rows(x, x.shape))
        out = torch.addcmul(grad_value, out, length.reciprocal(), out=out)
        return out


class _Scaled(torch.autograd.Function):
    """Rows multiplied by one number."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(rows, factor)
        return torch.mul(rows, factor, out=new_rows(rows, rows.shape))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        rows, factor = ctx.saved_tensors
        wants_rows, wants_factor = wanted_gradients(ctx)
        grad_factor = None
        if wants_factor:
            grad_factor = torch.dot(grad.reshape(-1), rows.reshape(-1)).view_as(factor)
        if not wants_rows:
            return None, grad_factor
        if needs_torch_operations(grad):
            return grad * factor, grad_factor
        return torch.mul(grad, factor, out=new_rows(grad, grad.shape)), grad_factor
