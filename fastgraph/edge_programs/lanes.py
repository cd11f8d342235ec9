"""How the lanes of a warp hold the values of an edge program, for kernels that are generated.

A warp takes a row, or a piece of a long one. Groups of its lanes take the edges in turn, and each
lane has some columns of every value: some that follow each other in memory where nothing is summed
over channels, and otherwise those that are as many apart as a group has lanes. So sums over the
channels of a head have the bits that the interpreter (``csrc/include/fastgraph/edge_values.cuh``)
gives them: where an extremum is compared with what the forward pass has found, one kernel may have
computed it in one pass, and the other in the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from fastgraph.edge_programs.lowering import OPERATIONS, REDUCTIONS, Code
from fastgraph.edge_programs.operations import (
    DOT,
    FOLD,
    FOLD_MAX,
    OUTER,
    PRODUCT,
    SPREAD,
    SUM_TILES,
    TILE,
)
from fastgraph.edge_programs.program import OF_CHANNELS

WARP = 32
_MOST_OPERANDS, _MOST_REDUCTIONS = 40, 20  # as in csrc/generated/edge_kernel.h
# Values of a lane in all that is alive at once; more would not stay in registers.
_MOST_VALUES = 224
# The same, up to which two edges are on their way at once, and a lane has two packs of a wide row.
_FEW_VALUES = 64
_CHUNK_VALUES = 128

_ELEMENTS = {
    torch.float32: ("float", "float"),
    torch.float64: ("double", "double"),
    torch.bfloat16: ("Bfloat16", "float"),
    torch.float16: ("Float16", "float"),
}


class UnfitError(Exception):
    """The program has no such kernel."""


class Value(NamedTuple):
    """A value of the program: what it is computed by, or the slot of an operand or number."""

    operation: str
    arguments: tuple[int, ...]
    width: int
    often: int
    slot: int


class Place(NamedTuple):
    """Which channel of a value belongs to a column of a row: ``column / divisor % modulus``.

    Attributes:
        base: the width of the row; 0 of a value that has one channel, which all lanes hold.
    """

    base: int
    divisor: int = 1
    modulus: int = 0


ONE = Place(0)


class Held(NamedTuple):
    """A variable with the values of a lane: one for each column, for each pack of them, or one."""

    name: str
    kind: int  # 0 one, 1 for each pack, 2 for each column

    def at(self, of_kind: int, pack: int) -> str:
        """The element that belongs to element ``i`` of a variable of another kind."""
        if self.kind == 0:
            return f"{self.name}[0]"
        if self.kind == of_kind or pack == 1:
            return f"{self.name}[i]"
        return f"{self.name}[i / {pack}]"


OPERAND, NUMBER = "operand", "number"
ROW, GATHERED, EDGE, PARAMETER, _CONSTANT, _OF_PROGRAM = range(6)


class Reduction(NamedTuple):
    """A reduction of :class:`fastgraph.edge_programs.lowering.Code`, by slots and outputs."""

    kind: str
    value: int
    factor: int
    row_factor: int
    out: int
    record: int
    scale: int


class Lanes:
    """Values of a program, and which columns of them each lane has.

    Args:
        code: the program.
        dtype: of its operands.

    Raises:
        UnfitError: it has no kernel of its own.
    """

    def __init__(self, code: Code, dtype: torch.dtype) -> None:
        self._slots: list[tuple[int, int]] = [tuple(slot) for slot in code.slots.tolist()]
        self._constants: list[float] = code.constants.tolist()
        self._element, self._sum = _ELEMENTS[dtype]
        self._vectors = (2, 1) if dtype == torch.float64 else (4, 2, 1)
        self._values: list[Value] = []
        self._of_slot: dict[int, int] = {}
        self._num_operands = sum(kind <= PARAMETER for kind, _ in self._slots)
        self._read(code.instructions.tolist())
        self._reductions = [
            Reduction(REDUCTIONS[kind], *rest) for kind, *rest in code.reductions.tolist()
        ]
        self._sums_channels = any(self._is_sum(value) for value in self._values)
        self._refuse_unfit()
        widths = [value.width for value in self._values]
        lanes = max(-(-width // self._pack(width)) for width in widths)
        self._lanes = min(WARP, power_of_two(lanes))
        self._groups = WARP // self._lanes
        self._plan_columns()
        self._bases: set[int] = set()

    def _read(self, instructions: Iterable[list[int]]) -> None:
        """Values in the order in which they are computed: slots are used again."""
        for slot, (kind, width) in enumerate(self._slots):
            if kind <= PARAMETER:
                often = {PARAMETER: 0, ROW: 1}.get(kind, 2)
                self._of_slot[slot] = self._add(OPERAND, (), width, often, slot)
            elif kind == _CONSTANT:
                self._of_slot[slot] = self._add(NUMBER, (), 1, 0, slot)
        for operation, out, *slots in instructions:
            if OPERATIONS[operation] in OF_CHANNELS:  # whose other numbers are no slots
                raise UnfitError
            taken = tuple(self._of_slot[slot] for slot in slots if slot >= 0)
            often = self._slots[out][0] - _OF_PROGRAM
            self._of_slot[out] = self._add(
                OPERATIONS[operation], taken, self._slots[out][1], often, out
            )

    def _add(
        self, operation: str, arguments: tuple[int, ...], width: int, often: int, slot: int
    ) -> int:
        self._values.append(Value(operation, arguments, width, often, slot))
        return len(self._values) - 1

    def _is_sum(self, value: Value) -> bool:
        return (
            value.operation in (FOLD, DOT) and self._values[value.arguments[0]].width != value.width
        )

    def _refuse_unfit(self) -> None:
        if any(value.operation in (PRODUCT, SUM_TILES, FOLD_MAX) for value in self._values):
            raise UnfitError
        if any(reduction.kind == OUTER for reduction in self._reductions):
            raise UnfitError
        if self._num_operands > _MOST_OPERANDS or len(self._reductions) > _MOST_REDUCTIONS:
            raise UnfitError

    def _pack(self, width: int) -> int:
        """Columns of a row that a lane has side by side."""
        if self._sums_channels:
            return 1
        return next(count for count in self._vectors if width % count == 0)

    def _plan_columns(self) -> None:
        """How many columns a lane has, and how many blocks share those of a row."""
        alive = sum(kind not in (PARAMETER, _CONSTANT) for kind, _ in self._slots)
        alive += 2 * len(self._reductions)
        widths = {self._values[self._of_slot[r.value]].width for r in self._reductions}
        (widest, *others) = sorted(widths, reverse=True)
        self._chunks, self._chunked = 1, 0
        count = max(self._count(value.width) for value in self._values)
        if not others and not self._sums_channels:
            pack = self._pack(widest)
            fit = [n for n in (8, 4, 2, 1) if n * pack <= 8 and alive * n * pack <= _CHUNK_VALUES]
            packs = fit[0] if fit else 1
            if packs * pack < count:
                self._chunked = widest
                self._packs_of_chunk = packs
                self._chunks = -(-widest // (packs * pack * self._lanes))
                count = packs * pack
        if alive * count > _MOST_VALUES:
            raise UnfitError
        self._unrolled = 2 if alive * count <= _FEW_VALUES else 1

    def _packs(self, base: int) -> int:
        """Packs of a row that a lane has."""
        if base == self._chunked:
            return self._packs_of_chunk
        return -(-base // (self._lanes * self._pack(base)))

    def _count(self, base: int) -> int:
        return -(-base // (self._lanes * self._pack(base))) * self._pack(base)

    # Places of values.

    def _through(self, place: Place, divisor: int) -> Place:
        """The place of a value of which each channel belongs to so many of another."""
        if divisor == 1:
            return place
        if place.modulus:
            raise UnfitError
        return place._replace(divisor=place.divisor * divisor)

    def _natural(self, number: int) -> Place | None:
        """The only place where a value is: that of the sums over channels that it is made of."""
        value = self._values[number]
        if value.width == 1 or not value.arguments:
            return None
        if self._is_sum(value):
            width = self._values[value.arguments[0]].width
            return Place(width, width // value.width)
        found = {self._natural(argument) for argument in value.arguments} - {None}
        if value.operation == SPREAD:
            whole = Place(value.width, value.width // self._values[value.arguments[0]].width)
            if found - {whole}:
                raise UnfitError
            return None
        if len(found) > 1 or (found and value.operation == TILE):
            raise UnfitError
        return next(iter(found), None)

    def _own_place(self, number: int) -> Place:
        width = self._values[number].width
        return ONE if width == 1 else self._natural(number) or Place(width)

    def _elements(self, kind: int, place: Place) -> int:
        packs = 1 if kind == 0 else self._packs(place.base)
        return packs * (self._pack(place.base) if kind == 2 else 1)

    def _kind(self, place: Place) -> int:
        if place.base == 0:
            return 0
        return 1 if place.divisor % self._pack(place.base) == 0 and not place.modulus else 2

    def _column(self, place: Place, kind: int, element: str = "i") -> str:
        """The column of an element, or the first of a pack."""
        self._bases.add(place.base)
        pack = self._pack(place.base)
        first, apart = f"first_{place.base}", self._lanes * pack
        if pack == 1 or kind == 1:
            return f"({first} + {element} * {apart})"
        return f"({first} + {element} / {pack} * {apart} + {element} % {pack})"

    def _channel(self, place: Place, kind: int) -> str:
        channel = self._column(place, kind)
        if place.divisor > 1:
            channel = f"({channel} / {place.divisor})"
        return f"{channel} % {place.modulus}" if place.modulus else channel

    def _is_whole(self, base: int) -> bool:
        """True if no lane has columns beyond the last one."""
        return self._packs(base) * self._pack(base) * self._lanes * self._chunks == base


def power_of_two(count: int) -> int:
    """The least that is as large."""
    return 1 << (count - 1).bit_length()
