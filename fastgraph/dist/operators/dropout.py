"""Dropout of the weights of attention, by where edges and heads are among those of one process.

An operator drops edges by their numbers, which are others on each rank. So weights are made,
dropped and used here. They are ``[edges, heads]``, as are the factors of dropout: the backward pass
makes both again, by the seed, and nothing of that size is kept in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from fastgraph.backends.dropout import dropout_factors
from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.tensor.collectives import applied, records_gradient
from fastgraph.dist.tensor.layout import Layout
from fastgraph.dist.tensor.memo import on
from fastgraph.dist.tensor.rules.random import dropout_factor
from fastgraph.machine import native
from fastgraph.machine.memory import new_rows
from fastgraph.ops.heads import Call, drawn_seed, seed_number
from fastgraph.ops.library import Context, needs_torch_operations, wanted_gradients

_EDGES_OF_BLOCK = 4096
"""For whose weights torch draws random numbers at once."""

Operands = Sequence[Tensor | None]


class Dropped(NamedTuple):
    """The factors by which dropout multiplies the weights of some edges and heads.

    Attributes:
        of_edges: int64 ``[edges]``, the numbers of the edges on one process, by which factors are
            drawn when they are asked for; without a seed the factors, ``[edges, heads]``.
        rate: of dropout.
        seed: of an operator.
        first_head: the number of the first head.
    """

    of_edges: Tensor
    rate: float = 0.0
    seed: Tensor | None = None
    first_head: int = 0

    def factors(self, weights: Tensor) -> Tensor:
        """Those by which the weights ``[edges, heads]`` are multiplied, of their dtype."""
        if self.seed is None:
            return self.of_edges.to(weights.dtype)
        return factors_by_number(weights, self.rate, self.seed, self.of_edges, self.first_head)


def dropout_of(
    call: Call, position: Tensor, num_edges: int, num_heads: int, heads: Layout | None, like: Tensor
) -> Dropped | None:
    """The dropout of a call for some edges and heads; ``None`` without any.

    All ranks draw the seed of a call that has none, which one process would draw.

    Args:
        call: what was asked for.
        position: int64 ``[edges]``, where the edges are among those of one process.
        num_edges: of one process.
        num_heads: likewise.
        heads: those of each rank; default: all have all.
        like: of the dtype and on the device that weights are to have.
    """
    if call.dropout == 0:
        return None
    if call.seed is None and WORLD.random == "exact":  # torch's numbers, drawn but once
        at = {0: position} if heads is None else {0: position, 1: heads.position}
        return Dropped(dropout_factor([num_edges, num_heads], at, call.dropout, like))
    seed = drawn_seed(call.dropout) if call.seed is None else call.seed
    first = 0 if heads is None else sum(heads.counts[: WORLD.rank])
    return Dropped(on(position, like.device), call.dropout, seed, first)


def factors_by_number(
    like: Tensor, dropout: float, seed: Tensor | None, numbers: Tensor, first_head: int = 0
) -> Tensor:
    """The dropout factors that an operator has for some edges, ``[edges, heads]``.

    Args:
        like: ``[any, heads]``, of the dtype and on the device that factors are to have.
        dropout: of weights.
        seed: of the operator.
        numbers: int64 ``[edges]``, those of edges on one process.
        first_head: the number of the first head.
    """
    heads, key = like.shape[1], seed_number(seed)
    if like.is_cpu and native.is_available():
        found = new_rows(like, (len(numbers), heads))
        native.library().dropout_factors(numbers, first_head, dropout, key, found)
        return found
    # Block by block, whose words of 64 bits fit into caches.
    blocks = [
        dropout_factors(like.new_empty(len(some), heads), dropout, key, some, first_head)
        for some in numbers.split(_EDGES_OF_BLOCK)
    ]
    return torch.cat(blocks)


Compute = Callable[[Operands], tuple[Tensor, Tensor]]


def computed_again(compute: Compute, inputs: Operands) -> tuple[Tensor, Tensor]:
    """``compute(inputs)``, of which nothing is kept: the backward pass computes it once more.

    Args:
        compute: gives two differentiable tensors for operands, always the same ones, and takes part
            in no collective.
        inputs: its operands, all that it has.
    """
    if not any(x is not None and records_gradient(x) for x in inputs):
        return compute(inputs)
    # Operands may be one tensor, as which some operators take less time.
    given = list({id(x): x for x in inputs if x is not None}.values())
    places = [next((i for i, y in enumerate(given) if y is x), None) for x in inputs]

    def of_given(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return compute([None if place is None else tensors[place] for place in places])

    found: tuple[Tensor, Tensor] = applied(_ComputedAgain, of_given, *given)
    return found


class _OfCompute(Context):
    compute: Callable[[Sequence[Tensor]], tuple[Tensor, Tensor]]


class _ComputedAgain(Function):
    @staticmethod
    def forward(ctx: _OfCompute, compute: Any, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        ctx.compute = compute
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        found: tuple[Tensor, Tensor] = compute(inputs)
        return found

    @staticmethod
    def backward(ctx: _OfCompute, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved, wanted = ctx.saved_tensors, wanted_gradients(ctx)[1:]
        is_differentiated = needs_torch_operations(*grads)
        with torch.enable_grad():
            # By themselves: an operand may have been made from another one.
            inputs = [
                x.view_as(x) if is_differentiated else x.detach().requires_grad_(needed)
                for x, needed in zip(saved, wanted, strict=True)
            ]
            results = ctx.compute(inputs)
        pairs = [(x, g) for x, g in zip(results, grads, strict=True) if g is not None]
        found = torch.autograd.grad(
            [x for x, _ in pairs],
            [x for x, needed in zip(inputs, wanted, strict=True) if needed],
            [g for _, g in pairs],
            create_graph=is_differentiated,
            allow_unused=True,
        )
        rest = iter(found)
        return None, *(next(rest) if needed else None for needed in wanted)
