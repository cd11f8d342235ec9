"""Variances and standard deviations, of the means of values and of their squares, as PyG's are."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgraph.edge_programs.operations import STD, VAR
from fastgraph.edge_programs.program import Instruction, Output, Program

_LEAST = 1e-5
"""Smaller variances count as 0 in standard deviations, whose gradient is 0 there."""


class Moments(NamedTuple):
    """A program without variances.

    Attributes:
        program: has means in their place.
        outputs: for each output of the program before the reduction, and the numbers of the outputs
            that it is made of: one, or that of a mean and of the mean of squares.
    """

    program: Program
    outputs: tuple[tuple[str, tuple[int, ...]], ...]


@functools.lru_cache(maxsize=1024)
def without_variances(program: Program) -> Moments:
    """A program whose outputs give those of one with variances."""
    instructions = list(program.instructions)
    outputs: list[Output] = []
    squares: dict[int, int] = {}

    def number(output: Output) -> int:
        if output not in outputs:
            outputs.append(output)
        return outputs.index(output)

    made = []
    for output in program.outputs:
        parts = [output]
        if output.reduction in (VAR, STD):
            value = output.value
            if value not in squares:
                squares[value] = len(program.operands) + len(instructions)
                instructions.append(Instruction("mul", (value, value), program.width(value)))
            parts = [Output("mean", value), Output("mean", squares[value])]
        made.append((output.reduction, tuple(map(number, parts))))
    changed = replace(program, instructions=tuple(instructions), outputs=tuple(outputs))
    return Moments(changed, tuple(made))


def with_variances(moments: Moments, results: Sequence[Tensor]) -> list[Tensor]:
    """The outputs of the program before, given those of the one without variances."""
    found = []
    for reduction, numbers in moments.outputs:
        parts = [results[number] for number in numbers]
        found.append(spread_of(reduction, *parts) if len(parts) == 2 else parts[0])
    return found


def spread_of(reduction: str, mean: Tensor, square: Tensor, *, is_plain: bool = False) -> Tensor:
    """The variance or the standard deviation, given the mean and the mean of squares.

    Args:
        reduction: which of them.
        mean: of values.
        square: of their squares.
        is_plain: true where neither is of a subclass of tensors, nor batched or differentiated
            forward: then no more is kept for the gradient of a standard deviation than it needs.
    """
    # In half types the root of the bound may be above that of the bound's root: no zero tells.
    if is_plain and reduction == STD and mean.dtype in (torch.float32, torch.float64):
        found: Tensor = _Deviation.apply(mean, square)  # type: ignore[no-untyped-call]
        return found
    variance = square - mean * mean
    if reduction == VAR:
        return variance
    root = variance.clamp(min=_LEAST).sqrt()
    return root.masked_fill(root <= math.sqrt(_LEAST), 0.0)


class _Deviation(torch.autograd.Function):
    """:func:`spread_of` and its gradient, both as torch computes them, in the memory of results."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, square: Tensor) -> Tensor:
        root = mean * mean
        torch.sub(square, root, out=root)
        root.clamp_(min=_LEAST).sqrt_()
        root.masked_fill_(root <= math.sqrt(_LEAST), 0.0)
        ctx.save_for_backward(mean, root)
        return root

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        mean, root = ctx.saved_tensors
        # Zero where the variance counts as 0, and where it is NaN; so is what is derived of it.
        is_constant = ~(root > 0)
        of_square = grad / root.masked_fill(is_constant, 1.0).mul_(2)
        of_square = of_square.masked_fill_(is_constant, 0.0)
        needs_mean, needs_square = ctx.needs_input_grad
        of_mean = (of_square * mean).mul_(-2) if needs_mean else None
        return of_mean, of_square if needs_square else None
