"""The CUDA source of a kernel that runs one edge program, with its values in registers.

A warp takes a row, or a piece of a long one. Groups of its lanes take the edges in turn, and each
lane has some columns of every value: some that follow each other in memory where nothing is summed
over channels, and otherwise those that are as many apart as a group has lanes. So sums over the
channels of a head have the bits that the interpreter (``csrc/include/fastgraph/edge_values.cuh``)
gives them: where an extremum is compared with what the forward pass has found, one kernel may have
computed it in one pass, and the other in the other. What differs is the order in which the edges of
a row are added up.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from importlib import resources
from typing import NamedTuple

import torch

from fastgraph.edge_programs.lowering import GATE, OPERATIONS, REDUCTIONS, SLOPE, Code
from fastgraph.edge_programs.operations import (
    DOT,
    ELEMENTWISE,
    FOLD,
    FOLD_MAX,
    OUTER,
    PRODUCT,
    ROUND,
    SOFTMAX,
    SPREAD,
    SUM_TILES,
    TILE,
)
from fastgraph.edge_programs.program import OF_CHANNELS

NAME = "edge_kernel"

_WARP = 32
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

_TRUTH = "({} ? A(1) : A(0))"
_EXPRESSIONS = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "maximum": "({0} > {1} || {0} != {0} ? {0} : {1})",
    "minimum": "({0} < {1} || {0} != {0} ? {0} : {1})",
    "pow": "pow_of({0}, {1})",
    "atan2": "atan2_of({0}, {1})",
    "eq": _TRUTH.format("{0} == {1}"),
    "ne": _TRUTH.format("{0} != {1}"),
    "lt": _TRUTH.format("{0} < {1}"),
    "le": _TRUTH.format("{0} <= {1}"),
    "where": "({0} != A(0) ? {1} : {2})",
    "clamp": "clamped({0}, {1}, {2})",
    "neg": "-{0}",
    "abs": "fabs_of({0})",
    "sign": f"{_TRUTH.format('{0} > A(0)')} - {_TRUTH.format('{0} < A(0)')}",
    "sqrt": "sqrt_of({0})",
    "exp": "exp_of({0})",
    "expm1": "expm1_of({0})",
    "log": "log_of({0})",
    "log1p": "log1p_of({0})",
    "sin": "sin_of({0})",
    "cos": "cos_of({0})",
    "erf": "erf_of({0})",
    "sigmoid": "A(1) / (A(1) + exp_of(-{0}))",
    "tanh": "tanh_of({0})",
    "softplus": "({0} > A(20) ? {0} : log1p_of(exp_of({0})))",
    "relu": "({0} <= A(0) ? A(0) : {0})",
    "leaky_relu": "({0} > A(0) ? {0} : {0} * {1})",
    "elu": "({0} > A(0) ? {0} : {1} * expm1_of({0}))",
    ROUND: "rounded<T>({0})",
    GATE: "({0} <= A(0) ? A(0) : {1})",
    SLOPE: "({0} > A(0) ? A(1) : {1})",
}


class Source(NamedTuple):
    """A kernel for one program.

    Attributes:
        text: its source, without what :func:`prelude` gives.
        chunks: blocks of the grid in its second direction, each of which has some of the columns.
    """

    text: str
    chunks: int


@functools.cache
def prelude() -> str:
    """The part that the sources of all kernels have in common."""
    folder = resources.files("fastgraph") / "csrc" / "generated"
    texts = [(folder / f"edge_kernel.{kind}").read_text() for kind in ("h", "cuh")]
    return "\n".join(text.replace("#pragma once", "") for text in texts)


def cuda_source(code: Code, dtype: torch.dtype) -> Source | None:
    """A kernel for a program; ``None`` where it has to be interpreted.

    That is where it has products, sums over tiles, maxima or parts of heads, sums over heads whose
    lanes are no power of two, values of heads that are asked for in two layouts, or more than
    registers hold.

    Args:
        code: the program.
        dtype: of its operands.
    """
    try:
        return _Writer(code, dtype).source()
    except _UnfitError:
        return None


class _UnfitError(Exception):
    """The program has no such kernel."""


class _Value(NamedTuple):
    """A value of the program: what it is computed by, or the slot of an operand or number."""

    operation: str
    arguments: tuple[int, ...]
    width: int
    often: int
    slot: int


class _Place(NamedTuple):
    """Which channel of a value belongs to a column of a row: ``column / divisor % modulus``.

    Attributes:
        base: the width of the row; 0 of a value that has one channel, which all lanes hold.
    """

    base: int
    divisor: int = 1
    modulus: int = 0


_ONE = _Place(0)


class _Held(NamedTuple):
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


_OPERAND, _NUMBER = "operand", "number"
_ROW, _GATHERED, _EDGE, _PARAMETER, _CONSTANT, _OF_PROGRAM = range(6)


class _Writer:
    def __init__(self, code: Code, dtype: torch.dtype) -> None:
        self._slots: list[tuple[int, int]] = [tuple(slot) for slot in code.slots.tolist()]
        self._constants: list[float] = code.constants.tolist()
        self._element, self._sum = _ELEMENTS[dtype]
        self._vectors = (2, 1) if dtype == torch.float64 else (4, 2, 1)
        self._values: list[_Value] = []
        self._of_slot: dict[int, int] = {}
        self._num_operands = sum(kind <= _PARAMETER for kind, _ in self._slots)
        self._read(code.instructions.tolist())
        self._reductions = [(REDUCTIONS[kind], *rest) for kind, *rest in code.reductions.tolist()]
        self._sums_channels = any(self._is_sum(value) for value in self._values)
        self._refuse_unfit()
        widths = [value.width for value in self._values]
        lanes = max(-(-width // self._pack(width)) for width in widths)
        self._lanes = min(_WARP, _power_of_two(lanes))
        self._groups = _WARP // self._lanes
        self._plan_columns()
        self._held: dict[tuple[int, _Place], _Held] = {}
        self._bases: set[int] = set()
        self._of_rows: list[str] = []
        self._of_edges: list[str] = []
        self._added: list[str] = []
        self._state: list[str] = []
        self._finish: list[str] = []
        self._kept: list[str] = []
        self._end: list[str] = []

    def _read(self, instructions: Iterable[list[int]]) -> None:
        """Values in the order in which they are computed: slots are used again."""
        for slot, (kind, width) in enumerate(self._slots):
            if kind <= _PARAMETER:
                often = {_PARAMETER: 0, _ROW: 1}.get(kind, 2)
                self._of_slot[slot] = self._add(_OPERAND, (), width, often, slot)
            elif kind == _CONSTANT:
                self._of_slot[slot] = self._add(_NUMBER, (), 1, 0, slot)
        for operation, out, *slots in instructions:
            if OPERATIONS[operation] in OF_CHANNELS:  # whose other numbers are no slots
                raise _UnfitError
            taken = tuple(self._of_slot[slot] for slot in slots if slot >= 0)
            often = self._slots[out][0] - _OF_PROGRAM
            self._of_slot[out] = self._add(
                OPERATIONS[operation], taken, self._slots[out][1], often, out
            )

    def _add(
        self, operation: str, arguments: tuple[int, ...], width: int, often: int, slot: int
    ) -> int:
        self._values.append(_Value(operation, arguments, width, often, slot))
        return len(self._values) - 1

    def _is_sum(self, value: _Value) -> bool:
        return (
            value.operation in (FOLD, DOT) and self._values[value.arguments[0]].width != value.width
        )

    def _refuse_unfit(self) -> None:
        if any(value.operation in (PRODUCT, SUM_TILES, FOLD_MAX) for value in self._values):
            raise _UnfitError
        if any(reduction[0] == OUTER for reduction in self._reductions):
            raise _UnfitError
        if self._num_operands > _MOST_OPERANDS or len(self._reductions) > _MOST_REDUCTIONS:
            raise _UnfitError

    def _pack(self, width: int) -> int:
        """Columns of a row that a lane has side by side."""
        if self._sums_channels:
            return 1
        return next(count for count in self._vectors if width % count == 0)

    def _plan_columns(self) -> None:
        """How many columns a lane has, and how many blocks share those of a row."""
        alive = sum(kind not in (_PARAMETER, _CONSTANT) for kind, _ in self._slots)
        alive += 2 * len(self._reductions)
        widths = {self._values[self._of_slot[r[1]]].width for r in self._reductions}
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
            raise _UnfitError
        self._unrolled = 2 if alive * count <= _FEW_VALUES else 1

    def _packs(self, base: int) -> int:
        """Packs of a row that a lane has."""
        if base == self._chunked:
            return self._packs_of_chunk
        return -(-base // (self._lanes * self._pack(base)))

    def _count(self, base: int) -> int:
        return -(-base // (self._lanes * self._pack(base))) * self._pack(base)

    # Places of values.

    def _through(self, place: _Place, divisor: int) -> _Place:
        """The place of a value of which each channel belongs to so many of another."""
        if divisor == 1:
            return place
        if place.modulus:
            raise _UnfitError
        return place._replace(divisor=place.divisor * divisor)

    def _natural(self, number: int) -> _Place | None:
        """The only place where a value is: that of the sums over channels that it is made of."""
        value = self._values[number]
        if value.width == 1 or not value.arguments:
            return None
        if self._is_sum(value):
            width = self._values[value.arguments[0]].width
            return _Place(width, width // value.width)
        found = {self._natural(argument) for argument in value.arguments} - {None}
        if value.operation == SPREAD:
            whole = _Place(value.width, value.width // self._values[value.arguments[0]].width)
            if found - {whole}:
                raise _UnfitError
            return None
        if len(found) > 1 or (found and value.operation == TILE):
            raise _UnfitError
        return next(iter(found), None)

    def _own_place(self, number: int) -> _Place:
        width = self._values[number].width
        return _ONE if width == 1 else self._natural(number) or _Place(width)

    def _elements(self, kind: int, place: _Place) -> int:
        packs = 1 if kind == 0 else self._packs(place.base)
        return packs * (self._pack(place.base) if kind == 2 else 1)

    def _kind(self, place: _Place) -> int:
        if place.base == 0:
            return 0
        return 1 if place.divisor % self._pack(place.base) == 0 and not place.modulus else 2

    def _column(self, place: _Place, kind: int, element: str = "i") -> str:
        """The column of an element, or the first of a pack."""
        self._bases.add(place.base)
        pack = self._pack(place.base)
        first, apart = f"first_{place.base}", self._lanes * pack
        if pack == 1 or kind == 1:
            return f"({first} + {element} * {apart})"
        return f"({first} + {element} / {pack} * {apart} + {element} % {pack})"

    def _channel(self, place: _Place, kind: int) -> str:
        channel = self._column(place, kind)
        if place.divisor > 1:
            channel = f"({channel} / {place.divisor})"
        return f"{channel} % {place.modulus}" if place.modulus else channel

    def _is_whole(self, base: int) -> bool:
        """True if no lane has columns beyond the last one."""
        return self._packs(base) * self._pack(base) * self._lanes * self._chunks == base

    # Values.

    def _value(self, number: int, place: _Place) -> _Held:
        """The variable that holds a value, written where it was not there yet."""
        value = self._values[number]
        if value.width == 1:
            place = _ONE
        if value.operation == SPREAD:
            (argument,) = value.arguments
            divisor = value.width // self._values[argument].width
            return self._value(argument, self._through(place, divisor))
        if value.operation == TILE and value.width != self._values[value.arguments[0]].width:
            (argument,) = value.arguments
            if place.modulus:
                raise _UnfitError
            return self._value(argument, place._replace(modulus=self._values[argument].width))
        key = number, place
        if key not in self._held:
            name = f"v{number}_{len(self._held)}"
            lines = self._of_edges if value.often == 2 else self._of_rows
            if value.operation == _OPERAND:
                kind = self._load(name, value, place, lines)
            elif self._is_sum(value):
                kind = self._sum_heads(name, value, place, lines)
            else:
                kind = self._compute(name, value, place, lines)
            self._held[key] = _Held(name, kind)
        return self._held[key]

    def _load(self, name: str, value: _Value, place: _Place, lines: list[str]) -> int:
        kind, width = self._slots[value.slot]
        row = {_ROW: "row", _GATHERED: "node", _EDGE: "edge", _PARAMETER: "0"}[kind]
        of_row = f"operand{value.slot} + static_cast<long long>({row}) * {width}"
        own, pack = self._kind(place), self._pack(place.base) if place.base else 1
        if own == 0:
            lines.append(f"const A {name}[1] = {{widened(*({of_row}))}};")
            return own
        lines.append(f"A {name}[{self._elements(own, place)}];")
        whole = self._is_whole(place.base)
        if place.divisor == 1 and not place.modulus and pack > 1:
            column = self._column(place, 1)
            load = f"load<{pack}>({of_row} + {column}, {name} + i * {pack})"
            zero = f"for (int k = 0; k < {pack}; ++k) {name}[i * {pack} + k] = 0"
            body = f"{load};" if whole else f"if ({column} < {width}) {load}; else {zero};"
            lines.append(_loop(self._packs(place.base), f"{{ {body} }}"))
            return 2
        load = f"widened(({of_row})[{self._channel(place, own)}])"
        guarded = load if whole else f"{self._column(place, own)} < {place.base} ? {load} : A(0)"
        lines.append(_loop(self._elements(own, place), f"{name}[i] = {guarded};"))
        return own

    def _compute(self, name: str, value: _Value, place: _Place, lines: list[str]) -> int:
        if value.operation == _NUMBER:
            number = self._constants[value.slot]
            lines.append(f"const A {name}[1] = {{{_literal(number)}}};")
            return 0
        taken = [self._value(argument, place) for argument in value.arguments]
        kind = max(held.kind for held in taken)
        pack = self._pack(place.base) if place.base else 1
        arguments = [held.at(kind, pack) for held in taken]
        operation = value.operation
        if operation in (FOLD, SUM_TILES, TILE):
            expression = arguments[0]
        elif operation == DOT:
            expression = f"{arguments[0]} * {arguments[1]}"
        else:
            is_of_one = operation == ROUND or (
                operation in ELEMENTWISE and ELEMENTWISE[operation].arity == 1
            )
            if is_of_one and len(arguments) == 2:
                arguments = [f"({arguments[0]} + {arguments[1]})"]
            if is_of_one:
                lines.append(f"A {name}[{self._elements(kind, place)}];")
                expression = _EXPRESSIONS[operation].format("x")
                body = f"{{ const A x = {arguments[0]}; {name}[i] = {expression}; }}"
                lines.append(_loop(self._elements(kind, place), body))
                return kind
            expression = _EXPRESSIONS[operation].format(*arguments)
        lines.append(f"A {name}[{self._elements(kind, place)}];")
        lines.append(_loop(self._elements(kind, place), f"{name}[i] = {expression};"))
        return kind

    def _sum_heads(self, name: str, value: _Value, place: _Place, lines: list[str]) -> int:
        """The sum over the channels of each head, in the order in which the interpreter adds."""
        width = self._values[value.arguments[0]].width
        of_head, whole = width // value.width, _Place(width)
        if value.width > 1 and place != _Place(width, of_head):
            raise _UnfitError
        lanes = min(_WARP, _power_of_two(of_head))
        is_even = of_head == lanes or of_head % _WARP == 0
        if value.width > 1 and not is_even:
            raise _UnfitError
        taken = [self._value(argument, whole) for argument in value.arguments]
        count = self._packs(width)
        at_once = count if value.width == 1 else max(of_head // self._lanes, 1)
        term = "{}" if value.operation == FOLD else "multiply_add({}, {}, sum)"
        term = term.format(*(held.at(2, 1).replace("[i]", "[k + j]") for held in taken))
        add = f"sum += {term};" if value.operation == FOLD else f"sum = {term};"
        if value.width == 1 and not self._is_whole(width):
            # What is computed of the zeros beyond the last channel may be anything.
            add = f"if ({self._column(whole, 2, '(k + j)')} < {width}) {add}"
        size = 1 if value.width == 1 else count
        lines.append(f"A {name}[{size}];")
        body = [f"for (int k = 0; k < {count}; k += {at_once}) {{", "A sum = 0;"]
        body += ["#pragma unroll", f"for (int j = 0; j < {at_once}; ++j) {{ {add} }}"]
        # All lanes have the only sum, those too that none of its channels belong to.
        bits = (self._lanes if value.width == 1 else min(lanes, self._lanes)) // 2
        while bits:
            body.append(f"sum += __shfl_xor_sync(kAllLanes, sum, {bits});")
            bits //= 2
        body += ["#pragma unroll", f"for (int j = 0; j < {min(at_once, size)}; ++j)"]
        body += [f"{name}[k + j] = sum;", "}"]
        lines += ["#pragma unroll", *body]
        return 0 if value.width == 1 else 2

    # Reductions.

    def source(self) -> Source:
        for number, reduction in enumerate(self._reductions):
            kind, value, factor, row_factor, out, record, scale = reduction
            assert isinstance(kind, str)
            numbers = [self._of_slot.get(slot, -1) for slot in (value, factor, row_factor)]
            if kind == SOFTMAX:
                self._softmax(number, numbers[0], numbers[1], out, record, scale)
            elif kind in ("max", "min"):
                self._extremum(number, kind, numbers[0], out, record)
            elif kind == "edge":
                self._edge(number, numbers[0])
            else:
                self._sum_rows(number, kind, *numbers)
        return Source("\n".join(self._lines()) + "\n", self._chunks)

    def _layout(self, number: int) -> tuple[_Place, int, int]:
        """Where a result is, and how many values of it a lane has, of which kind."""
        place = self._own_place(number)
        kind = 0 if place.base == 0 else 2
        return place, self._elements(kind, place), kind

    def _holds(self, place: _Place, divisor: int = 1) -> str:
        """The condition that this lane has element ``i`` of a result, and no lane before it."""
        if place.base == 0:
            return "lane == 0"
        column, apart = self._column(place, 2), place.divisor * divisor
        own = [] if self._is_whole(place.base) else [f"{column} < {place.base}"]
        own += [f"{column} % {apart} == 0"] if apart > 1 else []
        return " && ".join(own) or "true"

    def _store(self, place: _Place, count: int, to: str, value: str, width: int) -> list[str]:
        """Element ``i`` of a result to where its channel is."""
        if place.base == 0:
            return [f"if (lane == 0) narrow({value.replace('[i]', '[0]')}, {to});"]
        pack = self._pack(place.base)
        if place.divisor == 1 and pack > 1:
            column = self._column(place, 1)
            guard = "" if self._is_whole(place.base) else f"if ({column} < {width}) "
            values = f"A packed[{pack}];\n" + _loop(
                pack, f"packed[k] = {value.replace('[i]', f'[i * {pack} + k]')};", "k"
            )
            body = f"{{\n{values}\n{guard}store<{pack}>({to} + {column}, packed);\n}}"
            return [_loop(self._packs(place.base), body)]
        channel = self._channel(place, 2)
        return [_loop(count, f"if ({self._holds(place)}) narrow({value}, {to} + {channel});")]

    def _keep(self, place: _Place, count: int, to: str, value: str) -> list[str]:
        """Element ``i`` for the merge of pieces."""
        if place.base == 0:
            return [f"if (lane == 0) *({to}) = {value.replace('[i]', '[0]')};"]
        body = f"if ({self._holds(place)}) ({to})[{self._channel(place, 2)}] = {value};"
        return [_loop(count, body)]

    def _merged(self, name: str, count: int) -> list[str]:
        """The sum of what all groups have."""
        return [
            _loop(count, f"{name}[i] += __shfl_xor_sync(kAllLanes, {name}[i], {bits});")
            for bits in self._between_groups()
        ]

    def _between_groups(self) -> Iterator[int]:
        bits = _WARP // 2
        while bits >= self._lanes:
            yield bits
            bits //= 2

    def _stride(self, width: int) -> int:
        """Values that a row of so many takes where pieces leave it; see ``EdgeLayout``."""
        pack = 2 if self._sum == "double" else 4
        return -(-width // pack) * pack

    def _sum_rows(self, r: int, kind: str, value: int, factor: int, row_factor: int) -> None:
        place, count, own = self._layout(value)
        width = self._values[value].width
        pack = self._pack(place.base) if place.base else 1
        held = self._value(value, place)
        self._state.append(f"A sum{r}[{count}];")
        self._state.append(_loop(count, f"sum{r}[i] = 0;"))
        term = held.at(own, pack)
        if factor >= 0:
            divisor = width // self._values[factor].width
            times = self._value(factor, self._through(place, divisor)).at(own, pack)
            add = f"sum{r}[i] = multiply_add({term}, {times}, sum{r}[i]);"
        else:
            add = f"sum{r}[i] += {term};"
        self._added.append(_loop(count, add))
        done = self._merged(f"sum{r}", count)
        if row_factor >= 0:
            times = self._value(row_factor, place).at(own, pack)
            done.append("if (begin < end) " + _loop(count, f"sum{r}[i] *= {times};", guard=True))
        if kind == "total":
            self._kept.append(f"A total{r}[{count}];")
            self._kept.append(_loop(count, f"total{r}[i] = 0;"))
            done.append(
                "if (begin < end) " + _loop(count, f"total{r}[i] += sum{r}[i];", guard=True)
            )
            self._end += self._keep(
                place, count, f"static_cast<A*>(a.warps[{r}]) + warp * {width}", f"total{r}[i]"
            )
            self._finish += done
            return
        done += ["if (group == 0 && piece >= 0) {", *self._left(r)]
        done += [*self._keep(place, count, "left", f"sum{r}[i]"), "} else if (group == 0) {"]
        if kind == "mean":
            divided = _loop(count, f"sum{r}[i] /= static_cast<A>(max(end - begin, 1));")
            done.append(divided)
        done += self._store(place, count, self._out(r, width), f"sum{r}[i]", width)
        self._finish += [*done, "}"]

    @staticmethod
    def _left(r: int) -> list[str]:
        at = f"static_cast<long long>(piece) * a.partial_size + a.partial_at[{r}]"
        return [f"A* const left = static_cast<A*>(a.partial) + {at};"]

    @staticmethod
    def _out(r: int, width: int, row: str = "row") -> str:
        return f"static_cast<T*>(a.out[{r}]) + static_cast<long long>({row}) * {width}"

    def _edge(self, r: int, value: int) -> None:
        place, count, own = self._layout(value)
        width = self._values[value].width
        pack = self._pack(place.base) if place.base else 1
        term = self._value(value, place).at(own, pack)
        if own != 0:
            self._added.append(f"A edge{r}[{count}];")
            self._added.append(_loop(count, f"edge{r}[i] = {term};"))
            term = f"edge{r}[i]"
        self._added += self._store(place, count, self._out(r, width, "edge"), term, width)

    def _extremum(self, r: int, kind: str, value: int, out: int, record: int) -> None:
        place, count, own = self._layout(value)
        width = self._values[value].width
        pack = self._pack(place.base) if place.base else 1
        sign = "-" if kind == "min" else ""
        best, ties = f"best{r}", f"ties{r}"
        term = self._value(value, place).at(own, pack)
        self._state.append(f"A {best}[{count}], {ties}[{count}];")
        self._state.append(_loop(count, f"{{ {best}[i] = -infinity<A>(); {ties}[i] = 0; }}"))
        take = f"take({best}[i], {ties}[i], {sign}rounded<T>({term}), A(1));"
        self._added.append(_loop(count, take))
        for bits in self._between_groups():
            other = [f"__shfl_xor_sync(kAllLanes, {name}[i], {bits})" for name in (best, ties)]
            body = f"{{ const A other = {other[0]}, of_other = {other[1]}; "
            body += f"take({best}[i], {ties}[i], other, of_other); }}"
            self._finish.append(_loop(count, body))
        self._finish += ["if (group == 0 && piece >= 0) {", *self._left(r)]
        self._finish += self._keep(place, count, "left", f"{best}[i]")
        self._finish += self._keep(place, count, f"left + {self._stride(width)}", f"{ties}[i]")
        self._finish.append("} else if (group == 0) {")
        if record >= 0:
            to = f"static_cast<int*>(a.record[{r}]) + static_cast<long long>(row) * {width}"
            shares = f"static_cast<int>({ties}[i]) + ({best}[i] == A(0) ? 1 : 0)"
            self._finish += self._keep(place, count, to, f"begin == end ? 0 : {shares}")
        if out >= 0:
            found = _loop(count, f"{best}[i] = begin == end ? A(0) : {sign}{best}[i];")
            self._finish.append(found)
            self._finish += self._store(place, count, self._out(r, width), f"{best}[i]", width)
        self._finish.append("}")

    def _softmax(self, r: int, value: int, score: int, out: int, record: int, scale: int) -> None:
        place, count, own = self._layout(value)
        width, heads = self._values[value].width, self._values[score].width
        pack = self._pack(place.base) if place.base else 1
        of_head = width // heads
        term = self._value(value, place).at(own, pack)
        scores = self._value(score, _ONE if heads == 1 else self._through(place, of_head))
        states = self._elements(scores.kind, place)
        most, all_, sums = (_Held(f"{name}{r}", scores.kind) for name in ("most", "all", "sum"))
        self._state.append(f"A {most.name}[{states}], {all_.name}[{states}], sum{r}[{count}];")
        self._state.append(
            _loop(states, f"{{ {most.name}[i] = -infinity<A>(); {all_.name}[i] = 0; }}")
        )
        self._state.append(_loop(count, f"{sums.name}[i] = 0;"))
        self._added.append(f"A weight{r}[{states}], kept{r}[{states}];")
        body = (
            f"{{ const A before = {most.name}[i], score = {scores.at(scores.kind, pack)}; "
            f"const A now = larger(before, score); {most.name}[i] = now; "
            f"kept{r}[i] = now > before ? exp_of(before - subtracted(now)) : A(1); "
            f"weight{r}[i] = exp_of(score - subtracted(now)); "
            f"{all_.name}[i] = {all_.name}[i] * kept{r}[i] + weight{r}[i]; }}"
        )
        self._added.append(_loop(states, body))
        weight, kept = (_Held(f"{name}{r}", scores.kind) for name in ("weight", "kept"))
        added = f"sum{r}[i] = multiply_add({term}, {weight.at(own, pack)}, "
        added += f"sum{r}[i] * {kept.at(own, pack)});"
        self._added.append(_loop(count, added))
        self._merge_softmax(r, states, count, scores.kind, own, pack)
        stride, totals = self._stride(width), self._stride(width) + self._stride(heads)
        self._finish += ["if (group == 0 && piece >= 0) {", *self._left(r)]
        self._finish += self._keep(place, count, "left", f"sum{r}[i]")
        of_heads = place if place.base == 0 else self._through(place, of_head)
        largest, total = most.at(own, pack), all_.at(own, pack)
        self._finish += self._keep(of_heads, count, f"left + {stride}", largest)
        self._finish += self._keep(of_heads, count, f"left + {totals}", total)
        self._finish.append("} else if (group == 0) {")
        self._finish.append("const bool is_empty = begin == end;")
        if out >= 0:
            scaled = _loop(count, f"sum{r}[i] *= is_empty ? A(0) : A(1) / {total};")
            self._finish.append(scaled)
            self._finish += self._store(place, count, self._out(r, width), f"sum{r}[i]", width)
        records = {"record": (record, f"rounded<T>({largest})")}
        inverse = f"A(1) / {total}"
        if self._element in ("Bfloat16", "Float16"):
            inverse = f"({inverse}) * exp_of(rounded<T>({largest}) - {largest})"
        records["scale"] = (scale, inverse)
        for name, (number, found) in records.items():
            if number < 0:
                continue
            to = f"static_cast<T*>(a.{name}[{r}]) + static_cast<long long>(row) * {heads}"
            self._finish.append(f"A own_{name}{r}[{count}];")
            self._finish.append(_loop(count, f"own_{name}{r}[i] = is_empty ? A(0) : {found};"))
            self._finish += self._store_heads(of_heads, count, to, f"own_{name}{r}[i]")
        self._finish.append("}")

    def _store_heads(self, place: _Place, count: int, to: str, value: str) -> list[str]:
        if place.base == 0:
            return [f"if (lane == 0) narrow({value.replace('[i]', '[0]')}, {to});"]
        channel = self._channel(place, 2)
        return [_loop(count, f"if ({self._holds(place)}) narrow({value}, {to} + {channel});")]

    def _merge_softmax(
        self, r: int, states: int, count: int, kind: int, own: int, pack: int
    ) -> None:
        of_own, of_other = (_Held(f"{name}{r}", kind) for name in ("own_share", "other_share"))
        for bits in self._between_groups():
            body = (
                f"{{ const A before = most{r}[i]; "
                f"const A other = __shfl_xor_sync(kAllLanes, before, {bits}); "
                f"const A now = larger(before, other); most{r}[i] = now; "
                f"own_share{r}[i] = exp_of(before - subtracted(now)); "
                f"other_share{r}[i] = exp_of(other - subtracted(now)); "
                f"all{r}[i] = all{r}[i] * own_share{r}[i] + "
                f"__shfl_xor_sync(kAllLanes, all{r}[i], {bits}) * other_share{r}[i]; }}"
            )
            summed = (
                f"sum{r}[i] = sum{r}[i] * {of_own.at(own, pack)} + "
                f"__shfl_xor_sync(kAllLanes, sum{r}[i], {bits}) * {of_other.at(own, pack)};"
            )
            self._finish.append(f"{{ A own_share{r}[{states}], other_share{r}[{states}];")
            self._finish += [_loop(states, body), _loop(count, summed), "}"]

    # The kernel around it.

    def _lines(self) -> Iterator[str]:
        yield "namespace fastgraph::generated {"
        yield f"using T = {self._element};"
        yield f"using A = {self._sum};"
        yield "__device__ inline A clamped(A x, A low, A high) {"
        yield "x = x < low ? low : x;"
        yield "return x > high ? high : x;"
        yield "}"
        yield f'extern "C" __global__ void __launch_bounds__(128) {NAME}(const EdgeArguments a) {{'
        yield "const int lane_of_warp = static_cast<int>(threadIdx.x) % 32;"
        yield f"const int lane = lane_of_warp % {self._lanes};"
        yield f"[[maybe_unused]] const int group = lane_of_warp / {self._lanes};"
        yield "const long long warps = static_cast<long long>(gridDim.x) * 4;"
        yield "const long long warp = static_cast<long long>(blockIdx.x) * 4 + threadIdx.x / 32;"
        for slot in range(self._num_operands):
            yield f"[[maybe_unused]] const T* const operand{slot} = "
            yield f"static_cast<const T*>(a.operands[{slot}]);"
        for base in sorted(self._bases):
            columns = self._packs(base) * self._pack(base) * self._lanes
            chunk = f"static_cast<int>(blockIdx.y) * {columns} + " if self._chunks > 1 else ""
            yield f"[[maybe_unused]] const int first_{base} = {chunk}lane * {self._pack(base)};"
        yield from self._kept
        yield "for (long long task = warp; task < a.num_tasks; task += warps) {"
        yield "int span[4];"
        yield "load<4>(a.tasks + task * 4, span);"
        yield "const int row = span[0], begin = span[1], end = span[2];"
        yield "[[maybe_unused]] const int piece = span[3];"
        yield from self._of_rows
        yield from self._state
        if self._added:
            yield from self._edge_loop()
        yield from self._finish
        yield "}"
        if self._end:
            yield "if (group == 0) {"
            yield from self._end
            yield "}"
        yield "}"
        yield "}  // namespace fastgraph::generated"

    def _edge_loop(self) -> Iterator[str]:
        step = self._unrolled * self._groups
        yield f"for (int from = begin; from < end; from += {step}) {{"
        yield "#pragma unroll"
        yield f"for (int u = 0; u < {self._unrolled}; ++u) {{"
        yield f"const int own = from + u * {self._groups} + group;"
        # Lanes beyond the last edge take part in sums over channels.
        yield "const int entry = min(own, end - 1);"
        yield "[[maybe_unused]] const int node = a.col[entry];"
        yield "[[maybe_unused]] const long long edge = a.edge_id ? a.edge_id[entry] : entry;"
        yield from self._of_edges
        yield "if (own < end) {"
        yield from self._added
        yield "}"
        yield "}"
        yield "}"


def _loop(count: int, body: str, name: str = "i", *, guard: bool = False) -> str:
    """A loop that is unrolled, so that arrays stay in registers."""
    loop = f"#pragma unroll\nfor (int {name} = 0; {name} < {count}; ++{name}) {body}"
    return f"{{\n{loop}\n}}" if guard else loop


def _power_of_two(count: int) -> int:
    """The least that is as large."""
    return 1 << (count - 1).bit_length()


def _literal(number: float) -> str:
    """A number in C++, of any float64."""
    if number != number:
        return "infinity<A>() - infinity<A>()"
    if number in (float("inf"), -float("inf")):
        return f"{'-' if number < 0 else ''}infinity<A>()"
    return f"A({number.hex()})"
