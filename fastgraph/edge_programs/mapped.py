"""Messages that are linear maps of values of edges, which map sums over edges instead.

A matrix of each edge that is a linear map of the edge's own values makes a message that is linear
in the products of these with the values of a node. So a program sums the products, a few for each
pair of both, and one matrix of parameters maps the sums: no matrix is stored for an edge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fastgraph.edge_programs.builder import Value
from fastgraph.edge_programs.calls import aten
from fastgraph.edge_programs.recorded import Known, Mapped, Recorded, Ref, Step, has_all_channels

LINEAR = ("sum", "mean")
"""Reductions that a linear map may follow."""


@dataclass(frozen=True)
class MatrixOfEdge:
    """A matrix of each edge as a linear map of the edge's values.

    Attributes:
        hidden: the step of the values, ``[E, K]``.
        weight: the step of the map's parameter, ``[rows * columns, K]``.
        bias: that of its bias, if it has one.
        rows: of the matrix.
        columns: of the matrix.
        num_hidden: ``K``.
    """

    hidden: int
    weight: int
    bias: int | None
    rows: int
    columns: int
    num_hidden: int

    @classmethod
    def of(
        cls,
        v: Recorded,
        steps: Sequence[Step],
        known: Known,
    ) -> MatrixOfEdge | None:
        """The matrix that a value of edges is; ``None`` for any other value.

        Args:
            v: the value.
            steps: all of them.
            known: gives the tensor that a step computes, and what is known of it.
        """
        if v.place != "edge" or v.step is None or len(v.channels) != 2:
            return None
        made = steps[v.step]
        while made.function is aten.reshape.default:
            made = steps[made.args[0].step]
        if made.function is not aten.linear.default or made.kwargs:
            return None
        hidden, weight, bias = (*made.args, None)[:3]
        own = found[1].channels if (found := known(hidden.step)) is not None else ()
        if len(own) != 1 or not has_all_channels(bias, weight, known):
            return None
        bias_step = None if bias is None else bias.step
        return cls(hidden.step, weight.step, bias_step, *v.channels, own[0])

    def product(
        self, x: Value, hidden: Value, step: Callable[[Any, tuple[Any, ...]], int]
    ) -> tuple[Mapped, ...]:
        """The product of values of as many channels as the matrix has rows with it.

        Args:
            x: the values.
            hidden: those of :attr:`hidden`.
            step: makes one.
        """
        width = self.num_hidden * self.rows
        weight = step(
            aten.reshape.default, (Ref(self.weight), [self.rows, self.columns, self.num_hidden])
        )
        by_hidden = step(aten.permute.default, (Ref(weight), [2, 0, 1]))
        matrix = step(aten.reshape.default, (Ref(by_hidden), [width, self.columns]))
        found = [Mapped(hidden * x.builder.tile(x, width), matrix)]
        if self.bias is not None:
            bias = step(aten.reshape.default, (Ref(self.bias), [self.rows, self.columns]))
            found.append(Mapped(x, bias))
        return tuple(found)


def mapped(sums: Sequence[Tensor], matrices: Sequence[Tensor]) -> Tensor:
    """The sum of the products of ``[rows, width]`` each with its matrix ``[width, channels]``."""
    first, *others = (a @ matrix for a, matrix in zip(sums, matrices, strict=True))
    for other in others:
        first = first + other
    return first
