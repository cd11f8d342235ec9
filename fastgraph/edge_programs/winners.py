"""Extrema whose gradient one edge has: the first that attains them, in a given order.

A program splits the gradient of an extremum between all edges that attain it. Where upstream gives
it to one, the extremum is computed first, then the least rank of an edge that attains it, and then
the sum of the values of those edges that have this rank, of which there is one in each row.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

from fastgraph.edge_programs.builder import Builder, Value
from fastgraph.edge_programs.operations import EXTREMA
from fastgraph.edge_programs.program import Program

_Outputs = list[tuple[str, *tuple[Value, ...]]]

RANK = "the_rank"
"""The operand of edges, by which that with the least wins: a number of its own in each row."""


@dataclass(frozen=True)
class Winners:
    """A program in three.

    Attributes:
        extrema: has the extrema alone for outputs, in the order of ``names``.
        ranks: takes them as operands of rows, called so, and gives the ranks of the winners.
        program: takes these instead, and gives the outputs of the whole program.
        names: one for each extremum.
    """

    extrema: Program
    ranks: Program
    program: Program
    names: tuple[str, ...]


@functools.lru_cache(maxsize=256)
def with_winners(program: Program, winning: frozenset[int]) -> Winners:
    """A program some of whose outputs, extrema, give their gradient to one edge.

    Args:
        program: any.
        winning: the numbers of these outputs.
    """
    order = sorted(winning)
    names = tuple(f"extremum_{k}" for k in order)

    def extrema(_: Builder, values: list[Value]) -> _Outputs:
        return [(_reduction(program, k), _value(program, k, values)) for k in order]

    def ranks(b: Builder, values: list[Value]) -> _Outputs:
        found: _Outputs = []
        for k, name in zip(order, names, strict=True):
            value = _value(program, k, values)
            is_extreme = b.apply("eq", value, b.operand(name, "row", value.width))
            rank = b.spread(b.operand(RANK, "edge", 1), value.width)
            attained = b.apply("where", is_extreme, rank, math.inf)
            # The extremum of a row with NaN is NaN, which equals nothing.
            is_number = b.apply("eq", value, value)
            found.append(("min", b.apply("where", is_number, attained, rank)))
        return found

    def final(b: Builder, values: list[Value]) -> _Outputs:
        found: _Outputs = []
        for k, output in enumerate(program.outputs):
            if k not in winning:
                found.append((output.reduction, *(values[v] for v in output.values)))
                continue
            value = values[output.value]
            name = names[order.index(k)]
            rank = b.spread(b.operand(RANK, "edge", 1), value.width)
            wins = b.apply("eq", rank, b.operand(name, "row", value.width))
            found.append(("sum", b.apply("where", wins, value, 0.0)))
        return found

    return Winners(
        _replayed(program, extrema), _replayed(program, ranks), _replayed(program, final), names
    )


def _replayed(program: Program, outputs: Callable[[Builder, list[Value]], _Outputs]) -> Program:
    builder = Builder()
    return builder.program(*outputs(builder, builder.replay(program)))


def _reduction(program: Program, k: int) -> str:
    reduction = program.outputs[k].reduction
    assert reduction in EXTREMA
    return reduction


def _value(program: Program, k: int, values: list[Value]) -> Value:
    return values[program.outputs[k].value]
