"""Products of a matrix of parameters with values of several kinds of rows.

A product with a sum or a concatenation is one for each kind of rows, computed once for each node or
edge before the program. It is a product of each edge, in the program, where there is no such sum,
and where two products would lose the digits in which the ends of an edge agree.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from operator import add
from typing import Any

from fastgraph.edge_programs.builder import Value
from fastgraph.edge_programs.calls import aten
from fastgraph.edge_programs.recorded import Mapped, Recorded, Ref, Refused
from fastgraph.edge_programs.terms import cancelling, number_of

Pieces = list[tuple[float, Recorded, int]]
"""Coefficient, step and first channel of the terms of a concatenation."""


def split(v: Recorded, *, has_products: bool) -> tuple[Pieces, list[tuple[Recorded, int]]]:
    """The values that a linear map of another, which is no step, applies to.

    Returns:
        Those that are steps; and of those that are computed for each edge, value and first channel.

    Raises:
        Refused: there is something that is computed for each edge, and ``has_products`` is false,
            or it has several rows for an edge.
    """
    found = leaves(v, 0)
    pieces: Pieces = []
    for leaf, offset in found:
        terms = leaf.terms if leaf.step is None else ((1.0, leaf),)
        pieces += ((coefficient, piece, offset) for coefficient, piece in terms)
    differences = cancelling(pieces)
    if differences and not has_products:
        raise Refused("it has a product with a difference, of which two products lose digits")
    of_each = {offset for leaf, offset in found if leaf.step is None and not leaf.terms}
    whole = [(leaf, offset) for leaf, offset in found if offset in of_each | differences]
    if whole and not has_products:
        raise Refused("it has a product of a matrix with values of each edge")
    if any(len(leaf.channels) != 1 for leaf, _ in whole):
        raise Refused("it has a product of a matrix with several values of each edge")
    return [piece for piece in pieces if piece[2] not in differences], whole


def leaves(v: Recorded, offset: int) -> list[tuple[Recorded, int]]:
    """The values that are concatenated, with the first channel of each."""
    if not v.parts:
        return [(v, offset)]
    found = []
    for part in v.parts:
        found += leaves(part, offset)
        offset += part.channels[-1]
    return found


def products_of_edges(
    factors: Sequence[tuple[Value, int]],
    others: Sequence[Value],
    bias: Recorded | None,
    channels: tuple[int, ...],
    value: Callable[[Recorded], Value],
    step: Callable[[Any, tuple[Any, ...]], int],
    is_transposed: bool,
) -> Recorded:
    """The sum of products of values with matrices ``[width, channels]``, and of other values.

    Args:
        factors: value and step of the matrix of each.
        others: values that are added.
        bias: what is added where there is no other value.
        channels: of the result.
        value: gives that of what is recorded.
        step: makes one.
        is_transposed: true for matrices ``[channels, width]``.
    """
    added = [*others] if bias is None else [*others, value(bias)]
    for x, number in factors:
        matrix = value(Recorded("parameter", (x.width, channels[0]), number))
        product = x.builder.product(x, matrix, channels[0], is_transposed=is_transposed)
        added.insert(0, product)
    maps = () if others else tuple(_maps(factors, bias, step, is_transposed=is_transposed))
    return Recorded(None, channels, None, functools.reduce(add, added), maps=maps)


def _maps(
    factors: Sequence[tuple[Value, int]],
    bias: Recorded | None,
    step: Callable[[Any, tuple[Any, ...]], int],
    *,
    is_transposed: bool,
) -> Iterator[Mapped]:
    """The same sum as maps of sums over edges, where all that is added is a bias."""
    for x, matrix in factors:
        yield Mapped(x, step(aten.t.default, (Ref(matrix),)) if is_transposed else matrix)
    if bias is not None:  # for each edge
        row = step(aten.unsqueeze.default, (Ref(number_of(bias)), 0))
        yield Mapped(factors[0][0].builder.constant(1.0), row)
