"""The knowledge of the tensors of a message while it is recorded, and of what comes before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastgraph.edge_programs.builder import Value
from fastgraph.edge_programs.relations import Owner


class Refused(BaseException):
    """A message that is no edge program. Not an ``Exception``, which messages may catch."""


@dataclass(frozen=True)
class Ref:
    """The result of a step, as an argument of another."""

    step: int


@dataclass(frozen=True)
class Step:
    """A computation before the program.

    Attributes:
        function: of torch; ``None`` for a value that is given.
        args: its arguments, or the name of the value that is given.
        kwargs: its other arguments.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Recorded:
    """The knowledge of a tensor.

    Attributes:
        place: what it has a row for; ``None`` for several places.
        channels: its shape without rows.
        step: the number of the step that computes it, if one does.
        value: in the program, if it is there. It has all channels.
        terms: steps of which it is the sum, with coefficients; all have its channels.
        parts: the values that it concatenates along its last dimension of channels.
        table: the step of a parameter, if it has the rows of that which the edges' types choose.
        scores: of each edge, by whose softmax over neighbours its value is still to be multiplied.
    """

    place: Owner | None
    channels: tuple[int, ...]
    step: int | None = None
    value: Value | None = None
    terms: tuple[tuple[float, Recorded], ...] = ()
    parts: tuple[Recorded, ...] = ()
    table: int | None = None
    scores: Value | None = None

    @property
    def has_rows(self) -> bool:
        """True unless it belongs to the program alone."""
        return self.place != "parameter"
