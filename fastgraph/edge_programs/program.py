"""The specification of an edge program, and its text.

A program is a list of values, each computed for every edge. Operands come first, then instructions,
whose arguments stand before them; outputs reduce values over the edges of a row.

    x = gathered 128
    w = edge 1
    t0 = mul w x
    sum t0

Every value has a width, its number of channels. Where an instruction takes values of several widths
the narrow ones hold a number for each head: a width must divide every wider one, and value ``k`` of
a narrow one stands for as many consecutive channels of a wide one as there are for each. Channels
that all heads have in common are repeated by ``tile``, and ``sum_tiles`` sums over heads.

``softmax x s`` sums ``x``, weighted by the softmax of the scores ``s`` over the edges of a row: a
score for each channel, or one for each head.

``slice x W h k`` takes channels of each of ``h`` heads from the ``k``-th on, W in all, and
``pad x W h k`` puts the channels of each head there, among zeros, W in all; ``first x W h 0`` is 1
for the first channel of each head that is not 0.

``product x w M`` multiplies a value of width K with a matrix ``[K, M]``, which is a parameter of
width K * M, ``product_t x w M`` with the transpose of a matrix ``[M, K]``; ``outer x y`` sums the
outer products ``[K, M]`` of two values over all edges.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from fastgraph.edge_programs.operations import (
    CONSTANT,
    DETACH,
    DOT,
    ELEMENTWISE,
    EXTREMA,
    FIRST,
    FOLD,
    FOLD_MAX,
    OUTER,
    PAD,
    PRODUCT,
    PRODUCT_T,
    REDUCTIONS,
    ROUND,
    SLICE,
    SOFTMAX,
    SOFTMAX_MAX,
    SPREAD,
    STD,
    SUM_TILES,
    TILE,
    VAR,
)

Place = Literal["row", "gathered", "edge", "parameter"]
"""The owners of values: the aggregating node, the gathered one, the edge itself, or the program."""

PLACES: tuple[Place, ...] = get_args(Place)

MIRRORED: dict[Place, Place] = {
    "row": "gathered",
    "gathered": "row",
    "edge": "edge",
    "parameter": "parameter",
}
"""The places of the same values where every edge is reversed."""

_NAME = re.compile(r"[a-z_][a-z0-9_]*")
_TEMPORARY = re.compile(r"t\d+")
_FLAT = "flat"
RESERVED = (*REDUCTIONS, *PLACES, _FLAT)
"""Names that no operand has."""

_RESIZING = (SPREAD, TILE, FOLD, FOLD_MAX, SUM_TILES, DOT)
"""Instructions whose results have another width than their arguments."""

OF_CHANNELS = (SLICE, PAD, FIRST)
"""Instructions that look at the places of channels in their heads."""


@dataclass(frozen=True)
class Operand:
    """A tensor that a program takes.

    Attributes:
        name: unique among the operands.
        place: what it has a row for.
        width: how many values a row has.

    Raises:
        ValueError: naming the attribute, what was expected and what came.
    """

    name: str
    place: Place
    width: int

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or _TEMPORARY.fullmatch(self.name):
            raise ValueError(
                "the name of an operand must be lower-case letters, digits and underscores, and "
                f"not t with a number, got {self.name!r}"
            )
        if self.name in RESERVED:
            raise ValueError(f"the name of an operand must not be a keyword, got {self.name!r}")
        if self.place not in PLACES:
            raise ValueError(
                f"{self.name} must be in one of the places {list(PLACES)}, got {self.place!r}"
            )
        if self.width < 1:
            raise ValueError(f"{self.name} must have a width of at least 1, got {self.width}")


@dataclass(frozen=True)
class Instruction:
    """A value made of earlier ones.

    Attributes:
        operation: an element-wise one or ``round``, ``constant``, ``spread``, ``fold``, ``dot``,
            ``tile``, ``sum_tiles``, ``fold_max``, ``first``, ``slice``, ``pad``, ``detach``,
            ``product`` or ``product_t``.
        arguments: numbers of values.
        width: of the result; of an element-wise instruction the largest of its arguments.
        constant: the number, of a ``constant``.
        heads: of a ``slice``, ``pad`` or ``first``.
        start: of a ``slice`` or ``pad``, the first channel of each head.
    """

    operation: str
    arguments: tuple[int, ...]
    width: int
    constant: float = 0.0
    heads: int = 1
    start: int = 0


@dataclass(frozen=True)
class Output:
    """A result: the reduction of a value.

    Attributes:
        reduction: one of :data:`fastgraph.edge_programs.operations.REDUCTIONS`.
        value: the number of the value.
        score: that of the scores, of a softmax, or of the second factor of outer products; -1 for
            others.
    """

    reduction: str
    value: int
    score: int = -1

    @property
    def is_record(self) -> bool:
        """True for a record of ties, which is int32."""
        return self.reduction in EXTREMA.values()

    @property
    def has_gradient(self) -> bool:
        """False for records of ties, and for the number that a softmax subtracts from scores."""
        return not self.is_record and self.reduction != SOFTMAX_MAX

    @property
    def values(self) -> tuple[int, ...]:
        """The numbers of the values that it takes."""
        return (self.value,) if self.score < 0 else (self.value, self.score)


@dataclass(frozen=True)
class Program:
    """An edge program.

    Attributes:
        operands: values 0, 1, ...
        instructions: the values that follow.
        outputs: what it returns, in this order.
        flat: operands of which it has the slopes of functions that are straight in pieces, as a
            derivative. Their gradients are zeros where they have none.

    Raises:
        ValueError: what is wrong, and with which value.
    """

    operands: tuple[Operand, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[Output, ...]
    flat: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"operands must have different names, got {list(self.names)}")
        for number, instruction in enumerate(self.instructions, len(self.operands)):
            self._check(number, instruction)
        if not self.operands:
            raise ValueError("a program must have at least one operand, got none")
        if not self.outputs:
            raise ValueError("a program must have at least one output, got none")
        for output in self.outputs:
            if output.reduction not in REDUCTIONS:
                raise ValueError(
                    f"a reduction must be one of {list(REDUCTIONS)}, got {output.reduction!r}"
                )
            if not 0 <= output.value < self.num_values:
                raise ValueError(f"{output.reduction} must reduce a value, got {output.value}")
            if output.reduction == OUTER:
                self._check_factor(output)
            else:
                self._check_score(output)
        used = {v for o in self.outputs for v in o.values}
        used = used.union(*(i.arguments for i in self.instructions))
        if unknown := set(self.flat) - set(self.names):
            raise ValueError(f"flat must name operands, got {sorted(unknown)}")
        idle = [o.name for number, o in enumerate(self.operands) if number not in used]
        if idle:
            raise ValueError(f"every operand must be used, got {idle} that are not")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Every call of a program looks up several things that are kept of it.
        return hash((self.operands, self.instructions, self.outputs, self.flat))

    def __reduce__(self) -> tuple[object, ...]:
        parts = self.operands, self.instructions, self.outputs, self.flat
        return Program, parts  # others hash otherwise

    def _check_factor(self, output: Output) -> None:
        if not 0 <= output.score < self.num_values:
            raise ValueError(f"outer must have two values, got {output.score}")

    def _check_score(self, output: Output) -> None:
        if output.reduction != SOFTMAX:
            if output.score != -1:
                raise ValueError(f"{output.reduction} must have no scores, got {output.score}")
        elif not 0 <= output.score < self.num_values:
            raise ValueError(f"softmax must have scores, got {output.score}")
        elif self.width(output.value) % self.width(output.score):
            raise ValueError(
                f"softmax must have scores of a divisor of width {self.width(output.value)}, "
                f"got {self.width(output.score)}"
            )

    def _check(self, number: int, instruction: Instruction) -> None:
        operation, arguments, width = (
            instruction.operation,
            instruction.arguments,
            instruction.width,
        )
        name = f"{self.name(number)} = {operation}"
        if operation in (PRODUCT, PRODUCT_T):
            self._check_product(name, number, instruction)
            return
        if operation in ELEMENTWISE:
            arity = ELEMENTWISE[operation].arity
        elif operation in (CONSTANT, ROUND, DETACH, *_RESIZING, *OF_CHANNELS):
            arity = {CONSTANT: 0, DOT: 2}.get(operation, 1)
        else:
            raise ValueError(f"{name} is no operation of edge programs")
        if len(arguments) != arity:
            raise ValueError(f"{name} must have {arity} arguments, got {len(arguments)}")
        if any(not 0 <= argument < number for argument in arguments):
            raise ValueError(f"{name} must take values that stand before it")
        widths = [self.width(argument) for argument in arguments]
        widest = common_width(name, widths)
        if operation == CONSTANT:
            fits, expected = width == 1, "a width of 1"
        elif operation in OF_CHANNELS:
            fits, expected = _fits_heads(instruction, widest), "channels that its heads have"
        elif operation in (SPREAD, TILE):
            fits, expected = width >= 1 and width % widest == 0, f"a multiple of width {widest}"
        elif operation in _RESIZING:
            fits, expected = width >= 1 and widest % width == 0, f"a divisor of width {widest}"
        else:
            fits, expected = width == widest, f"the width {widest} of its arguments"
        if not fits:
            raise ValueError(f"{name} must have {expected}, got {width}")

    def _check_product(self, name: str, number: int, instruction: Instruction) -> None:
        if len(instruction.arguments) != 2:
            raise ValueError(f"{name} must have 2 arguments, got {len(instruction.arguments)}")
        value, matrix = instruction.arguments
        if not 0 <= value < number:
            raise ValueError(f"{name} must take values that stand before it")
        is_parameter = 0 <= matrix < len(self.operands)
        if not is_parameter or self.operands[matrix].place != "parameter":
            raise ValueError(f"{name} must take a matrix that is a parameter")
        expected = self.width(value) * instruction.width
        if instruction.width < 1 or self.width(matrix) != expected:
            raise ValueError(
                f"{name} must have a matrix of {self.width(value)} times {instruction.width} "
                f"numbers, got {self.width(matrix)}"
            )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of the operands."""
        return tuple(operand.name for operand in self.operands)

    @cached_property
    def num_values(self) -> int:
        """Operands and instructions together."""
        return len(self.operands) + len(self.instructions)

    @cached_property
    def has_variances(self) -> bool:
        """True if an output is a variance or a standard deviation."""
        return any(output.reduction in (VAR, STD) for output in self.outputs)

    def width(self, value: int) -> int:
        """The width of a value."""
        count = len(self.operands)
        return (
            self.operands[value].width if value < count else self.instructions[value - count].width
        )

    def name(self, value: int) -> str:
        """The name of a value in the program's text."""
        count = len(self.operands)
        return self.operands[value].name if value < count else f"t{value - count}"

    def operands_of(self, value: int) -> frozenset[str]:
        """The names of the operands that a value is made of."""
        count = len(self.operands)
        if value < count:
            return frozenset((self.operands[value].name,))
        arguments = self.instructions[value - count].arguments
        return frozenset().union(*map(self.operands_of, arguments))

    def output_shape(self, output: Output, num_rows: int, num_edges: int) -> tuple[int, ...]:
        """The shape of an output over so many rows and edges."""
        width = self.width(output.value)
        if output.reduction == OUTER:
            return (width * self.width(output.score),)
        if output.reduction == "total":
            return (width,)
        return (num_edges if output.reduction == "edge" else num_rows, width)

    def __str__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:
        lines = [f"{o.name} = {o.place} {o.width}" for o in self.operands]
        for number, instruction in enumerate(self.instructions, len(self.operands)):
            words = [instruction.operation, *map(self.name, instruction.arguments)]
            if instruction.operation == CONSTANT:
                words.append(repr(instruction.constant))
            elif instruction.operation in (*_RESIZING, PRODUCT, PRODUCT_T):
                words.append(str(instruction.width))
            elif instruction.operation in OF_CHANNELS:
                words += map(str, (instruction.width, instruction.heads, instruction.start))
            lines.append(f"{self.name(number)} = {' '.join(words)}")
        lines += [" ".join((o.reduction, *map(self.name, o.values))) for o in self.outputs]
        lines += [" ".join((_FLAT, *self.flat))] if self.flat else []
        return "\n".join(lines)


def _fits_heads(instruction: Instruction, width: int) -> bool:
    """True if heads of a result fit those of an argument of some width."""
    heads, start = instruction.heads, instruction.start
    if heads < 1 or start < 0 or width % heads or instruction.width % heads:
        return False
    whole, part = width // heads, instruction.width // heads
    if instruction.operation == FIRST:
        return whole == part and start == 0
    if instruction.operation == PAD:
        whole, part = part, whole
    return 1 <= part <= whole - start


def common_width(name: str, widths: Sequence[int]) -> int:
    """The largest of some widths, which all others must divide; 1 if there are none.

    Raises:
        ValueError: one does not, naming what takes them.
    """
    widest = max(widths, default=1)
    if any(widest % width for width in widths):
        raise ValueError(
            f"{name} must take widths of which each divides the largest, got {list(widths)}"
        )
    return widest


@functools.lru_cache(maxsize=1024)
def parse(text: str) -> Program:
    """The program with this text.

    Raises:
        ValueError: the text is none, naming the line.
    """
    operands: list[Operand] = []
    instructions: list[Instruction] = []
    outputs: list[Output] = []
    numbers: dict[str, int] = {}
    widths: list[int] = []
    flat: tuple[str, ...] = ()

    def number(name: str) -> int:
        if name not in numbers:
            raise ValueError(f"{name!r} is no value")
        return numbers[name]

    for line in filter(None, map(str.strip, text.splitlines())):
        try:
            match line.split():
                case [name, "=", place, size] if place in PLACES:
                    if instructions:
                        raise ValueError("operands must stand before instructions")
                    operands.append(Operand(name, place, int(size)))
                    widths.append(operands[-1].width)
                case [name, "=", "constant", constant]:
                    instructions.append(Instruction("constant", (), 1, float(constant)))
                    widths.append(1)
                case [name, "=", operation, *words, size] if operation in (
                    *_RESIZING,
                    PRODUCT,
                    PRODUCT_T,
                ):
                    arguments = tuple(map(number, words))
                    instructions.append(Instruction(operation, arguments, int(size)))
                    widths.append(int(size))
                case [name, "=", operation, word, size, heads, start] if operation in OF_CHANNELS:
                    of_heads = 0.0, int(heads), int(start)
                    made = Instruction(operation, (number(word),), int(size), *of_heads)
                    instructions.append(made)
                    widths.append(int(size))
                case [name, "=", operation, *words]:
                    arguments = tuple(map(number, words))
                    width = max((widths[a] for a in arguments), default=1)
                    instructions.append(Instruction(operation, arguments, width))
                    widths.append(width)
                case [("softmax" | "outer") as reduction, name, score]:
                    outputs.append(Output(reduction, number(name), number(score)))
                    continue
                case ["flat", *names]:
                    flat = tuple(names)
                    continue
                case [reduction, name]:
                    outputs.append(Output(reduction, number(name)))
                    continue
                case _:
                    raise ValueError("expected `NAME = OPERATION VALUE ...` or `REDUCTION VALUE`")
            if name in numbers:
                raise ValueError(f"{name!r} is there already")
            numbers[name] = len(numbers)
        except ValueError as error:
            raise ValueError(f"edge program, line {line!r}: {error}") from None
    return Program(tuple(operands), tuple(instructions), tuple(outputs), flat)
