"""The terms of sums of values of different rows, of which a linear map is that of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastgraph.edge_programs.calls import Call, aten
from fastgraph.edge_programs.owners import Owner
from fastgraph.edge_programs.recorded import Recorded, Refused


def terms_of(
    call: Call, values: Sequence[Any], channels: tuple[int, ...]
) -> tuple[tuple[float, Recorded], ...]:
    """The terms of a sum, a difference or a multiple; none of anything else."""

    def scaled(v: object, factor: float) -> tuple[tuple[float, Recorded], ...]:
        if not isinstance(v, Recorded) or v.channels != channels:
            return ()
        terms = v.terms if v.step is None else ((1.0, v),)
        return tuple((factor * coefficient, piece) for coefficient, piece in terms)

    if call.operation in (aten.add, aten.sub):
        alpha = call.given["alpha"] if call.operation is aten.add else -call.given["alpha"]
        first, second = scaled(values[0], 1), scaled(values[1], alpha)
        return first + second if first and second else ()
    if call.operation is aten.neg:
        return scaled(values[0], -1)
    if call.operation is aten.mul and isinstance(values[1], (int, float)):
        return scaled(values[0], values[1])
    if call.operation is aten.div and isinstance(values[1], (int, float)):
        return scaled(values[0], 1 / values[1])
    return ()


def pieces_of(v: Recorded) -> list[tuple[float, Recorded, int]]:
    """The steps that a linear map applies to: coefficient, step and first channel of each."""
    if v.step is not None:
        return [(1.0, v, 0)]
    if not v.parts:
        if not v.terms:
            raise Refused("it has a product of a matrix with values of each edge")
        return [(coefficient, piece, 0) for coefficient, piece in v.terms]
    found, offset = [], 0
    for part in v.parts:
        found += [(c, piece, offset + first) for c, piece, first in pieces_of(part)]
        offset += part.channels[-1]
    return found


def number_of(v: Recorded) -> int:
    """The number of the step that a value is.

    Raises:
        Refused: it is none.
    """
    if v.step is None:
        raise Refused("it computes parameters from comparisons")
    return v.step


def cancels(pieces: Sequence[tuple[float, Recorded, int]]) -> bool:
    """True if there is a difference of which neither value is alone elsewhere, with its digits."""
    together: dict[int, list[tuple[float, int]]] = {}
    for coefficient, piece, offset in pieces:
        together.setdefault(offset, []).append((coefficient, number_of(piece)))
    alone = {terms[0][1] for terms in together.values() if len(terms) == 1}
    return any(
        min(terms)[0] < 0 < max(terms)[0] and alone.isdisjoint(step for _, step in terms)
        for terms in together.values()
    )


def common_owner(values: Sequence[Recorded]) -> Owner | None:
    """The place of what is made of some values; ``None`` for several."""
    places = {v.place for v in values if v.has_rows}
    return "parameter" if not places else places.pop() if len(places) == 1 else None
