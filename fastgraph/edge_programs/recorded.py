"""The knowledge of the tensors of a message while it is recorded, and of what comes before it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastgraph.edge_programs.builder import Value
from fastgraph.edge_programs.owners import Owner
from fastgraph.edge_programs.program import RESERVED


class Refused(BaseException):
    """A message that is no edge program. Not an ``Exception``, which messages may catch."""


@dataclass(frozen=True)
class Ref:
    """The result of a step, as an argument of another."""

    step: int


@dataclass(frozen=True)
class Step:
    """A computation before the program.

    Attributes:
        function: of torch; ``None`` for a value that is given.
        args: its arguments, or the name of the value that is given.
        kwargs: its other arguments.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()

    @property
    def taken(self) -> frozenset[int]:
        """The numbers of the steps whose results it takes."""
        arguments = [list(self.args), [argument for _, argument in self.kwargs]]
        leaves = torch.utils._pytree.tree_leaves(arguments)
        return frozenset(leaf.step for leaf in leaves if isinstance(leaf, Ref))


def operand_name(step: Step, number: int) -> str:
    """The name of the operand that a step becomes: that of what is given, if it may be one."""
    name = step.args[0] if step.function is None else ""
    if not re.fullmatch(r"[a-su-z_][a-z0-9_]*", name) or name in RESERVED:
        return f"t_{number}"
    return str(name)


@dataclass(frozen=True)
class Mapped:
    """A value that a matrix is still to map.

    Attributes:
        value: in the program.
        matrix: the step that is the matrix.
    """

    value: Value
    matrix: int


@dataclass(frozen=True)
class Recorded:
    """The knowledge of a tensor.

    Attributes:
        place: what it has a row for; ``None`` for several places.
        channels: its shape without rows.
        step: the number of the step that computes it, if one does.
        value: in the program, if it is there. It has all channels.
        terms: steps of which it is the sum, with coefficients; all have its channels.
        parts: the values that it concatenates along its last dimension of channels.
        table: the step of a parameter, if it has the rows of that which the edges' types choose.
        maps: values of edges of whose products with matrices it is the sum.
        scores: of each edge, by whose softmax over neighbours its value is still to be multiplied.
    """

    place: Owner | None
    channels: tuple[int, ...]
    step: int | None = None
    value: Value | None = None
    terms: tuple[tuple[float, Recorded], ...] = ()
    parts: tuple[Recorded, ...] = ()
    table: int | None = None
    maps: tuple[Mapped, ...] = ()
    scores: Value | None = None

    @property
    def has_rows(self) -> bool:
        """True unless it belongs to the program alone."""
        return self.place != "parameter"


Known = Callable[[int], tuple[Tensor, Recorded] | None]
"""Gives the tensor that a step computes, and what is known of it."""


def has_all_channels(bias: Ref | None, weight: Ref, known: Known) -> bool:
    """True if a linear map has a matrix, and a bias, if any, with a number for each of its rows.

    In torch the matrix may be one row without a dimension of its own, and the bias one number.
    """
    matrix = known(weight.step)
    if matrix is None:  # a part of one, whose bias is added apart
        return bias is None
    added = None if bias is None else known(bias.step)
    if len(matrix[1].channels) != 2 or (bias is not None and added is None):
        return False
    return added is None or math.prod(added[1].channels) == matrix[1].channels[0]


def is_part_of_argument(steps: Sequence[Step], v: Recorded) -> bool:
    """True for a tensor of edges that shares its memory with one that the message takes."""
    step = v.step if v.place == "edge" else None
    while step is not None and (made := steps[step]).function is not None:
        is_view = made.function._schema.returns[0].alias_info is not None
        step = made.args[0].step if is_view else None
    return step is not None


def needed_steps(
    steps: Sequence[Step], step_of: Mapping[str, int]
) -> tuple[tuple[Step, ...], dict[str, int]]:
    """The steps that operands need, numbered anew."""
    needed = set(step_of.values())
    for number in range(len(steps) - 1, -1, -1):
        if number in needed:
            needed |= steps[number].taken
    place = {number: k for k, number in enumerate(sorted(needed))}
    moved = {number: Ref(k) for number, k in place.items()}
    made = tuple(
        replace(
            step,
            args=tuple(with_results(argument, moved) for argument in step.args),
            kwargs=tuple((name, with_results(argument, moved)) for name, argument in step.kwargs),
        )
        for step in (steps[number] for number in place)
    )
    return made, {name: place[number] for name, number in step_of.items()}


def with_results(argument: Any, results: Mapping[int, Any] | Sequence[Any]) -> Any:
    """An argument of a step with the results of others in the place of references to them.

    It is no function within its callers: one that calls itself would keep what they hold until
    Python looks for cycles.

    Args:
        argument: of the step.
        results: of the others, by their numbers.
    """
    if isinstance(argument, Ref):
        return results[argument.step]
    if isinstance(argument, list):
        return [with_results(a, results) for a in argument]
    return argument
