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
    return Cosine(*_Cosine.apply(x, beta))  # type: ignore[no-untyped-call]


def _by_torch(x: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    key = F.normalize(x, dim=-1, eps=_EPSILON)
    return key * beta, key, x.view_as(x)


class _Cosine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min_(_EPSILON)
        key = torch.div(x, length, out=new_rows(x, x.shape))
        query = torch.mul(key, beta, out=new_rows(x, x.shape))
        ctx.save_for_backward(x, beta, key, length)
        # No view to autograd, which would refuse edits of `x` in its own words.
        return query, key, x.detach()

    @staticmethod
    def backward(
        ctx: Any, grad_query: Tensor, grad_key: Tensor, grad_value: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, beta, key, length = ctx.saved_tensors
        wants_x, wants_beta = wanted_gradients(ctx)
        if needs_torch_operations(grad_query, grad_key, grad_value):
            with torch.enable_grad():
                gradients = torch.autograd.grad(
                    _by_torch(x, beta),
                    [t for t, needed in ((x, wants_x), (beta, wants_beta)) if needed],
                    (grad_query, grad_key, grad_value),
                    create_graph=torch.is_grad_enabled(),
                )
            found = iter(gradients)
            return tuple(next(found) if needed else None for needed in (wants_x, wants_beta))
        grad_beta = None
        if wants_beta:
            grad_beta = torch.dot(grad_query.flatten(), key.flatten()).view_as(beta)
        if not wants_x:
            return None, grad_beta
        # Of the key, then of what was divided by its length, then of all places of `x`.
        out = torch.addcmul(grad_key, grad_query, beta, out=new_rows(x, x.shape))
        along = torch.bmm(key.unsqueeze(1), out.unsqueeze(2)).squeeze(2)
        along.masked_fill_(length <= _EPSILON, 0)
        torch.addcmul(out, key, along, value=-1, out=out)
        return torch.addcmul(grad_value, out, length.reciprocal(), out=out), grad_beta
