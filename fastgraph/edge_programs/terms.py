"""The terms of sums of values of different rows, of which a linear map is that of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastgraph.edge_programs.calls import Call, aten
from fastgraph.edge_programs.owners import Owner
from fastgraph.edge_programs.recorded import Recorded, Refused


def terms_of(
    call: Call,
    values: Sequence[Any],
    channels: tuple[int, ...],
    promoted: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]],
) -> tuple[tuple[float, Recorded], ...]:
    """The terms of a sum, a difference or a multiple; none of anything else.

    Args:
        call: of the operation.
        values: that it takes.
        channels: of the result.
        promoted: gives values in the dtype of the sum of some tensors, given both.
    """

    def scaled(v: object, factor: float) -> tuple[tuple[float, Recorded], ...]:
        if not isinstance(v, Recorded) or v.channels != channels:
            return ()
        terms = v.terms if v.step is None else ((1.0, v),)
        return tuple((factor * coefficient, piece) for coefficient, piece in terms)

    if call.operation in (aten.add, aten.sub):
        alpha = call.given["alpha"] if call.operation is aten.add else -call.given["alpha"]
        if not (scaled(values[0], 1) and scaled(values[1], alpha)):
            return ()
        first, second = promoted((call.given["self"], call.given["other"]), values)
        return scaled(first, 1) + scaled(second, alpha)
    if call.operation is aten.neg:
        return scaled(values[0], -1)
    if call.operation is aten.mul and isinstance(values[1], (int, float)):
        return scaled(values[0], values[1])
    if call.operation is aten.div and isinstance(values[1], (int, float)):
        return scaled(values[0], 1 / values[1])
    return ()


def number_of(v: Recorded) -> int:
    """The number of the step that a value is.

    Raises:
        Refused: it is none.
    """
    if v.step is None:
        raise Refused("it computes parameters from comparisons")
    return v.step


def cancelling(pieces: Sequence[tuple[float, Recorded, int]]) -> set[int]:
    """The channels of differences of which neither value is alone elsewhere, with its digits.

    As large as in the difference, at least: a larger multiple of this loses more digits.

    Args:
        pieces: coefficient, step and first channel of each.
    """
    together: dict[int, list[tuple[float, int]]] = {}
    for coefficient, piece, offset in pieces:
        together.setdefault(offset, []).append((coefficient, number_of(piece)))
    alone: dict[int, float] = {}
    for (coefficient, step), *others in together.values():
        if not others:
            alone[step] = max(abs(coefficient), alone.get(step, 0.0))
    return {
        offset
        for offset, terms in together.items()
        if min(terms)[0] < 0 < max(terms)[0]
        and not any(abs(coefficient) <= alone.get(step, 0.0) for coefficient, step in terms)
    }


def common_owner(values: Sequence[Recorded]) -> Owner | None:
    """The place of what is made of some values; ``None`` for several."""
    places = {v.place for v in values if v.has_rows}
    return "parameter" if not places else places.pop() if len(places) == 1 else None
