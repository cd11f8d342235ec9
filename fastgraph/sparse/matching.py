"""Forms of expressions that operators know: products, sums of rows and columns, and of both."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastgraph.machine.memory import LARGE, contiguous, new_rows
from fastgraph.ops.library import is_defined_by, needs_torch_operations
from fastgraph.sparse.expression import Contraction, Dot, Ends, Entries, Expression, Map
from fastgraph.sparse.pattern import Pattern


class Factor(NamedTuple):
    """A tensor that others are multiplied by, or divided by.

    Attributes:
        tensor: ``[n]`` or ``[n, heads]``, of rows, columns or entries.
        is_divisor: which of both.
    """

    tensor: Tensor
    is_divisor: bool = False

    def value(self, pattern: Pattern, place: str, *, is_after: bool = False) -> Tensor:
        """The tensor that others are multiplied by.

        With 1 where a row or column has no entries: infinity times the sum of nothing, or times its
        gradient, would be NaN.

        Args:
            pattern: whose rows and columns.
            place: ``"row"``, ``"col"`` or ``"entry"``, of which it is a factor.
            is_after: it multiplies sums.
        """
        tensor = self.tensor
        if place != "entry" and (is_after or torch.is_grad_enabled()):
            if pattern.is_sharded:
                is_empty = pattern.is_empty_row if place == "row" else pattern.is_empty_column
                for _ in range(tensor.dim() - 1):
                    is_empty = is_empty.unsqueeze(-1)
                tensor = torch.where(is_empty, tensor.new_ones(()), tensor)
            else:
                empty = pattern.empty_rows if place == "row" else pattern.empty_columns
                if empty.numel() > 0:
                    tensor = tensor.index_fill(0, empty, 1.0)
        return tensor.reciprocal() if self.is_divisor else tensor

    def is_ordinary(self, pattern: Pattern, place: str) -> bool:
        """True if sums may be multiplied by it instead of each of their terms.

        Infinity, and 1 over 0, are no such factors: terms that are 0 become NaN, but not their sum
        with others. Those of rows and columns without entries multiply nothing.
        """
        tensor = self.tensor.detach()
        if _is_ordinary(tensor, self.is_divisor):
            return True
        if place == "entry":
            return False
        empty = pattern.empty_rows if place == "row" else pattern.empty_columns
        return _is_ordinary(tensor.index_fill(0, empty, 1.0), self.is_divisor)


def _is_ordinary(tensor: Tensor, is_divisor: bool) -> bool:
    return not (has_infinity(tensor) or (is_divisor and has_infinity(tensor.reciprocal())))


def has_infinity(tensor: Tensor) -> bool:
    """True if a number is infinite or NaN.

    GPUs, where a test would wait for all that was begun, and ranks, which would wait for each
    other, are not asked: then it is false.
    """
    if tensor.device.type != "cpu" or is_defined_by(tensor):
        return False
    # A sum of squares takes a tenth of the time of a maximum; where it overflows that one tells.
    norm = torch.linalg.vector_norm
    return not norm(tensor).isfinite() and not norm(tensor, torch.inf).isfinite()


@dataclass
class Monomial:
    """A product of dot products and of factors.

    Attributes:
        scale: a number.
        dots: dot products.
        rows, cols, entries: factors of each.
    """

    scale: float = 1.0
    dots: list[Dot] = field(default_factory=list)
    rows: list[Factor] = field(default_factory=list)
    cols: list[Factor] = field(default_factory=list)
    entries: list[Factor] = field(default_factory=list)

    def times(self, other: Monomial) -> Monomial:
        """The product of both."""
        return Monomial(
            self.scale * other.scale,
            self.dots + other.dots,
            self.rows + other.rows,
            self.cols + other.cols,
            self.entries + other.entries,
        )

    def inverse(self) -> Monomial | None:
        """1 over it; ``None`` with a dot product or of 0."""
        if self.dots or self.scale == 0:
            return None
        inverted = [
            [Factor(t, not is_divisor) for t, is_divisor in found]
            for found in (self.rows, self.cols, self.entries)
        ]
        return Monomial(1 / self.scale, [], *inverted)

    def is_ordinary(self, pattern: Pattern) -> bool:
        """True for all factors that are not left to entries; see :meth:`Factor.is_ordinary`."""
        divisors = [f for f in self.entries if f.is_divisor]
        return math.isfinite(self.scale) and all(
            factor.is_ordinary(pattern, place)
            for place, found in (("row", self.rows), ("col", self.cols), ("entry", divisors))
            for factor in found
        )


def dot_products(score: Expression) -> Monomial | None:
    """Scaled dot products, which only rows and columns may scale otherwise."""
    made = monomial(score)
    return made if made is not None and len(made.dots) == 1 and not made.entries else None


@dataclass
class BiasedDots:
    """Scaled dot products and a bias of each entry.

    Attributes:
        dots: the dot products, as :func:`dot_products` finds them.
        biases: ``[nnz]``, ``[nnz, heads]`` or ``[nnz, 1]``, each with what multiplies it.
    """

    dots: Monomial
    biases: list[tuple[float, Tensor]]

    def bias(self, heads: int) -> Tensor:
        """The sum of the biases, ``[nnz, heads]``."""
        terms = [t if scale == 1 else t * scale for scale, t in self.biases]
        total = functools.reduce(operator.add, (t.reshape(t.shape[0], -1) for t in terms))
        return total.expand(-1, heads)

    def is_ordinary(self) -> bool:
        """True if no sum is infinite or NaN: a softmax of hidden entries alone is NaN."""
        with torch.no_grad():
            return not has_infinity(self.bias(-1))


def biased_dots(score: Expression) -> BiasedDots | None:
    """Dot products with biases of entries; ``None`` if the expression is something else."""
    found: list[Monomial] = []
    biases: list[tuple[float, Tensor]] = []
    for scale, term in _terms(score):
        if isinstance(term, Entries):
            biases.append((scale, term.tensors[0]))
        elif not found and (dots := dot_products(term)) is not None:
            found.append(dots.times(Monomial(scale)))
        else:
            return None
    return BiasedDots(found[0], biases) if found and biases else None


def _terms(values: Expression, scale: float = 1.0) -> Iterator[tuple[float, Expression]]:
    """The terms of a sum, each with the number by which it is multiplied."""
    values = bare(values)
    if isinstance(values, Map) and not values.kwargs:
        if len(values.arguments) == 1 and (factor := _factor_of(values)) is not None:
            yield from _terms(values.arguments[0], scale * factor)
            return
        if len(values.arguments) == 2 and values.function in (operator.add, operator.sub):
            first, second = values.arguments
            yield from _terms(first, scale)
            yield from _terms(second, scale if values.function is operator.add else -scale)
            return
    yield scale, values


def _factor_of(made: Map) -> float | None:
    """The number by which one expression is multiplied; ``None`` of other functions."""
    if made.function is operator.neg:
        return -1.0
    if made.function is operator.mul:
        return next(float(a) for a in made.args if not isinstance(a, Expression))
    if made.function is operator.truediv and isinstance(made.args[0], Expression):
        return 1 / float(made.args[1]) if made.args[1] != 0 else None
    return None


def monomial(values: Expression) -> Monomial | None:
    """The expression as a product; ``None`` if it is none."""
    values = bare(values)
    if isinstance(values, Entries):
        return Monomial() if values.is_ones else Monomial(entries=[Factor(values.tensors[0])])
    if isinstance(values, Ends):
        factors = [Factor(values.tensors[0])]
        return Monomial(rows=factors) if values.is_row else Monomial(cols=factors)
    if isinstance(values, Dot):
        return Monomial(dots=[values])
    if not isinstance(values, Map) or values.kwargs:
        return None
    if values.function is operator.neg:
        made = monomial(values.arguments[0])
        return None if made is None else made.times(Monomial(-1.0))
    if values.function not in (operator.mul, operator.truediv):
        return None
    both = [monomial(a) if isinstance(a, Expression) else Monomial(float(a)) for a in values.args]
    first, second = both
    if second is not None and values.function is operator.truediv:
        second = second.inverse()
    return None if first is None or second is None else first.times(second)


@dataclass
class Additive:
    """A vector times the LeakyReLU of a sum of rows and columns of features.

    Attributes:
        slope: of the LeakyReLU.
        rows: ``[n, channels]`` or ``[n, channels, heads]``.
        cols: ``[m, channels]`` or ``[m, channels, heads]``.
        vector: ``[channels]`` or ``[channels, heads]``.
    """

    slope: float
    rows: Tensor
    cols: Tensor
    vector: Tensor


def additive(score: Expression) -> Additive | None:
    """The scores of GATv2; ``None`` if the expression is something else."""
    score = bare(score)
    if not isinstance(score, Contraction):
        return None
    inner = bare(score.arguments[0])
    if not isinstance(inner, Map) or inner.function is not F.leaky_relu:
        return None
    slope, both = slope_of(inner), bare(inner.arguments[0])
    if not isinstance(both, Map) or both.function is not operator.add or len(both.arguments) != 2:
        return None
    ends = [e for a in both.arguments if isinstance(e := bare(a), Ends)]
    if {e.is_row for e in ends} != {True, False}:
        return None
    rows, cols = (next(e.tensors[0] for e in ends if e.is_row is side) for side in (True, False))
    return Additive(slope, rows, cols, score.vector) if rows.shape[1:] == cols.shape[1:] else None


@dataclass
class SumOfEnds:
    """A LeakyReLU of a sum of terms of rows, columns and entries, each with a sign.

    Attributes:
        slope: of the LeakyReLU; 1 for none.
        rows, cols, entries: the terms.
    """

    slope: float
    rows: list[tuple[float, Tensor]] = field(default_factory=list)
    cols: list[tuple[float, Tensor]] = field(default_factory=list)
    entries: list[tuple[float, Tensor]] = field(default_factory=list)


def sum_of_ends(score: Expression) -> SumOfEnds | None:
    """The scores of GAT; ``None`` if the expression is something else."""
    score = bare(score)
    slope = 1.0
    if isinstance(score, Map) and score.function is F.leaky_relu:
        slope = slope_of(score)
        score = score.arguments[0]
    found = SumOfEnds(slope)
    for sign, term in _terms(score):
        if abs(sign) != 1 or not isinstance(term, Ends | Entries):
            return None
        if isinstance(term, Entries):
            terms = found.entries
        else:
            terms = found.rows if term.is_row else found.cols
        terms.append((sign, term.tensors[0]))
    return found if found.rows or found.cols else None


def slope_of(made: Map) -> float:
    """The slope of a LeakyReLU."""
    given = made.args[1] if len(made.args) > 1 else made.kwargs.get("negative_slope", 0.01)
    return float(given)


def bare(values: Expression) -> Expression:
    """Without factors of ones, and columns of one head beside several."""
    while isinstance(values, Map):
        if values.function is torch.unsqueeze:
            values = values.arguments[0]
            continue
        if values.function is not operator.mul or len(values.arguments) < 2:
            break
        first, second = map(_line, values.arguments)
        if isinstance(first, Entries) and first.is_ones:
            values = second
        elif isinstance(second, Entries) and second.is_ones:
            values = first
        else:
            break
    return values


def _line(values: Expression) -> Expression:
    is_line = isinstance(values, Map) and values.function is torch.unsqueeze
    return values.arguments[0] if is_line else values


def heads_of(x: Tensor) -> int:
    """The number of heads of features ``[m]``, ``[m, k]`` or ``[m, k, heads]``."""
    return x.shape[2] if x.dim() == 3 else 1


def heads_first(x: Tensor) -> Tensor:
    """Features as operators take them, ``[m, heads, k]``."""
    if x.dim() == 3:
        return x.transpose(1, 2)
    return x.unsqueeze(1) if x.dim() == 2 else x.view(-1, 1, 1)


def ends_of(dot: Dot) -> tuple[Tensor, Tensor]:
    """Queries ``[n, heads, k]`` and keys ``[m, heads, k]``."""
    x1, x2 = dot.tensors
    if x1.dim() == 3:
        return x1.transpose(1, 2), x2.permute(1, 2, 0)
    return x1.unsqueeze(1), x2.transpose(0, 1).unsqueeze(1)


def laid_out(x: Tensor) -> Tensor:
    """Features ``[n, heads, k]`` for an operator, which would copy those whose heads stand last.

    They are copied once for both passes, and their gradient has heads last, as leaves want it.
    Anything else is returned as it is.
    """
    if x.dim() != 3 or x.nbytes < LARGE or x.is_contiguous() or is_defined_by(x):
        return x
    if not (x.requires_grad and torch.is_grad_enabled()):
        return contiguous(x)
    out: Tensor = _HeadsFirst.apply(x)  # type: ignore[no-untyped-call]
    return out


class _HeadsFirst(torch.autograd.Function):
    """A contiguous copy of ``[n, heads, k]``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return contiguous(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if needs_torch_operations(grad):
            return grad
        return contiguous(grad.transpose(1, 2)).transpose(1, 2)


def scaled(
    x: Tensor, factors: list[Factor], pattern: Pattern, place: str, *, is_after: bool = False
) -> Tensor:
    """Features ``[n, heads, k]`` times factors of rows, or of columns; see :meth:`Factor.value`."""
    for factor in factors:
        of_rows = factor.value(pattern, place, is_after=is_after).reshape(x.shape[0], -1, 1)
        has_gradient = torch.is_grad_enabled() and (x.requires_grad or of_rows.requires_grad)
        is_of_one_head = x.shape[1] < of_rows.shape[1]  # the product is of as many as factors are
        if has_gradient or is_of_one_head or is_defined_by(x, of_rows):
            x = x * of_rows
        else:
            x = torch.mul(x, of_rows, out=new_rows(x, x.shape))
    return x


def is_same(a: Tensor, b: Tensor) -> bool:
    """True if both are views of one tensor, of the same numbers and with a common gradient."""
    if a.shape != b.shape or not _have_one_memory(a, b):
        return False
    (first, of_first), (second, of_second) = _viewed(a), _viewed(b)
    return not torch.is_grad_enabled() or (first is second and of_first == of_second)


def _have_one_memory(a: Any, b: Any) -> bool:
    if not is_defined_by(a, b):
        return bool(a.stride() == b.stride() and a.data_ptr() == b.data_ptr())
    if type(a) is not type(b):
        return False
    # All ranks find the same: those that hold no rows have no memory, but views like the others.
    a, b = a.local, b.local
    base, other = (x if x._base is None else x._base for x in (a, b))
    return base is other and a.storage_offset() == b.storage_offset() and a.stride() == b.stride()


_VIEWS = ("PermuteBackward0", "TBackward0", "TransposeBackward0", "UnsqueezeBackward0")


def _viewed(x: Tensor) -> tuple[object, int]:
    """The step of autograd, with the number of its output, of which a tensor is a view."""
    step, number = x.grad_fn, x.output_nr
    while step is not None and step.name() in _VIEWS:
        step, number = step.next_functions[0]
    return (x if step is None and x.requires_grad else step), number
