"""Programs made of expressions: equal ones are one value, and what no output needs is left out."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from fastgraph.edge_programs.operations import (
    CONSTANT,
    DETACH,
    DOT,
    FIRST,
    FOLD,
    FOLD_MAX,
    PAD,
    PRODUCT,
    PRODUCT_T,
    ROUND,
    SLICE,
    SPREAD,
    SUM_TILES,
    TILE,
)
from fastgraph.edge_programs.program import (
    Instruction,
    Operand,
    Output,
    Place,
    Program,
    common_width,
)


@dataclass(frozen=True)
class Value:
    """A value of a builder. Operators of Python make others, of it and another or a number."""

    builder: Builder = field(repr=False)
    number: int
    width: int

    def __add__(self, other: Value | float) -> Value:
        return self.builder.apply("add", self, other)

    def __radd__(self, other: float) -> Value:
        return self.builder.apply("add", other, self)

    def __sub__(self, other: Value | float) -> Value:
        return self.builder.apply("sub", self, other)

    def __rsub__(self, other: float) -> Value:
        return self.builder.apply("sub", other, self)

    def __mul__(self, other: Value | float) -> Value:
        return self.builder.apply("mul", self, other)

    def __rmul__(self, other: float) -> Value:
        return self.builder.apply("mul", other, self)

    def __truediv__(self, other: Value | float) -> Value:
        return self.builder.apply("div", self, other)

    def __rtruediv__(self, other: float) -> Value:
        return self.builder.apply("div", other, self)

    def __pow__(self, other: Value | float) -> Value:
        return self.builder.apply("pow", self, other)

    def __neg__(self) -> Value:
        return self.builder.apply("neg", self)


class Builder:
    """Collects the values of a program.

    Args:
        joins: whether values whose widths do not divide each other may be combined, which have one
            for each pair of heads then. A gradient meets such: of a product of values that are
            both narrower than the message.

    Example:
        >>> b = Builder()
        >>> x, w = b.operand("x", "gathered", 4), b.operand("w", "edge", 1)
        >>> print(b.program(("sum", w * x)))
        x = gathered 4
        w = edge 1
        t0 = mul w x
        sum t0
    """

    def __init__(self, *, joins: bool = False) -> None:
        self._joins = joins
        self._definitions: list[Operand | Instruction] = []
        self._numbers: dict[Operand | Instruction, int] = {}

    def operand(self, name: str, place: Place, width: int) -> Value:
        """A tensor that the program takes; the same for the same arguments."""
        return self._value(Operand(name, place, width))

    def constant(self, number: float) -> Value:
        """A number."""
        return self._value(Instruction(CONSTANT, (), 1, float(number)))

    def apply(self, operation: str, *arguments: Value | float) -> Value:
        """An element-wise operation; numbers among its arguments are constants.

        Raises:
            ValueError: the arguments do not fit together.
        """
        values = [a if isinstance(a, Value) else self.constant(a) for a in arguments]
        widths = [value.width for value in values]
        if operation in ("mul", "div") and self._is_one(values[1]):
            return self.spread(values[0], max(widths))
        if operation == "mul" and self._is_one(values[0]):
            return self.spread(values[1], max(widths))
        if self._joins and any(max(widths) % width for width in widths):
            wide = max(values, key=lambda value: value.width)
            values[values.index(wide)] = self.spread(wide, math.lcm(*widths))
            widths = [value.width for value in values]
        width = common_width(operation, widths)
        return self._value(Instruction(operation, tuple(v.number for v in values), width))

    def round(self, value: Value) -> Value:
        """The value as the dtype of operands has it."""
        made = self._definitions[value.number]
        if isinstance(made, Operand) or made.operation == ROUND:
            return value
        return self._value(Instruction(ROUND, (value.number,), value.width))

    def spread(self, value: Value, width: int) -> Value:
        """A value for each head as one for each channel."""
        if value.width == width:
            return value
        return self._value(Instruction(SPREAD, (value.number,), width))

    def fold(self, value: Value, heads: int) -> Value:
        """The sum of the channels of each head."""
        if value.width == heads:
            return value
        made = self._definitions[value.number]
        if isinstance(made, Instruction) and made.operation == SPREAD:
            (narrow,) = (Value(self, number, self._width(number)) for number in made.arguments)
            if narrow.width % heads == 0:
                return self.fold(narrow, heads) * (value.width // narrow.width)
            if heads % narrow.width == 0:
                return self.spread(narrow, heads) * (value.width // heads)
        if isinstance(made, Instruction) and made.operation == "mul":
            factors = (Value(self, number, self._width(number)) for number in made.arguments)
            narrow, wide = sorted(factors, key=lambda factor: factor.width)
            if heads % narrow.width == 0:  # a factor of each head, or of several
                return self.fold(wide, heads) * narrow
            if narrow.width % heads == 0:
                return self.dot(self.fold(wide, narrow.width), narrow, heads)
        return self._value(Instruction(FOLD, (value.number,), heads))

    def dot(self, a: Value, b: Value, heads: int) -> Value:
        """The sum of the products of the channels of each head."""
        if a.width == b.width == heads:
            return a * b
        return self._value(Instruction(DOT, (a.number, b.number), heads))

    def tile(self, value: Value, width: int) -> Value:
        """The channels that all heads have in common, for each of them."""
        if value.width == 1:
            return self.spread(value, width)
        if value.width == width:
            return value
        return self._value(Instruction(TILE, (value.number,), width))

    def sum_tiles(self, value: Value, width: int) -> Value:
        """The sum over heads of each of so many channels."""
        if width == 1:
            return self.fold(value, 1)
        if value.width == width:
            return value
        return self._value(Instruction(SUM_TILES, (value.number,), width))

    def fold_max(self, value: Value, heads: int) -> Value:
        """The largest of the channels of each head."""
        if value.width == heads:
            return value
        return self._value(Instruction(FOLD_MAX, (value.number,), heads))

    def first(self, mask: Value, heads: int) -> Value:
        """1 for the first channel of each head that is 1, and 0 for all others."""
        if mask.width == heads:
            return mask
        return self._value(Instruction(FIRST, (mask.number,), mask.width, heads=heads))

    def slice(self, value: Value, width: int, heads: int, start: int) -> Value:
        """Channels of each head from one on, ``width`` in all."""
        if value.width == width:
            return value
        made = self._definitions[value.number]
        place = Instruction(PAD, (), value.width, heads=heads, start=start)
        if isinstance(made, Instruction) and replace(made, arguments=()) == place:
            (padded,) = made.arguments
            if self._width(padded) == width:
                return Value(self, padded, width)
        return self._value(Instruction(SLICE, (value.number,), width, heads=heads, start=start))

    def pad(self, value: Value, width: int, heads: int, start: int) -> Value:
        """The channels of each head from one on among zeros, ``width`` in all."""
        if value.width == width:
            return value
        return self._value(Instruction(PAD, (value.number,), width, heads=heads, start=start))

    def detach(self, value: Value) -> Value:
        """The value without its gradient."""
        return self._value(Instruction(DETACH, (value.number,), value.width))

    def product(self, x: Value, matrix: Value, width: int, *, is_transposed: bool = False) -> Value:
        """The product with a matrix ``[x.width, width]``, or the transpose of one the other way."""
        if width == 1:
            return self.dot(x, matrix, 1)
        if x.width == 1:
            return x * matrix
        operation = PRODUCT_T if is_transposed else PRODUCT
        return self._value(Instruction(operation, (x.number, matrix.number), width))

    def gelu(self, x: Value) -> Value:
        """The error function's gelu."""
        return x * 0.5 * (self.apply("erf", x * math.sqrt(0.5)) + 1.0)

    def program(self, *outputs: tuple[str, *tuple[Value, ...]]) -> Program:
        """The program with these outputs, and what they need.

        Args:
            outputs: the reduction and the value of each; of a softmax the scores, too, and of outer
                products the second factor.
        """
        needed = {value.number for _, *values in outputs for value in values}
        for number in range(len(self._definitions) - 1, -1, -1):
            made = self._definitions[number]
            if number in needed and isinstance(made, Instruction):
                needed.update(made.arguments)
        operands = [n for n in self._of(Operand) if n in needed]
        instructions = [n for n in self._of(Instruction) if n in needed]
        place = {number: place for place, number in enumerate([*operands, *instructions])}
        made_of = []
        for number in instructions:
            made = self._definitions[number]
            assert isinstance(made, Instruction)
            arguments = tuple(place[argument] for argument in made.arguments)
            made_of.append(replace(made, arguments=arguments))
        taken = [made for n in operands if isinstance(made := self._definitions[n], Operand)]
        results = tuple(
            Output(reduction, *(place[value.number] for value in values))
            for reduction, *values in outputs
        )
        return Program(tuple(taken), tuple(made_of), results)

    def replay(self, program: Program) -> list[Value]:
        """The values of a program, as values of this builder."""
        values: list[Value] = [self._value(operand) for operand in program.operands]
        for instruction in program.instructions:
            arguments = tuple(values[a].number for a in instruction.arguments)
            values.append(self._value(replace(instruction, arguments=arguments)))
        return values

    def _of(self, kind: type) -> Iterable[int]:
        return (n for n, made in enumerate(self._definitions) if isinstance(made, kind))

    def _width(self, number: int) -> int:
        return self._definitions[number].width

    def _is_one(self, value: Value) -> bool:
        made = self._definitions[value.number]
        if isinstance(made, Instruction) and made.operation == SPREAD:
            made = self._definitions[made.arguments[0]]
        return isinstance(made, Instruction) and made.operation == CONSTANT and made.constant == 1

    def _value(self, made: Operand | Instruction) -> Value:
        number = self._numbers.setdefault(made, len(self._definitions))
        if number == len(self._definitions):
            self._definitions.append(made)
        return Value(self, number, made.width)
