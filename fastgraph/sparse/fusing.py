"""The fuser: which expressions of values, multiplied with features, are one operator.

From each virtual matrix to the sparse one that samples it, a path is one group ("High-Performance
and Programmable Attentional Graph Neural Networks with Global Tensor Formulations", SC 2023,
section 6.2). A softmax of scaled dot products is ``attention``, one of a LeakyReLU of sums ``gat``;
products of dot products, without a softmax, are an edge program.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastgraph import ops
from fastgraph.edge_programs.builder import Builder, Value
from fastgraph.edge_programs.program import Program
from fastgraph.routing.status import count_program, count_routed, count_separate
from fastgraph.sparse import products
from fastgraph.sparse.expression import (
    Dot,
    Dropout,
    Ends,
    Entries,
    Expression,
    Map,
    Softmax,
    may_defer,
)

NAME = "sparse"
"""Under which products of expressions are counted."""

_HALVES = (torch.bfloat16, torch.float16)

_FEWEST_OF_PROGRAM = 2**22
"""Entries times channels from which on an edge program was faster than two operators."""

_FEWEST_OF_ROW = 16
"""The same for the mean number of entries in a row or column whose factor has a gradient, with one
head: of 6.4 in WordNet separate operators took 0.96 times as long, of 88 in Tolokers 1.08 to 1.17
times. With eight heads they took longer on both."""


@dataclass(frozen=True)
class Plan:
    """How a product is computed by one operator.

    Attributes:
        operator: its name.
        run: computes it, of features ``[m, heads, k]``, as ``[n, heads, k]``.
        is_program: true if it is an edge program.
    """

    operator: str
    run: Callable[[Tensor], Tensor]
    is_program: bool = False


def product(values: Expression, x: Tensor) -> Tensor:
    """The product of a matrix of these values with features, by one operator if there is one.

    Args:
        values: of the matrix.
        x: ``[m]``, ``[m, k]`` or ``[m, k, heads]``.

    Returns:
        ``[n]``, ``[n, k]`` or ``[n, k, heads]``.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit, or an operand was edited in place.
    """
    pattern = values.pattern
    products.check_spmm(pattern, values, x)
    found = plan(values, x)
    if values.num_products > 0:
        values.pattern.reused.add(values.structure)
    values.num_products += 1
    if isinstance(found, str):
        count_separate(NAME, found)
        return products.spmm(pattern, values.value(), x)
    values.check_unedited()
    if found.is_program:
        count_program(NAME)
    else:
        count_routed(NAME)
    out = found.run(_heads_first(x))
    if x.dim() == 3:
        return out.transpose(1, 2).contiguous()
    return out.reshape(pattern.shape[0], *x.shape[1:])


def plan(values: Expression, x: Tensor) -> Plan | str:
    """The operator that computes a product, or why separate ones do."""
    if values.is_computed:
        return "values that were asked for before"
    reused = values.pattern.reused
    if values.num_products > 0 or (reused and values.structure in reused):
        return "values that several products use"
    if not may_defer(x):
        return (
            "compiled, transformed, under autocast, in inference mode, of a tensor's subclass, or "
            "where hooks see what is saved"
        )
    if values.pattern.nnz == 0 or x.numel() == 0 or 0 in values.shape:
        return "no entries or no channels"
    made = values.walk()
    if torch.is_grad_enabled() and any(m.is_cut for m in made):
        return "made where no gradients were recorded"
    if values.is_begun:
        return "scores that were asked for before"
    body, dropout = (
        (values, None) if not isinstance(values, Dropout) else (values.arguments[0], values)
    )
    body = _bare(body)
    if isinstance(body, Softmax):
        return _weighted(body.arguments[0], dropout, x)
    if dropout is not None:
        return "dropout of values that are no softmax"
    return _summed(body, x)


def takes_dropout(values: Expression) -> bool:
    """True if a product with these values, some of them dropped, may be one operator."""
    body = _bare(values)
    if not isinstance(body, Softmax) or body.is_computed:
        return False
    return (
        _sum_of_ends(body.arguments[0]) is not None or _dot_products(body.arguments[0]) is not None
    )


def _weighted(score: Expression, dropout: Dropout | None, x: Tensor) -> Plan | str:
    """Of features that the softmax of scores weighs."""
    options: dict[str, Any] = {}
    if dropout is not None:
        options = {"dropout": dropout.rate, "seed": dropout.seed}
    if (dots := _dot_products(score)) is not None:
        return _attention(dots, score, x, options)
    if (ends := _sum_of_ends(score)) is not None:
        return _gat(ends, score, x, options)
    return "a softmax of scores that are neither dot products nor sums of rows and columns"


def _attention(dots: Monomial, score: Expression, x: Tensor, options: dict[str, Any]) -> Plan | str:
    (dot,) = dots.dots
    query, key = _ends_of(dot)
    if key.shape[-1] != (1 if x.dim() == 1 else x.shape[1]):
        return "queries and features of different widths"
    if query.shape[1] != _heads(x):
        return "scores of another number of heads"
    if score.dtype in _HALVES and (dots.rows or dots.cols):
        return "dot products in half precision that rows or columns scale"

    def run(x: Tensor) -> Tensor:
        index, ptr, transpose, _, _ = score.pattern.edges
        return ops.attention(
            _scaled(query, dots.rows),
            _scaled(key, dots.cols),
            x,
            index,
            ptr=ptr,
            transpose=transpose,
            scale=dots.scale,
            **options,
        )[0]

    return Plan("attention", run)


def _gat(ends: SumOfEnds, score: Expression, x: Tensor, options: dict[str, Any]) -> Plan | str:
    heads = _heads(x)
    if score.shape[1:].numel() != heads:
        return "scores of another number of heads"
    n, m = score.pattern.shape

    def total(found: list[tuple[float, Tensor]], num_rows: int) -> Tensor:
        parts = [(t if sign == 1 else -t).reshape(num_rows, -1) for sign, t in found]
        out = functools.reduce(operator.add, parts) if parts else x.new_zeros(num_rows, 1)
        return out if out.shape[1] == heads else out.expand(num_rows, heads)

    def run(x: Tensor) -> Tensor:
        index, ptr, transpose, _, _ = score.pattern.edges
        return ops.gat(
            x,
            total(ends.cols, m),
            total(ends.rows, n),
            index,
            score_edge=total(ends.entries, score.pattern.nnz) if ends.entries else None,
            ptr=ptr,
            transpose=transpose,
            negative_slope=ends.slope,
            **options,
        )[0]

    return Plan("gat", run)


def _summed(body: Expression, x: Tensor) -> Plan | str:
    """Of features that products of dot products weigh, without a softmax."""
    made = _monomial(body)
    if made is None or len(made.dots) != 1:
        return "values that are no product of one dot product"
    (dot,) = made.dots
    if body.device.type != "cpu":
        return "an edge program that was measured on CPUs only"
    query, key = _ends_of(dot)
    if query.shape[1] != _heads(x):
        return "scores of another number of heads"
    if body.pattern.nnz * x[0].numel() < _FEWEST_OF_PROGRAM:
        return "too few entries for an edge program to gain"
    has_gradient = torch.is_grad_enabled() and any(
        factor.tensor.requires_grad for factor in made.rows + made.cols
    )
    is_small = body.pattern.nnz < _FEWEST_OF_ROW * max(body.pattern.shape) and _heads(x) == 1
    if has_gradient and is_small:
        return "gradients of factors of rows or columns that have few entries, of one head"

    def run(x: Tensor) -> Tensor:
        index, ptr, transpose, _, _ = body.pattern.edges
        is_shared = _is_same(key, x)
        operands = {"query": query, "value": x}
        if not is_shared:
            operands["key"] = key
        for place, tensors in (("row", made.rows), ("col", made.cols), ("entry", made.entries)):
            operands |= {f"{place}_{number}": t.value for number, t in enumerate(tensors)}
        facts = tuple((name, t[0].numel()) for name, t in operands.items())
        program = sum_of_products(facts, query.shape[1], made.scale)
        n, m = body.pattern.shape
        (out,) = ops.edge_program(
            program, operands, index, ptr=ptr, num_in=m, num_out=n, transpose=transpose
        )
        return out.view(n, *x.shape[1:])

    return Plan("edge_program", run, is_program=True)


@functools.lru_cache(maxsize=256)
def sum_of_products(facts: tuple[tuple[str, int], ...], heads: int, scale: float) -> Program:
    """The program of sums of features that dot products weigh.

    Args:
        facts: the operands: ``query``, ``value``, ``key`` if it is another tensor than the value,
            and factors of rows, columns and entries, with their widths.
        heads: their number.
        scale: a factor of all weights.
    """
    builder = Builder()
    places = {"query": "row", "value": "gathered", "key": "gathered"}
    of_factors = {"row": "row", "col": "gathered", "entry": "edge"}
    values: dict[str, Value] = {}
    for name, width in facts:
        place: Any = places.get(name) or of_factors[name.partition("_")[0]]
        values[name] = builder.operand(name, place, width)
    query, value = values.pop("query"), values.pop("value")
    weight = builder.dot(query, values.pop("key", value), heads)
    for factor in values.values():
        weight = weight * factor
    if scale != 1:
        weight = weight * scale
    return builder.program(("sum", weight * value))


class Factor(NamedTuple):
    """A tensor that others are multiplied by, or divided by.

    Attributes:
        tensor: ``[n]`` or ``[n, heads]``.
        is_divisor: which of both.
    """

    tensor: Tensor
    is_divisor: bool = False

    @property
    def value(self) -> Tensor:
        """The tensor that others are multiplied by."""
        return self.tensor.reciprocal() if self.is_divisor else self.tensor


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


def _dot_products(score: Expression) -> Monomial | None:
    """Scaled dot products, which only rows and columns may scale otherwise."""
    made = _monomial(score)
    return made if made is not None and len(made.dots) == 1 and not made.entries else None


def _monomial(values: Expression) -> Monomial | None:
    """The expression as a product; ``None`` if it is none."""
    values = _bare(values)
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
        made = _monomial(values.arguments[0])
        return None if made is None else made.times(Monomial(-1.0))
    if values.function not in (operator.mul, operator.truediv):
        return None
    both = [_monomial(a) if isinstance(a, Expression) else Monomial(float(a)) for a in values.args]
    first, second = both
    if second is not None and values.function is operator.truediv:
        second = second.inverse()
    return None if first is None or second is None else first.times(second)


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


def _sum_of_ends(score: Expression) -> SumOfEnds | None:
    score = _bare(score)
    slope = 1.0
    if isinstance(score, Map) and score.function is F.leaky_relu:
        slope = _slope(score)
        score = score.arguments[0]
    found = SumOfEnds(slope)
    return found if _add_terms(score, 1.0, found) and (found.rows or found.cols) else None


def _slope(made: Map) -> float:
    given = made.args[1] if len(made.args) > 1 else made.kwargs.get("negative_slope", 0.01)
    return float(given)


def _add_terms(values: Expression, sign: float, found: SumOfEnds) -> bool:
    values = _bare(values)
    if isinstance(values, Ends):
        (found.rows if values.is_row else found.cols).append((sign, values.tensors[0]))
        return True
    if isinstance(values, Entries):
        found.entries.append((sign, values.tensors[0]))
        return True
    if not isinstance(values, Map) or values.kwargs or len(values.arguments) != len(values.args):
        return False
    if values.function is operator.neg:
        return _add_terms(values.arguments[0], -sign, found)
    if values.function not in (operator.add, operator.sub):
        return False
    first, second = values.arguments
    second_sign = sign if values.function is operator.add else -sign
    return _add_terms(first, sign, found) and _add_terms(second, second_sign, found)


def _bare(values: Expression) -> Expression:
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


def _heads(x: Tensor) -> int:
    return x.shape[2] if x.dim() == 3 else 1


def _heads_first(x: Tensor) -> Tensor:
    """Features as operators take them, ``[m, heads, k]``."""
    if x.dim() == 3:
        return x.transpose(1, 2)
    return x.unsqueeze(1) if x.dim() == 2 else x.view(-1, 1, 1)


def _ends_of(dot: Dot) -> tuple[Tensor, Tensor]:
    """Queries ``[n, heads, k]`` and keys ``[m, heads, k]``."""
    x1, x2 = dot.tensors
    if x1.dim() == 3:
        return x1.transpose(1, 2), x2.permute(1, 2, 0)
    return x1.unsqueeze(1), x2.transpose(0, 1).unsqueeze(1)


def _scaled(x: Tensor, factors: list[Factor]) -> Tensor:
    for tensor, is_divisor in factors:
        factor = tensor.reshape(x.shape[0], -1, 1)
        x = x / factor if is_divisor else x * factor
    return x


def _is_same(a: Tensor, b: Tensor) -> bool:
    """True if both are views of one tensor, of the same numbers and with a common gradient."""
    if a.shape != b.shape or a.stride() != b.stride() or a.data_ptr() != b.data_ptr():
        return False
    (first, of_first), (second, of_second) = _viewed(a), _viewed(b)
    return not torch.is_grad_enabled() or (first is second and of_first == of_second)


_VIEWS = ("PermuteBackward0", "TBackward0", "TransposeBackward0", "UnsqueezeBackward0")


def _viewed(x: Tensor) -> tuple[object, int]:
    """The step of autograd, with the number of its output, of which a tensor is a view."""
    step, number = x.grad_fn, x.output_nr
    while step is not None and step.name() in _VIEWS:
        step, number = step.next_functions[0]
    return (x if step is None and x.requires_grad else step), number
