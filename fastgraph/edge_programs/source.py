"""The CUDA source of a kernel that runs one edge program, with its values in registers.

:mod:`fastgraph.edge_programs.lanes` tells how lanes hold them. The edges of a row are added up in
another order than that of the interpreter.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from importlib import resources
from typing import NamedTuple

import torch

from fastgraph.edge_programs.lanes import ONE, WARP, Held, Place, UnfitError
from fastgraph.edge_programs.lowering import Code
from fastgraph.edge_programs.operations import SOFTMAX
from fastgraph.edge_programs.registers import Registers, unrolled

NAME = "edge_kernel"


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
    except UnfitError:
        return None


class _Writer(Registers):
    def __init__(self, code: Code, dtype: torch.dtype) -> None:
        super().__init__(code, dtype)
        # Statements before all rows, before the edges of a row, for each edge, behind the edges,
        # and behind all rows.
        self._kept: list[str] = []
        self._state: list[str] = []
        self._added: list[str] = []
        self._finish: list[str] = []
        self._end: list[str] = []

    def source(self) -> Source:
        for number, reduction in enumerate(self._reductions):
            kind, *slots, out, record, scale = reduction
            numbers = [self._of_slot.get(slot, -1) for slot in slots]
            if kind == SOFTMAX:
                self._softmax(number, numbers[0], numbers[1], out, record, scale)
            elif kind in ("max", "min"):
                self._extremum(number, kind, numbers[0], out, record)
            elif kind == "edge":
                self._edge(number, numbers[0])
            else:
                self._sum_rows(number, kind, *numbers)
        return Source("\n".join(self._lines()) + "\n", self._chunks)

    def _layout(self, number: int) -> tuple[Place, int, int]:
        """Where a result is, and how many values of it a lane has, of which kind."""
        place = self._own_place(number)
        kind = 0 if place.base == 0 else 2
        return place, self._elements(kind, place), kind

    def _holds(self, place: Place) -> str:
        """The condition that this lane has element ``i`` of a result, and no lane before it."""
        if place.base == 0:
            return "lane == 0"
        column = self._column(place, 2)
        own = [] if self._is_whole(place.base) else [f"{column} < {place.base}"]
        own += [f"{column} % {place.divisor} == 0"] if place.divisor > 1 else []
        return " && ".join(own) or "true"

    def _store(self, place: Place, count: int, to: str, value: str, width: int) -> list[str]:
        """Element ``i`` of a result to where its channel is."""
        pack = self._pack(place.base) if place.base else 1
        if place.divisor > 1 or pack == 1:
            return self._store_each(place, count, to, value)
        column = self._column(place, 1)
        guard = "" if self._is_whole(place.base) else f"if ({column} < {width}) "
        values = f"A packed[{pack}];\n" + unrolled(
            pack, f"packed[k] = {value.replace('[i]', f'[i * {pack} + k]')};", "k"
        )
        body = f"{{\n{values}\n{guard}store<{pack}>({to} + {column}, packed);\n}}"
        return [unrolled(self._packs(place.base), body)]

    def _store_each(self, place: Place, count: int, to: str, value: str) -> list[str]:
        """The same value by value, to where no vectors need be aligned."""
        if place.base == 0:
            return [f"if (lane == 0) narrow({value.replace('[i]', '[0]')}, {to});"]
        channel = self._channel(place, 2)
        return [unrolled(count, f"if ({self._holds(place)}) narrow({value}, {to} + {channel});")]

    def _keep(self, place: Place, count: int, to: str, value: str) -> list[str]:
        """Element ``i`` for the merge of pieces."""
        if place.base == 0:
            return [f"if (lane == 0) *({to}) = {value.replace('[i]', '[0]')};"]
        body = f"if ({self._holds(place)}) ({to})[{self._channel(place, 2)}] = {value};"
        return [unrolled(count, body)]

    def _merged(self, name: str, count: int) -> list[str]:
        """The sum of what all groups have."""
        return [
            unrolled(count, f"{name}[i] += __shfl_xor_sync(kAllLanes, {name}[i], {bits});")
            for bits in self._between_groups()
        ]

    def _between_groups(self) -> Iterator[int]:
        bits = WARP // 2
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
        self._state.append(unrolled(count, f"sum{r}[i] = 0;"))
        term = held.at(own, pack)
        if factor >= 0:
            divisor = width // self._values[factor].width
            times = self._value(factor, self._through(place, divisor)).at(own, pack)
            add = f"sum{r}[i] = multiply_add({term}, {times}, sum{r}[i]);"
        else:
            add = f"sum{r}[i] += {term};"
        self._added.append(unrolled(count, add))
        done = self._merged(f"sum{r}", count)
        if row_factor >= 0:
            times = self._value(row_factor, place).at(own, pack)
            done.append("if (begin < end) " + unrolled(count, f"sum{r}[i] *= {times};", guard=True))
        if kind == "total":
            self._kept.append(f"A total{r}[{count}];")
            self._kept.append(unrolled(count, f"total{r}[i] = 0;"))
            done.append(
                "if (begin < end) " + unrolled(count, f"total{r}[i] += sum{r}[i];", guard=True)
            )
            self._end += self._keep(
                place, count, f"static_cast<A*>(a.warps[{r}]) + warp * {width}", f"total{r}[i]"
            )
            self._finish += done
            return
        done += ["if (group == 0 && piece >= 0) {", *self._left(r)]
        done += [*self._keep(place, count, "left", f"sum{r}[i]"), "} else if (group == 0) {"]
        if kind == "mean":
            divided = unrolled(count, f"sum{r}[i] /= static_cast<A>(max(end - begin, 1));")
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
            self._added.append(unrolled(count, f"edge{r}[i] = {term};"))
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
        self._state.append(unrolled(count, f"{{ {best}[i] = -infinity<A>(); {ties}[i] = 0; }}"))
        take = f"take({best}[i], {ties}[i], {sign}rounded<T>({term}), A(1));"
        self._added.append(unrolled(count, take))
        for bits in self._between_groups():
            other = [f"__shfl_xor_sync(kAllLanes, {name}[i], {bits})" for name in (best, ties)]
            body = f"{{ const A other = {other[0]}, of_other = {other[1]}; "
            body += f"take({best}[i], {ties}[i], other, of_other); }}"
            self._finish.append(unrolled(count, body))
        self._finish += ["if (group == 0 && piece >= 0) {", *self._left(r)]
        self._finish += self._keep(place, count, "left", f"{best}[i]")
        self._finish += self._keep(place, count, f"left + {self._stride(width)}", f"{ties}[i]")
        self._finish.append("} else if (group == 0) {")
        if record >= 0:
            to = f"static_cast<int*>(a.record[{r}]) + static_cast<long long>(row) * {width}"
            shares = f"static_cast<int>({ties}[i]) + ({best}[i] == A(0) ? 1 : 0)"
            self._finish += self._keep(place, count, to, f"begin == end ? 0 : {shares}")
        if out >= 0:
            found = unrolled(count, f"{best}[i] = begin == end ? A(0) : {sign}{best}[i];")
            self._finish.append(found)
            self._finish += self._store(place, count, self._out(r, width), f"{best}[i]", width)
        self._finish.append("}")

    def _softmax(self, r: int, value: int, score: int, out: int, record: int, scale: int) -> None:
        place, count, own = self._layout(value)
        width, heads = self._values[value].width, self._values[score].width
        pack = self._pack(place.base) if place.base else 1
        of_head = width // heads
        term = self._value(value, place).at(own, pack)
        scores = self._value(score, ONE if heads == 1 else self._through(place, of_head))
        states = self._elements(scores.kind, place)
        most, all_, sums = (Held(f"{name}{r}", scores.kind) for name in ("most", "all", "sum"))
        self._state.append(f"A {most.name}[{states}], {all_.name}[{states}], sum{r}[{count}];")
        self._state.append(
            unrolled(states, f"{{ {most.name}[i] = -infinity<A>(); {all_.name}[i] = 0; }}")
        )
        self._state.append(unrolled(count, f"{sums.name}[i] = 0;"))
        self._added.append(f"A weight{r}[{states}], kept{r}[{states}];")
        body = (
            f"{{ const A before = {most.name}[i], score = {scores.at(scores.kind, pack)}; "
            f"const A now = larger(before, score); {most.name}[i] = now; "
            f"kept{r}[i] = now > before ? exp_of(before - subtracted(now)) : A(1); "
            f"weight{r}[i] = exp_of(score - subtracted(now)); "
            f"{all_.name}[i] = {all_.name}[i] * kept{r}[i] + weight{r}[i]; }}"
        )
        self._added.append(unrolled(states, body))
        weight, kept = (Held(f"{name}{r}", scores.kind) for name in ("weight", "kept"))
        added = f"sum{r}[i] = multiply_add({term}, {weight.at(own, pack)}, "
        added += f"sum{r}[i] * {kept.at(own, pack)});"
        self._added.append(unrolled(count, added))
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
            scaled = unrolled(count, f"sum{r}[i] *= is_empty ? A(0) : A(1) / {total};")
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
            self._finish.append(unrolled(count, f"own_{name}{r}[i] = is_empty ? A(0) : {found};"))
            self._finish += self._store_each(of_heads, count, to, f"own_{name}{r}[i]")
        self._finish.append("}")

    def _merge_softmax(
        self, r: int, states: int, count: int, kind: int, own: int, pack: int
    ) -> None:
        of_own, of_other = (Held(f"{name}{r}", kind) for name in ("own_share", "other_share"))
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
            self._finish += [unrolled(states, body), unrolled(count, summed), "}"]

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
