"""The statements of CUDA C++ that compute the values of an edge program in registers."""

from __future__ import annotations

import torch

from fastgraph.edge_programs.lanes import (
    EDGE,
    GATHERED,
    NUMBER,
    ONE,
    OPERAND,
    PARAMETER,
    ROW,
    WARP,
    Held,
    Lanes,
    Place,
    UnfitError,
    Value,
    power_of_two,
)
from fastgraph.edge_programs.lowering import GATE, SLOPE, Code
from fastgraph.edge_programs.operations import (
    DOT,
    ELEMENTWISE,
    FOLD,
    ROUND,
    SPREAD,
    SUM_TILES,
    TILE,
)

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


class Registers(Lanes):
    """Statements that compute values for a row and for an edge, each once.

    Args:
        code: the program.
        dtype: of its operands.

    Raises:
        UnfitError: it has no kernel of its own.
    """

    def __init__(self, code: Code, dtype: torch.dtype) -> None:
        super().__init__(code, dtype)
        self._held: dict[tuple[int, Place], Held] = {}
        self._of_rows: list[str] = []
        self._of_edges: list[str] = []

    def _value(self, number: int, place: Place) -> Held:
        """The variable that holds a value, written where it was not there yet."""
        value = self._values[number]
        if value.width == 1:
            place = ONE
        if value.operation == SPREAD:
            (argument,) = value.arguments
            divisor = value.width // self._values[argument].width
            return self._value(argument, self._through(place, divisor))
        if value.operation == TILE and value.width != self._values[value.arguments[0]].width:
            (argument,) = value.arguments
            if place.modulus:
                raise UnfitError
            return self._value(argument, place._replace(modulus=self._values[argument].width))
        key = number, place
        if key not in self._held:
            name = f"v{number}_{len(self._held)}"
            lines = self._of_edges if value.often == 2 else self._of_rows
            if value.operation == OPERAND:
                kind = self._load(name, value, place, lines)
            elif self._is_sum(value):
                kind = self._sum_heads(name, value, place, lines)
            else:
                kind = self._compute(name, value, place, lines)
            self._held[key] = Held(name, kind)
        return self._held[key]

    def _load(self, name: str, value: Value, place: Place, lines: list[str]) -> int:
        kind, width = self._slots[value.slot]
        row = {ROW: "row", GATHERED: "node", EDGE: "edge", PARAMETER: "0"}[kind]
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
            lines.append(unrolled(self._packs(place.base), f"{{ {body} }}"))
            return 2
        load = f"widened(({of_row})[{self._channel(place, own)}])"
        guarded = load if whole else f"{self._column(place, own)} < {place.base} ? {load} : A(0)"
        lines.append(unrolled(self._elements(own, place), f"{name}[i] = {guarded};"))
        return own

    def _compute(self, name: str, value: Value, place: Place, lines: list[str]) -> int:
        if value.operation == NUMBER:
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
                lines.append(unrolled(self._elements(kind, place), body))
                return kind
            expression = _EXPRESSIONS[operation].format(*arguments)
        lines.append(f"A {name}[{self._elements(kind, place)}];")
        lines.append(unrolled(self._elements(kind, place), f"{name}[i] = {expression};"))
        return kind

    def _sum_heads(self, name: str, value: Value, place: Place, lines: list[str]) -> int:
        """The sum over the channels of each head, in the order in which the interpreter adds."""
        width = self._values[value.arguments[0]].width
        of_head, whole = width // value.width, Place(width)
        if value.width > 1 and place != Place(width, of_head):
            raise UnfitError
        lanes = min(WARP, power_of_two(of_head))
        is_even = of_head == lanes or of_head % WARP == 0
        if value.width > 1 and not is_even:
            raise UnfitError
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


def unrolled(count: int, body: str, name: str = "i", *, guard: bool = False) -> str:
    """A loop that is unrolled, so that arrays stay in registers."""
    loop = f"#pragma unroll\nfor (int {name} = 0; {name} < {count}; ++{name}) {body}"
    return f"{{\n{loop}\n}}" if guard else loop


def _literal(number: float) -> str:
    """A number in C++, of any float64."""
    if number != number:
        return "infinity<A>() - infinity<A>()"
    if number in (float("inf"), -float("inf")):
        return f"{'-' if number < 0 else ''}infinity<A>()"
    return f"A({number.hex()})"
