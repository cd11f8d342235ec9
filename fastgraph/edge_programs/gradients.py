"""The gradients of edge programs, as edge programs: symbolic differentiation in reverse.

A gradient of what nodes aggregate for is summed over the same rows, that of what is gathered over
the rows of the transposed graph, so nothing is scattered. The values of the program are computed
again, of which each pass keeps those that it needs. Both passes are programs like others, whose
gradients are derived alike.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from fastgraph.edge_programs.builder import Builder, Value
from fastgraph.edge_programs.operations import (
    CONSTANT,
    DETACH,
    DOT,
    EXTREMA,
    FIRST,
    FOLD,
    FOLD_MAX,
    OUTER,
    PAD,
    PRODUCT,
    PRODUCT_T,
    ROUND,
    SLICE,
    SOFTMAX,
    SOFTMAX_MAX,
    SOFTMAX_SCALE,
    SPREAD,
    SUM_TILES,
    TILE,
)
from fastgraph.edge_programs.program import MIRRORED, Instruction, Output, Place, Program

_PLACE_OF_OUTPUT: Mapping[str, Place] = {"edge": "edge", "total": "parameter", OUTER: "parameter"}


class Pass(NamedTuple):
    """A program for gradients.

    Attributes:
        program: has an output for each gradient.
        names: of the operands that these are the gradients of, in order. Gradients of the same
            operand are to be added.
        is_reversed: whether its rows are the gathered nodes.
    """

    program: Program
    names: tuple[str, ...]
    is_reversed: bool


class Gradients(NamedTuple):
    """The programs for some gradients of a program.

    Attributes:
        passes: at most one over aggregating and one over gathered nodes.
        grads: the names under which they take the gradients of the outputs. Those of means are to
            be divided by the number of edges before, those of extrema by that of shares.
        results: the names under which they take the outputs themselves, which extrema and softmax
            need.
        products: the names under which they take, for each softmax, the sums over the channels of
            each head of its output times the gradient of that.
        share: the name under which they take 1 over the number of edges of each row ``[rows, 1]``,
            if they divide the gradients of means themselves.
    """

    passes: tuple[Pass, ...]
    grads: tuple[str, ...]
    results: tuple[str, ...]
    products: tuple[str, ...]
    share: str

    @property
    def operands(self) -> frozenset[str]:
        """The names of everything that the programs take."""
        return frozenset(name for made in self.passes for name in made.program.names)


@functools.lru_cache(maxsize=1024)
def derive(
    program: Program, wanted: frozenset[str], given: frozenset[int], *, divides: bool = False
) -> Gradients:
    """The programs for the gradients of the operands whose names are ``wanted``.

    Args:
        program: with the records of each extremum and each softmax.
        wanted: names of operands.
        given: the numbers of the outputs whose gradients there are; others count as zero.
        divides: whether they divide the gradients of means by the numbers of edges themselves.

    Returns:
        Programs for those of the wanted gradients that are not zero.
    """
    builder = Builder(joins=True)
    values = builder.replay(program)
    grads, results, products = (
        tuple(_fresh(f"{kind}{k}", program) for k in range(len(program.outputs)))
        for kind in ("grad", "result", "product")
    )
    share = _fresh("share", program)
    adjoint = _Adjoint(builder, program, values, wanted)
    for k in sorted(given):
        output = program.outputs[k]
        value = values[output.value]
        place = _PLACE_OF_OUTPUT.get(output.reduction, "row")
        if output.reduction == OUTER:
            other = values[output.score]
            matrix = builder.operand(grads[k], place, value.width * other.width)
            by_other = builder.product(other, matrix, value.width, is_transposed=True)
            adjoint.add(output.value, by_other)
            adjoint.add(output.score, builder.product(value, matrix, other.width))
            continue
        gradient = builder.operand(grads[k], place, value.width)
        if divides and output.reduction == "mean":
            gradient = gradient * builder.operand(share, "row", 1)
        if output.reduction in (SOFTMAX, SOFTMAX_SCALE):
            score = values[output.value if output.score < 0 else output.score]
            largest, scale = (
                builder.operand(results[number], "row", score.width)
                for number in softmax_records(program, output)
            )
            weight = builder.apply("exp", score - largest)
            if output.reduction == SOFTMAX_SCALE:
                adjoint.add(output.value, weight * (gradient * (scale * scale * -1.0)))
                continue
            weight = weight * scale
            product = builder.operand(products[k], "row", score.width)
            # The sum of a head's channels, which is the product itself where scores are as wide.
            of_score = builder.dot(value, gradient, score.width) - product
            adjoint.add(output.score, weight * of_score)
            gradient = gradient * weight
        if output.reduction in EXTREMA:
            attained = builder.operand(results[k], "row", value.width)
            # A product, as an infinite share is NaN for those that have none of it, too.
            gradient = gradient * builder.apply("eq", builder.round(value), attained)
        adjoint.add(output.value, gradient)
    adjoint.run()
    # Of each gradient the operand, the reduction and what it takes.
    by_row: list[_Taken] = []
    by_gathered: list[_Taken] = []
    over_all: list[_Taken] = []
    of_edges: list[_Taken] = []
    for number, operand in enumerate(program.operands):
        found = adjoint.of(number)
        if operand.name in wanted:
            over_all += ((operand.name, (OUTER, *pair)) for pair in adjoint.outer_products(number))
        if operand.name not in wanted or found is None:
            continue
        found = builder.spread(found, operand.width)
        if operand.place == "edge":
            of_edges.append((operand.name, ("edge", found)))
        elif operand.place == "gathered":
            by_gathered.append((operand.name, ("sum", found)))
        elif operand.place == "parameter":
            over_all.append((operand.name, ("total", found)))
        else:
            by_row.append((operand.name, ("sum", found)))
    # Either pass has all edges: products are not computed in both for sums over all edges alone.
    has_products = any(reduction == OUTER for _, (reduction, *_) in over_all)
    (by_gathered if has_products and by_gathered and not by_row else by_row).extend(over_all)
    # Values of edges are the same in either pass: no pass for them alone.
    (by_gathered if by_gathered and not by_row else by_row).extend(of_edges)
    passes = []
    for outputs, is_reversed in ((by_row, False), (by_gathered, True)):
        if outputs:
            made = builder.program(*(taken for _, taken in outputs))
            made = replace(made, flat=tuple(n for n in made.names if n in adjoint.flat))
            made = reversed_program(made) if is_reversed else made
            passes.append(Pass(made, tuple(name for name, *_ in outputs), is_reversed))
    return Gradients(tuple(passes), grads, results, products, share)


def softmax_records(program: Program, output: Output) -> tuple[int, int]:
    """The numbers of the outputs that are the records of a softmax, or of which it is one.

    Raises:
        RuntimeError: there are none.
    """
    score = output.value if output.score < 0 else output.score
    records = Output(SOFTMAX_MAX, score), Output(SOFTMAX_SCALE, score)
    for record in records:
        if record not in program.outputs:
            raise RuntimeError(
                f"the program has no {record.reduction} of the scores of {output.reduction}, which "
                "the gradient needs"
            )
    first, second = map(program.outputs.index, records)
    return first, second


def reversed_program(program: Program) -> Program:
    """The same program on reversed edges: rows are gathered, and the gathered nodes are rows."""
    operands = (replace(o, place=MIRRORED[o.place]) for o in program.operands)
    return replace(program, operands=tuple(operands))


def _fresh(name: str, program: Program) -> str:
    """A name that no operand of the program has."""
    while name in program.names:
        name += "_"
    return name


_Taken = tuple[str, tuple[str, *tuple[Value, ...]]]


class _Adjoint:
    """The gradients of values: sums over what they are used for."""

    def __init__(
        self, builder: Builder, program: Program, values: list[Value], wanted: frozenset[str]
    ) -> None:
        self._builder, self._program, self._values = builder, program, values
        self._found: dict[int, Value] = {}
        self._outer: dict[int, list[tuple[Value, Value]]] = {}
        self.flat = set(program.flat)
        """Operands of functions that are straight in pieces, whose slopes were taken."""
        self._matters = [operand.name in wanted for operand in program.operands]
        for instruction in program.instructions:
            self._matters.append(any(self._matters[a] for a in instruction.arguments))

    def of(self, number: int) -> Value | None:
        return self._found.get(number)

    def outer_products(self, number: int) -> list[tuple[Value, Value]]:
        """The pairs of values whose outer products are parts of the gradient of a matrix."""
        return self._outer.get(number, [])

    def add(self, number: int, gradient: Value) -> None:
        """Add a part, of which the channels that one narrow value stands for are added up."""
        if not self._matters[number]:
            return
        width = self._values[number].width
        if gradient.width > width:
            gradient = self._builder.fold(gradient, width)
        before = self._found.get(number)
        self._found[number] = gradient if before is None else before + gradient

    def run(self) -> None:
        count = len(self._program.operands)
        for number in range(self._program.num_values - 1, count - 1, -1):
            gradient = self._found.get(number)
            if gradient is not None:
                instruction = self._program.instructions[number - count]
                self._through(instruction, self._values[number], gradient)

    def _through(self, instruction: Instruction, result: Value, gradient: Value) -> None:
        builder, operation = self._builder, instruction.operation
        arguments = [self._values[a] for a in instruction.arguments]
        if operation in (CONSTANT, DETACH, FIRST, "eq", "ne", "lt", "le", "sign"):
            return
        if operation in _STRAIGHT:
            self.flat |= self._program.operands_of(instruction.arguments[0])
        if operation in (ROUND, FOLD):
            parts: list[Value | None] = [gradient]
        elif operation == SPREAD:  # a narrow gradient stands for the channels of each head alike
            parts = [builder.spread(gradient, result.width)]
        elif operation in (SLICE, PAD):
            (argument,) = arguments
            placed = builder.pad if operation == SLICE else builder.slice
            wide = builder.spread(gradient, result.width)
            part = placed(wide, argument.width, instruction.heads, instruction.start)
            self.add(instruction.arguments[0], part)
            return
        elif operation == FOLD_MAX:
            # Equal ones share it, and all of them have NaN beside a NaN.
            attained = builder.apply("eq", arguments[0], result)
            parts = [attained * (gradient / builder.fold(attained, result.width))]
        elif operation in (TILE, SUM_TILES):
            (argument,) = arguments
            resized = builder.sum_tiles if operation == TILE else builder.tile
            part = resized(builder.spread(gradient, result.width), argument.width)
            self.add(instruction.arguments[0], part)
            return
        elif operation == DOT:
            # Of both factors, whichever is the narrow one.
            parts = [gradient * arguments[1], gradient * arguments[0]]
        elif operation in (PRODUCT, PRODUCT_T):
            self._through_product(instruction, builder.spread(gradient, result.width))
            return
        else:
            parts = _RULES[operation](builder, result, gradient, *arguments)
        for number, found in zip(instruction.arguments, parts, strict=False):
            if found is not None:
                self.add(number, self._whole(found, number, result))

    def _through_product(self, instruction: Instruction, gradient: Value) -> None:
        number, matrix = instruction.arguments
        value, is_transposed = self._values[number], instruction.operation == PRODUCT_T
        back = self._builder.product(
            gradient, self._values[matrix], value.width, is_transposed=not is_transposed
        )
        self.add(number, back)
        if self._matters[matrix]:
            pair = (gradient, value) if is_transposed else (value, gradient)
            self._outer.setdefault(matrix, []).append(pair)

    def _whole(self, part: Value, number: int, result: Value) -> Value:
        """A part of the gradient of a narrow argument, one for each channel of a wide result."""
        if self._values[number].width < result.width and part.width < result.width:
            return self._builder.spread(part, result.width)
        return part


_STRAIGHT = ("relu", "leaky_relu", "abs")
"""Functions of which torch has a second derivative, zeros."""

# For each differentiable operation the gradients of its first arguments; others are constants, and
# so is one that has none.
Rule = Callable[..., list[Value | None]]


def _choose(b: Builder, mask: Value, first: Value | float, second: Value | float) -> Value:
    return b.apply("where", mask, first, second)


def _extremum(larger_first: bool) -> Rule:
    """Half of the gradient goes to each of two equal values, and all of it to both beside a NaN."""

    def rule(b: Builder, y: Value, g: Value, first: Value, second: Value) -> list[Value | None]:
        half = _choose(b, b.apply("eq", first, second), g * 0.5, g)
        loses = [b.apply("lt", first, second), b.apply("lt", second, first)]
        if not larger_first:
            loses.reverse()
        return [_choose(b, mask, 0.0, half) for mask in loses]

    return rule


def _pow(b: Builder, y: Value, g: Value, base: Value, exponent: Value) -> list[Value | None]:
    slope = exponent * b.apply("pow", base, exponent - 1.0)
    of_base = g * _choose(b, b.apply("eq", exponent, 0.0), 0.0, slope)
    at_zero = b.apply("eq", base, 0.0) * b.apply("le", 0.0, exponent)
    of_exponent = g * _choose(b, at_zero, 0.0, y * b.apply("log", base))
    return [of_base, of_exponent]


def _clamp(b: Builder, y: Value, g: Value, x: Value, low: Value, high: Value) -> list[Value | None]:
    inside = b.apply("le", low, x) * b.apply("le", x, high)
    return [_choose(b, inside, g, 0.0)]


def _elu(b: Builder, y: Value, g: Value, x: Value, alpha: Value) -> list[Value | None]:
    # At 0 the gradient is alpha, and that of the gradient is 0, as torch has it.
    slope = _choose(b, b.apply("lt", 0.0, x), 1.0, alpha)
    return [g * _choose(b, b.apply("lt", x, 0.0), y + alpha, slope)]


def _atan2(b: Builder, y: Value, g: Value, first: Value, second: Value) -> list[Value | None]:
    square = first * first + second * second
    is_zero = b.apply("eq", square, 0.0)  # where torch has no gradient, either
    inverse = _choose(b, is_zero, 0.0, 1.0 / _choose(b, is_zero, 1.0, square))
    return [g * second * inverse, g * -first * inverse]


_RULES: Mapping[str, Rule] = {
    "add": lambda b, y, g, *_: [g, g],
    "sub": lambda b, y, g, *_: [g, -g],
    "mul": lambda b, y, g, first, second: [g * second, g * first],
    "div": lambda b, y, g, first, second: [g / second, -(g * (y / second))],
    "maximum": _extremum(larger_first=True),
    "minimum": _extremum(larger_first=False),
    "pow": _pow,
    "atan2": _atan2,
    "where": lambda b, y, g, mask, *_: [
        None,
        _choose(b, mask, g, 0.0),
        _choose(b, mask, 0.0, g),
    ],
    "clamp": _clamp,
    "neg": lambda b, y, g, x: [-g],
    "abs": lambda b, y, g, x: [g * b.apply("sign", x)],
    "sqrt": lambda b, y, g, x: [g / (y * 2.0)],
    "exp": lambda b, y, g, x: [g * y],
    "expm1": lambda b, y, g, x: [g * (y + 1.0)],
    "log": lambda b, y, g, x: [g / x],
    "log1p": lambda b, y, g, x: [g / (x + 1.0)],
    "sin": lambda b, y, g, x: [g * b.apply("cos", x)],
    "cos": lambda b, y, g, x: [-(g * b.apply("sin", x))],
    "erf": lambda b, y, g, x: [g * (b.apply("exp", -(x * x)) * (2 / math.sqrt(math.pi)))],
    "sigmoid": lambda b, y, g, x: [g * (y * (1.0 - y))],
    "tanh": lambda b, y, g, x: [g * (1.0 - y * y)],
    "softplus": lambda b, y, g, x: [
        _choose(b, b.apply("lt", 20.0, x), g, g * b.apply("sigmoid", x))
    ],
    "relu": lambda b, y, g, x: [_choose(b, b.apply("le", x, 0.0), 0.0, g)],
    "leaky_relu": lambda b, y, g, x, slope: [g * _choose(b, b.apply("lt", 0.0, x), 1.0, slope)],
    "elu": _elu,
}
