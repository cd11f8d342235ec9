"""Differentiable collectives, in dual pairs: the backward pass of each is the other.

The gradient of a replicated tensor is whole and the same on all ranks; that of a sharded one is
held by rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeGuard, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function

from fastgraph.dist.ranks import gradients, transport
from fastgraph.dist.tensor.memo import on
from fastgraph.machine.memory import new_rows
from fastgraph.ops.library import Context, needs_torch_operations, wanted_gradients

if TYPE_CHECKING:
    from fastgraph.dist.tensor.exchange import Plan
    from fastgraph.dist.tensor.layout import Layout


_CONTIGUOUS = torch.contiguous_format


Given = ParamSpec("Given")
Result = TypeVar("Result", covariant=True)


class Differentiable(Protocol[Given, Result]):
    """A subclass of ``torch.autograd.Function``; each has a context of its own."""

    @staticmethod
    def forward(ctx: Any, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        """The result."""


def applied(
    function: type[Differentiable[Given, Result]], *args: Given.args, **kwargs: Given.kwargs
) -> Result:
    """``function.apply``, without what torch does before it for transforms of ``torch.func``.

    Args:
        function: a subclass of ``torch.autograd.Function``.
        args: of its ``forward``, behind the context.
        kwargs: none, as torch takes arguments by position alone.
    """
    return super(Function, function).apply(*args, **kwargs)  # type: ignore[misc, no-any-return]


class _OfLayout(Context):
    rows: Layout
    axis: int


class _OfPlan(Context):
    plan: Plan


class _OfEntered(Context):
    x: Tensor | None  # whose gradient may wait for those of its other uses


class _Enter(Function):
    @staticmethod
    def forward(ctx: _OfEntered, x: Tensor) -> Tensor:
        ctx.x = x if x.is_leaf or gradients.may_wait(x) else None
        return x.view_as(x)

    @staticmethod
    def backward(ctx: _OfEntered, grad: Tensor) -> Tensor | None:
        node, _ = ctx.next_functions[0]
        if ctx.x is not None and node is not None and gradients.waits(ctx.x, node, grad):
            return None
        return applied(_Sum, grad, gradients.is_small(grad))


class _Sum(Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, in_order: bool) -> Tensor:
        if x.layout == torch.sparse_coo:
            return transport.sum_of_sparse(x)
        return transport.all_reduce_in_order(x) if in_order else transport.all_reduce(x)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None]:
        return enter(grad), None


class _Gather(Function):
    @staticmethod
    def forward(ctx: _OfLayout, x: Tensor, rows: Layout, axis: int) -> Tensor:
        ctx.rows, ctx.axis = rows, axis
        parts = transport.all_gather(x.movedim(axis, 0), rows.counts)
        # Never a view, which autograd would not let anyone write to.
        found = parts.index_select(0, rows.order_on(x.device))
        return found if axis == 0 else found.movedim(0, axis).clone(memory_format=_CONTIGUOUS)

    @staticmethod
    def backward(ctx: _OfLayout, grad: Tensor) -> tuple[Tensor, None, None]:
        return split(grad, ctx.rows, ctx.axis), None, None


class _Split(Function):
    @staticmethod
    def forward(ctx: _OfLayout, x: Tensor, rows: Layout, axis: int) -> Tensor:
        ctx.rows, ctx.axis = rows, axis
        return x.index_select(axis, rows.position_on(x.device))

    @staticmethod
    def backward(ctx: _OfLayout, grad: Tensor) -> tuple[Tensor, None, None]:
        return gather(grad, ctx.rows, ctx.axis), None, None


class _Halo(Function):
    @staticmethod
    def forward(ctx: _OfPlan, x: Tensor, plan: Plan) -> Tensor:
        ctx.plan = plan
        given = x.index_select(0, on(plan.given, x.device))
        return transport.all_to_all(given, plan.sends, plan.receives)

    @staticmethod
    def backward(ctx: _OfPlan, grad: Tensor) -> tuple[Tensor, None]:
        return halo_sum(grad, ctx.plan), None


class _HaloSum(Function):
    @staticmethod
    def forward(ctx: _OfPlan, x: Tensor, plan: Plan) -> Tensor:
        ctx.plan = plan
        returned = transport.all_to_all(x, plan.receives, plan.sends)
        zeros = x.new_zeros((plan.mine, *x.shape[1:]))
        return zeros.index_add_(0, on(plan.given, x.device), returned)

    @staticmethod
    def backward(ctx: _OfPlan, grad: Tensor) -> tuple[Tensor, None]:
        return halo(grad, ctx.plan), None


class _Returned(Function):
    @staticmethod
    def forward(ctx: _OfPlan, x: Tensor, plan: Plan) -> Tensor:
        ctx.plan = plan
        return transport.all_to_all(x, plan.receives, plan.sends)

    @staticmethod
    def backward(ctx: _OfPlan, grad: Tensor) -> tuple[Tensor, None]:
        return applied(_Sent, grad, ctx.plan), None


class _Sent(Function):
    @staticmethod
    def forward(ctx: _OfPlan, x: Tensor, plan: Plan) -> Tensor:
        ctx.plan = plan
        return transport.all_to_all(x, plan.sends, plan.receives)

    @staticmethod
    def backward(ctx: _OfPlan, grad: Tensor) -> tuple[Tensor, None]:
        return applied(_Returned, grad, ctx.plan), None


class _WithHalo(Function):
    @staticmethod
    def forward(ctx: _OfPlan, plan: Plan, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.plan, mine = plan, plan.mine
        found = [new_rows(x, (mine + sum(plan.receives), *x.shape[1:])) for x in tensors]
        for out, x in zip(found, tensors, strict=True):
            out[:mine] = x
        given = [x.index_select(0, on(plan.given, x.device)) for x in tensors]
        into = [out[mine:] for out in found]
        transport.all_to_all_together(given, plan.sends, plan.receives, into)
        pairs = zip(found, ctx.needs_input_grad[1:], strict=True)
        ctx.mark_non_differentiable(*(out for out, is_needed in pairs if not is_needed))
        return tuple(found)

    @staticmethod
    def backward(ctx: _OfPlan, *grads: Tensor) -> tuple[Tensor | None, ...]:
        plan, mine = ctx.plan, ctx.plan.mine
        # All ranks want the same ones.
        wanted = [i for i, is_wanted in enumerate(wanted_gradients(ctx)[1:]) if is_wanted]
        own, others = [grads[i][:mine] for i in wanted], [grads[i][mine:] for i in wanted]
        found: list[Tensor | None] = [None] * len(grads)
        if needs_torch_operations(*(grads[i] for i in wanted)):
            for i, x, of_halo in zip(wanted, own, others, strict=True):
                found[i] = x + halo_sum(of_halo, plan)
            return None, *found
        returned = transport.all_to_all_together(others, plan.receives, plan.sends)
        for i, x, added in zip(wanted, own, returned, strict=True):
            found[i] = x.index_add_(0, on(plan.given, x.device), added)
        return None, *found


def enter(x: Tensor) -> Tensor:
    """A replicated tensor, which each rank is about to use on its own rows.

    Backward: the sum of the ranks' gradients.
    """
    return applied(_Enter, x)


def sum_of_ranks(x: Tensor) -> Tensor:
    """The sum of what each rank has, replicated. Backward: the gradient as it is."""
    return applied(_Sum, x, False)


def gather(x: Tensor, rows: Layout, axis: int) -> Tensor:
    """All rows of all ranks in global order, replicated, in new memory. Backward: a split."""
    return applied(_Gather, x, rows, axis)


def split(x: Tensor, rows: Layout, axis: int) -> Tensor:
    """The rows of a replicated tensor that this rank holds. Backward: a gather."""
    return applied(_Split, x, rows, axis)


def halo(x: Tensor, plan: Plan) -> Tensor:
    """Rows of other ranks, ``[sum(plan.receives), ...]``, that a plan needs.

    Backward: each rank adds up what others have for its rows.
    """
    return applied(_Halo, x.contiguous(), plan)


def halo_sum(x: Tensor, plan: Plan) -> Tensor:
    """The transpose of :func:`halo`: values for rows of others, added up by their owners."""
    return applied(_HaloSum, x.contiguous(), plan)


def returned(x: Tensor, plan: Plan) -> Tensor:
    """Values that ranks have for the rows of others, at their owners: ``[sum(plan.sends), ...]``.

    Backward: each rank gets the gradients of what it has sent.
    """
    return applied(_Returned, x.contiguous(), plan)


def with_halo(tensors: Sequence[Tensor], plan: Plan) -> list[Tensor]:
    """Local rows of each tensor, followed by those of other ranks that a plan needs.

    Those of several small tensors are sent together.

    Backward: each rank adds up what it and others have for its rows, in the memory of the gradient.
    That must be one which an operator made, and nothing else refers to.
    """
    if not plan.remote or not tensors:
        return list(tensors)
    sizes = [plan.remote * x.shape[1:].numel() * x.element_size() for x in tensors]
    if transport.sends_in_turns(sizes, len(plan.sends)):
        return [applied(_WithHalo, plan, x)[0] for x in tensors]
    return list(applied(_WithHalo, plan, *tensors))


def records_gradient(x: object) -> TypeGuard[Tensor]:
    """True if what is done with a value now will be differentiated."""
    return isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled()
