"""Dense products (``linear``) with results in huge pages.

A layer multiplies the features of all nodes before or after it aggregates them. torch computes the
products here, too, and each gradient of their input, in memory that was asked to be of huge pages.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from fastgraph.layers.aggregation import Aggregation
from fastgraph.layers.constant import SCHEMA, aggregated, decided, is_decided_later
from fastgraph.machine import native
from fastgraph.machine.memory import LARGE, new_rows
from fastgraph.ops.library import define, is_ordinary, needs_torch_operations, wanted_gradients

_PLAIN = (Tensor, torch.nn.Parameter)

_SHARE = 0.9
"""If more of the rows are to be multiplied, all of them are."""

_LEAST_OF_ROWS = 1 << 19
"""The bytes of a product from which on it is asked how many rows that are."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``torch.nn.functional.linear``: :math:`y = x W^T + b`.

    Args:
        x: ``[nodes, in_channels]``; other shapes are torch's to compute.
        weight: ``[out_channels, in_channels]``.
        bias: ``[out_channels]``.

    Returns:
        ``[nodes, out_channels]``, which nothing else refers to.
    """
    if _gains(x, weight, bias, LARGE):
        return _Linear.apply(x, weight, bias)  # type: ignore[no-any-return,no-untyped-call]
    return F.linear(x, weight, bias)


def linear_of_aggregated(planned: Aggregation, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``linear`` of what a layer aggregates, multiplying no rows behind the last one with edges.

    These are zero, and their products the bias: a sampler's leaves. Infinite weights would make NaN
    of them.

    Args:
        planned: the aggregation.
        weight: ``[out_channels, in_channels]``.
        bias: ``[out_channels]``.
    """
    if is_decided_later(planned) and _is_product(planned.x, weight, bias):
        x, edges = planned.x, planned.edges
        options = (planned.num_out, planned.reduce, planned.ties, edges.transpose)
        tensors = (x, edges.index, edges.ptr, planned.weight)
        out: Tensor = _LINEAR_OF_AGGREGATED(*tensors, *options, weight, bias)
        return out
    x = aggregated(planned, is_private=True)
    if _gains(x, weight, bias, _LEAST_OF_ROWS):
        num_rows = planned.count_rows()
        if _SHARE * len(x) > num_rows:
            return _LinearOfFirst.apply(x, num_rows, weight, bias)  # type: ignore[no-any-return,no-untyped-call]
    return linear(x, weight, bias)


def _is_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """True if torch would do nothing but multiply matrices, and records no gradient."""
    tensors = [weight] if bias is None else [weight, bias]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return False
    return (
        x.dim() == weight.dim() == 2
        and all(t.dtype == x.dtype and t.device == x.device for t in tensors)
        and not torch.is_autocast_enabled(x.device.type)
    )


def _linear_of_aggregated(*arguments: Any) -> Tensor:
    *aggregation, weight, bias = arguments
    return linear_of_aggregated(decided(*aggregation), weight, bias)


def _linear_of_aggregated_fake(*arguments: Any) -> Tensor:
    x, num_out, weight = arguments[0], arguments[4], arguments[-2]
    out: Tensor = x.new_empty((num_out, weight.shape[0]))
    return out


_LINEAR_OF_AGGREGATED = define(
    f"linear_of_aggregated({SCHEMA}, Tensor matrix, Tensor? bias) -> Tensor",
    _linear_of_aggregated,
    _linear_of_aggregated_fake,
)


def add_linear(out: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """``out + linear(x, weight, None)`` in the memory of ``out``, without the product in between.

    Args:
        out: ``[nodes, out_channels]``, which nothing else refers to and no gradient needs.
        x: ``[nodes, in_channels]``.
        weight: ``[out_channels, in_channels]``; all of one dtype.
    """
    if _gains(x, weight, None, LARGE):
        return _AddLinear.apply(out, x, weight)  # type: ignore[no-any-return,no-untyped-call]
    return out.addmm_(x, weight.t())


def with_linear_of_first(
    x: Tensor, num_rows: int, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``x`` and ``linear(x[:num_rows], weight, bias)``, whose gradients are one in memory.

    torch would make another one with zeros for the other rows, and then a sum.

    Args:
        x: ``[nodes, in_channels]``. The gradient of what is returned for it must be one that an
            operator or a product made, which nothing else refers to.
        num_rows: at most the number of nodes.
        weight: ``[out_channels, in_channels]``.
        bias: ``[out_channels]``.
    """
    is_plain = type(x) in _PLAIN and x.dim() == 2 and x.dtype == weight.dtype
    if is_plain and x.requires_grad and torch.is_grad_enabled():
        # Without the weight, whose gradient alone would need that of `x` otherwise.
        x, first = _WithFirst.apply(x, num_rows)  # type: ignore[no-untyped-call]
    else:
        first = x[:num_rows]
    return x, linear(first, weight, bias)


def _gains(x: Tensor, weight: Tensor, bias: Tensor | None, least: int) -> bool:
    """True if a product has so many bytes, and torch would do nothing but multiply."""
    if torch.compiler.is_compiling() or type(x) not in _PLAIN or x.dim() != 2 or weight.dim() != 2:
        return False
    # Before what takes longer: small graphs would notice.
    if x.shape[0] * max(weight.shape) * x.element_size() < least:
        return False
    tensors = (x, weight) if bias is None else (x, weight, bias)
    return (
        is_ordinary(tensors, tensors)
        and x.device.type == "cpu"
        and all(t.dtype == x.dtype and t.device == x.device for t in tensors)
        and not torch.is_autocast_enabled(x.device.type)
        and forward_ad._current_level < 0
        and native.is_available()
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        needs_x, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        return _product(x, weight.t(), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = wanted_gradients(ctx)
        return (
            _product(grad, weight) if wants_x else None,
            grad.t() @ x if wants_weight else None,
            grad.sum(0) if wants_bias else None,
        )


class _LinearOfFirst(torch.autograd.Function):
    """Of rows of which all but the first are zero, and whose gradients nobody needs there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, num_rows: int, weight: Tensor, bias: Tensor | None) -> Tensor:
        needs_x, _, needs_weight, _ = ctx.needs_input_grad
        ctx.num_rows = num_rows
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        out = new_rows(x, (len(x), len(weight)))
        _multiply(out[:num_rows], x[:num_rows], weight.t(), bias)
        out[num_rows:] = 0 if bias is None else bias
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants_x, _, wants_weight, wants_bias = wanted_gradients(ctx)
        first = grad[: ctx.num_rows]
        grad_x = None
        if wants_x:
            if needs_torch_operations(grad):
                grad_x = F.pad(first @ weight, (0, 0, 0, len(grad) - len(first)))
            else:
                grad_x = new_rows(grad, (len(grad), weight.shape[1]))
                torch.mm(first, weight, out=grad_x[: len(first)])
                grad_x[len(first) :] = 0
        return (
            grad_x,
            None,
            first.t() @ x[: len(first)] if wants_weight else None,
            grad.sum(0) if wants_bias else None,
        )


class _AddLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        _, needs_x, needs_weight = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        ctx.mark_dirty(out)
        return out.addmm_(x, weight.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        _, wants_x, wants_weight = wanted_gradients(ctx)
        return (
            grad,
            _product(grad, weight) if wants_x else None,
            grad.t() @ x if wants_weight else None,
        )


class _WithFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        ctx.num_rows = num_rows
        return x.view_as(x), x[:num_rows]

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor, grad: Tensor) -> tuple[Tensor, None]:
        if needs_torch_operations(grad_x, grad):
            rest = grad_x.new_zeros(len(grad_x) - ctx.num_rows, grad_x.shape[1])
            return grad_x + torch.cat([grad, rest]), None
        grad_x[: ctx.num_rows] += grad
        return grad_x, None


def _product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    if needs_torch_operations(a):  # and is a gradient
        return a @ b
    out = new_rows(a, (a.shape[0], b.shape[1]))
    return _multiply(out, a, b, bias)


def _multiply(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)
