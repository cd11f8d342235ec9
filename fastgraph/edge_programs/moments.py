"""Variances and standard deviations, of the means of values and of their squares, as PyG's are."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

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


def spread_of(reduction: str, mean: Tensor, square: Tensor) -> Tensor:
    """The variance or the standard deviation, given the mean and the mean of squares."""
    variance = square - mean * mean
    if reduction == VAR:
        return variance
    root = variance.clamp(min=_LEAST).sqrt()
    return root.masked_fill(root <= math.sqrt(_LEAST), 0.0)
