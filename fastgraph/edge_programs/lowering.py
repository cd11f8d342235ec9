"""Edge programs as native kernels take them: values in slots, and reductions of products.

A value that depends on parameters alone is computed once, one that depends on a row besides once
for the row; only what is left is computed for every edge, in registers that hold a few edges each.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

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
    ROUND,
    SLICE,
    SOFTMAX,
    SOFTMAX_MAX,
    SOFTMAX_SCALE,
    SPREAD,
    SUM_TILES,
    TILE,
)
from fastgraph.edge_programs.program import OF_CHANNELS, PLACES, Output, Program

GATE, SLOPE = "gate", "slope"
"""The second of two values, or 0 where the first is not above it: the gradient of ``relu``; and 1,
or the second where the first is not above 0: the slope of ``leaky_relu``."""

OPERATIONS = (
    *(*ELEMENTWISE, ROUND, SPREAD, TILE, FOLD, SUM_TILES, DOT, GATE, SLOPE, PRODUCT),
    *(FOLD_MAX, FIRST, SLICE, PAD),
)
"""The order in which ``csrc/include/fastgraph/edge_code.h`` numbers operations."""

REDUCTIONS = ("sum", "mean", "max", "min", "edge", "total", SOFTMAX, OUTER)
"""The same of reductions; records are part of what they belong to."""

# Kinds of slots: an operand in each of the places, then what is computed, by how often.
_CONSTANT, _OF_PROGRAM, _OF_ROW, _OF_EDGE = range(len(PLACES), len(PLACES) + 4)


class Code(NamedTuple):
    """A program for native functions; -1 stands for nothing.

    Attributes:
        slots: int32 ``[slots, 2]``, kind and width of each. Operands come first, and behind them
            those that are the transposes of some.
        constants: float64 ``[slots]``, the numbers in constant ones.
        instructions: int32 ``[instructions, 5]``: operation, slot of the result, and of three
            arguments. All have the width of the result, but for those of ``spread``, ``tile``,
            ``fold``, ``fold_max``, ``sum_tiles``, ``dot`` and ``product``. An element-wise function
            of one value takes the sum of two if there is a second. ``first``, ``slice`` and ``pad``
            have the number of heads, and the first channel of each, in the place of others.
        reductions: int32 ``[reductions, 7]``: kind; slots of the value, of a factor of the same or
            a narrower width, and of one that a row has; the numbers of the output and of two
            records, the first of ties. Of a softmax: slots of the value, of the scores and of their
            exponentials; the records are the largest scores and the scales. Of outer products the
            factor is the second value.
    """

    slots: Tensor
    constants: Tensor
    instructions: Tensor
    reductions: Tensor


class Transpose(NamedTuple):
    """A matrix that kernels take besides: the transpose of an operand.

    Attributes:
        operand: the number of the operand.
        rows: of the matrix that it is.
    """

    operand: int
    rows: int

    def of(self, operands: Sequence[Tensor]) -> Tensor:
        """The matrix of a program's operands, with all its numbers in one dimension."""
        return operands[self.operand].view(self.rows, -1).t().reshape(-1)


class Lowered(NamedTuple):
    """A program as native functions take it, and what they take besides its operands."""

    code: Code
    transposes: tuple[Transpose, ...]

    def operands(self, given: Sequence[Tensor]) -> list[Tensor]:
        """The operands of native functions, of those of the program."""
        return [*given, *(transpose.of(given) for transpose in self.transposes)]


class _Node(NamedTuple):
    """A value: the operation, or the name of an operand, and what makes it."""

    operation: str
    arguments: tuple[int, ...]
    width: int
    constant: float
    place: tuple[int, ...] = ()  # the number of heads and the first channel of each


class _Reduction(NamedTuple):
    """A reduction of nodes; see :class:`Code`."""

    kind: str
    value: int
    factor: int
    row_factor: int
    out: int
    record: int = -1
    scale: int = -1


@functools.lru_cache(maxsize=1024)
def lower(program: Program, *, rounds: bool, by_terms: bool = False) -> Lowered:
    """A program as native functions take it.

    Args:
        program: any.
        rounds: whether the dtype is narrower than sums.
        by_terms: whether sums of products may be summed product by product, as the kernels of CPUs
            can: reductions of one output, each of which goes on with the sums of the one before.
    """
    lowering = _Lowering(program, rounds, by_terms)
    return Lowered(lowering.code(), tuple(lowering.transposes))


class _Lowering:
    def __init__(self, program: Program, rounds: bool, by_terms: bool) -> None:
        self._program = program
        self._by_terms = by_terms
        self._nodes: list[_Node] = []
        self._numbers: dict[_Node, int] = {}
        # How often values change: 0 never, 1 with the row, 2 with the edge.
        self._often: list[int] = []
        for operand in program.operands:
            node = _Node(operand.name, (), operand.width, 0.0)
            self._number(node, {"parameter": 0, "row": 1}.get(operand.place, 2))
        self.transposes: dict[Transpose, int] = {}
        for instruction in program.instructions:
            if instruction.operation == PRODUCT_T:
                transpose = Transpose(instruction.arguments[1], instruction.width)
                width = program.width(transpose.operand)
                node = _Node(f"{program.name(transpose.operand)} {transpose.rows}", (), width, 0.0)
                self.transposes[transpose] = self._number(node, 0)
        # The nodes that are given, by operands or by what is made of them before.
        self._num_given = len(self._nodes)
        # The node of each value of the program.
        self._of_value: list[int] = []
        self._of_value = list(range(len(program.operands)))
        for instruction in program.instructions:
            arguments = [self._of_value[a] for a in instruction.arguments]
            width = instruction.width
            if instruction.operation == DETACH or (instruction.operation == ROUND and not rounds):
                self._of_value += arguments
                continue
            operation = instruction.operation
            if operation == PRODUCT_T:
                operation = PRODUCT
                arguments[1] = self.transposes[Transpose(instruction.arguments[1], width)]
            if instruction.operation == DOT:
                widest = max(self._nodes[a].width for a in arguments)
                arguments = [self._spread(a, widest) for a in arguments]
            elif instruction.operation in ELEMENTWISE:
                arguments = [self._spread(a, width) for a in arguments]
            made = operation, arguments, width, instruction.constant
            place = (instruction.heads, instruction.start) if operation in OF_CHANNELS else ()
            self._of_value.append(self._node(*made, place))
        self._reductions = list(self._reduced())

    def code(self) -> Code:
        """The code of all that reductions need."""
        self._fuse()
        needed = self._needed()
        last = self._last_uses(needed)
        count = self._num_given
        slots = [(PLACES.index(o.place), o.width) for o in self._program.operands]
        parameter = PLACES.index("parameter")
        slots += [(parameter, self._nodes[number].width) for number in self.transposes.values()]
        constants = [0.0] * count
        slot_of = {number: number for number in range(count)}
        free: dict[int, list[int]] = {}
        instructions = []

        def new_slot(kind: int, width: int, constant: float = 0.0) -> int:
            slots.append((kind, width))
            constants.append(constant)
            return len(slots) - 1

        for number in needed:
            node, often = self._nodes[number], self._often[number]
            if number < count:
                continue
            if node.operation == CONSTANT:
                slot_of[number] = new_slot(_CONSTANT, 1, node.constant)
                continue
            arguments = [slot_of[a] for a in node.arguments]
            dying = [a for a in set(node.arguments) if last[a] == number and a >= count]
            released = [slot_of[a] for a in dying if slots[slot_of[a]][0] == _OF_EDGE]
            # An element-wise result may take the place of an argument.
            in_place = node.operation in ELEMENTWISE or node.operation in (ROUND, GATE, SLOPE)
            if in_place:
                _release(free, slots, released)
            if often < 2:
                slot = new_slot(_OF_ROW if often else _OF_PROGRAM, node.width)
            elif free.get(node.width):
                slot = free[node.width].pop()
            else:
                slot = new_slot(_OF_EDGE, node.width)
            if not in_place:
                _release(free, slots, released)
            slot_of[number] = slot
            padded = [*arguments, *node.place, -1, -1, -1][:3]
            instructions.append([OPERATIONS.index(node.operation), slot, *padded])
        reductions = []
        for r in self._reductions:
            taken = [-1 if node < 0 else slot_of[node] for node in r[1:4]]
            if r.kind == SOFTMAX:
                taken[2] = new_slot(_OF_EDGE, self._nodes[r.factor].width)
            reductions.append([REDUCTIONS.index(r.kind), *taken, *r[4:]])
        return Code(
            torch.tensor(slots, dtype=torch.int32, device="cpu"),
            torch.tensor(constants, dtype=torch.float64, device="cpu"),
            torch.tensor(instructions, dtype=torch.int32, device="cpu").view(-1, 5),
            torch.tensor(reductions, dtype=torch.int32, device="cpu"),
        )

    def _number(self, node: _Node, often: int) -> int:
        number = self._numbers.setdefault(node, len(self._nodes))
        if number == len(self._nodes):
            self._nodes.append(node)
            self._often.append(often)
        return number

    def _node(
        self,
        operation: str,
        arguments: Iterable[int],
        width: int,
        constant: float = 0.0,
        place: tuple[int, ...] = (),
    ) -> int:
        given = tuple(arguments)
        often = max((self._often[a] for a in given), default=0)
        return self._number(_Node(operation, given, width, constant, place), often)

    def _spread(self, number: int, width: int) -> int:
        if self._nodes[number].width == width:
            return number
        return self._node(SPREAD, (number,), width)

    def _reduced(self) -> Iterable[_Reduction]:
        outputs = list(enumerate(self._program.outputs))
        extrema: dict[tuple[str, int], tuple[list[int], list[int]]] = {}
        records = {ties: kind for kind, ties in EXTREMA.items()}
        records_of_scores: dict[int, tuple[list[int], list[int]]] = {}
        softmaxes: dict[int, list[tuple[int, int]]] = {}
        for number, output in outputs:
            kind = records.get(output.reduction, output.reduction)
            if kind in (SOFTMAX_MAX, SOFTMAX_SCALE):
                kept = records_of_scores.setdefault(self._of_value[output.value], ([], []))
                kept[kind == SOFTMAX_SCALE].append(number)
            elif kind == SOFTMAX:
                score = self._of_value[output.score]
                softmaxes.setdefault(score, []).append((self._of_value[output.value], number))
            elif kind in EXTREMA:
                found = extrema.setdefault((kind, output.value), ([], []))
                found[output.reduction in records].append(number)
            elif kind == OUTER:
                first, second = (self._of_value[v] for v in output.values)
                yield _Reduction(kind, first, second, -1, number)
            elif kind == "edge":
                yield _Reduction(kind, self._of_value[output.value], -1, -1, number)
            else:
                yield from self._sums(number, output)
        for (kind, value), own in extrema.items():
            for out, ties in zip_longest(*own, fillvalue=-1):
                yield _Reduction(kind, self._of_value[value], -1, -1, out, ties)
        for score in softmaxes | records_of_scores:
            # Each of several that have the same scores writes a record of theirs.
            kept = records_of_scores.get(score, ([], []))
            weighted = softmaxes.get(score, [])
            for of_value, *taken in zip_longest(weighted, *kept, fillvalue=None):
                value, number = of_value or (score, -1)
                largest, scale = (-1 if record is None else record for record in taken)
                yield _Reduction(SOFTMAX, value, score, -1, number, largest, scale)

    def _sums(self, number: int, output: Output) -> Iterable[_Reduction]:
        """A sum whose products reductions compute, and of whose rows only the sum is scaled."""
        is_split = self._by_terms and output.reduction in ("sum", "mean")
        terms = self._terms(output.value) if is_split else [output.value]
        products = [Counter(self._of_value[f] for f in self._factors(term)) for term in terms]
        if all(self._often[f] < 2 for product in products for f in product):
            yield _Reduction(output.reduction, self._of_value[output.value], -1, -1, number)
            return
        # What all have in common scales the sum.
        common = functools.reduce(operator.and_, products)
        of_row = [f for f in common.elements() if self._often[f] < 2]
        width = self._program.width(output.value)
        row_factor = self._product([self._spread(f, width) for f in of_row])
        for product in products:
            rest = list((product - Counter(of_row)).elements())
            value, factor = self._in_two(rest, width)
            yield _Reduction(output.reduction, value, factor, row_factor, number)

    def _in_two(self, factors: list[int], width: int) -> tuple[int, int]:
        """The product of factors as that of two: of a value of some width, and of a factor."""
        narrow = [f for f in factors if self._nodes[f].width < width]
        wide = [f for f in factors if self._nodes[f].width == width]
        widest = max((self._nodes[f].width for f in narrow), default=1)
        if not wide or any(widest % self._nodes[f].width for f in narrow):
            wide += [self._spread(f, width) for f in narrow]
            narrow = []
        if not narrow and len(wide) > 1:
            narrow = [wide.pop()]
        spread = [self._spread(f, max(self._nodes[f].width for f in narrow)) for f in narrow]
        return self._product(wide), self._product(spread)

    def _product(self, factors: list[int]) -> int:
        """The product of nodes of one width; -1 for none."""
        if not factors:
            return -1
        product, *others = factors
        for factor in others:
            product = self._node("mul", (product, factor), self._nodes[product].width)
        return product

    def _factors(self, value: int) -> list[int]:
        """The values whose product a value is.

        Whatever other outputs there are, so that bits do not depend on them.
        """
        place = value - len(self._program.operands)
        if place < 0:
            return [value]
        instruction = self._program.instructions[place]
        if instruction.operation != "mul":
            return [value]
        return [f for argument in instruction.arguments for f in self._factors(argument)]

    def _terms(self, value: int) -> list[int]:
        """The values whose sum a value is, if each is a product with a number for some channels.

        Of these the products need not be computed before they are summed.
        """
        terms = self._addends(value)
        width = self._program.width(value)
        for term in terms:
            factors = self._factors(term)
            widths = [self._program.width(f) for f in factors]
            has_narrow = any(
                w < width and self._often[self._of_value[f]] == 2
                for f, w in zip(factors, widths, strict=True)
            )
            if width not in widths or not has_narrow:
                return [value]
        return terms

    def _addends(self, value: int) -> list[int]:
        place = value - len(self._program.operands)
        if place < 0:
            return [value]
        instruction = self._program.instructions[place]
        if instruction.operation != "add":
            return [value]
        return [a for argument in instruction.arguments for a in self._addends(argument)]

    def _fuse(self) -> None:
        """Make one node of those that only follow each other: each reads and writes registers."""
        for number in self._needed():
            node = self._nodes[number]
            if node.operation == "where":
                self._nodes[number] = self._gradient(node)
        uses = self._uses()
        for number in self._needed():
            node = self._nodes[number]
            if node.operation not in ELEMENTWISE or len(node.arguments) != 1:
                continue
            (argument,) = node.arguments
            summed = self._nodes[argument]
            if summed.operation == "add" and uses[argument] == 1 and self._often[argument] == 2:
                self._nodes[number] = node._replace(arguments=summed.arguments)

    def _gradient(self, choice: _Node) -> _Node:
        """A choice as one instruction, if it is the gradient of ``relu`` or such a slope."""
        mask, first, second = choice.arguments
        compared = self._nodes[mask]
        if compared.operation == "le" and self._is_number(first, 0):
            x, limit = compared.arguments
            if self._is_number(limit, 0):
                return choice._replace(operation=GATE, arguments=(x, second))
        if compared.operation == "lt" and self._is_number(first, 1):
            limit, x = compared.arguments
            if self._is_number(limit, 0):
                return choice._replace(operation=SLOPE, arguments=(x, second))
        return choice

    def _is_number(self, value: int, number: float) -> bool:
        node = self._nodes[value]
        if node.operation == SPREAD:
            node = self._nodes[node.arguments[0]]
        return node.operation == CONSTANT and node.constant == number

    def _uses(self) -> Counter[int]:
        """How often each node is taken."""
        taken = Counter(n for r in self._reductions for n in r[1:4])
        for number in self._needed():
            taken.update(self._nodes[number].arguments)
        return taken

    def _needed(self) -> list[int]:
        """The nodes that reductions need, each behind its arguments, and all operands."""
        needed = set(range(self._num_given))
        waiting = [n for r in self._reductions for n in r[1:4] if n >= 0]
        while waiting:
            number = waiting.pop()
            if number not in needed:
                needed.add(number)
                waiting.extend(self._nodes[number].arguments)
        return sorted(needed)  # a node is numbered behind its arguments

    def _last_uses(self, needed: list[int]) -> dict[int, int]:
        """The last node that takes each node; what a reduction takes is taken to the end."""
        last = dict.fromkeys(needed, -1)
        for number in needed:
            for argument in self._nodes[number].arguments:
                last[argument] = number
        for reduction in self._reductions:
            for node in reduction[1:4]:
                if node >= 0:
                    last[node] = len(self._nodes)
        return last


def _release(free: dict[int, list[int]], slots: list[tuple[int, int]], released: list[int]) -> None:
    for slot in released:
        free.setdefault(slots[slot][1], []).append(slot)
