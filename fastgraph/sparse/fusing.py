"""The fuser: which products and reductions of expressions of values are one operator.

From each virtual matrix to the sparse one that samples it, a path is one group ("High-Performance
and Programmable Attentional Graph Neural Networks with Global Tensor Formulations", SC 2023,
section 6.2). A softmax of scaled dot products is ``attention``, with a bias or without, one of a
LeakyReLU of sums ``gat`` or ``gatv2``; factors of rows and columns alone go to the features of
``spmm``; all else that programs have instructions for is an edge program.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastgraph import ops
from fastgraph.machine.memory import new_rows
from fastgraph.ops.library import is_defined_by
from fastgraph.routing.status import count_program, count_routed, count_separate
from fastgraph.sparse import products
from fastgraph.sparse.expression import (
    Dot,
    Dropout,
    Expression,
    Softmax,
    are_begun,
    are_few,
    may_defer,
)
from fastgraph.sparse.matching import (
    Additive,
    BiasedDots,
    Monomial,
    SumOfEnds,
    additive,
    bare,
    biased_dots,
    dot_products,
    ends_of,
    has_infinity,
    heads_first,
    heads_of,
    is_same,
    laid_out,
    monomial,
    scaled,
    sum_of_ends,
)
from fastgraph.sparse.pattern import Pattern
from fastgraph.sparse.programs import INFINITE, REDUCED_AS, Message, Refused

NAME = "sparse"
"""Under which products and reductions of expressions are counted."""

_FEW = "too few values to gain without a softmax"

_HALVES = (torch.bfloat16, torch.float16)

_FEWEST_OF_PROGRAM = 2**22
"""Entries times channels from which on an edge program was faster than two operators."""

_FEWEST_OF_ROW = 16
"""The mean number of entries in a row from which on edge programs of one head were faster than
separate operators. Of 6.4 in WordNet they took 0.9 to 1.4 times as long, of 10 in Debian up to 1.2
times, of 88 in Tolokers 0.6 to 0.9 times. On eight heads, which stand last and are copied, separate
operators were always slower."""

_WIDE = 64
"""The number of channels from which on products of dot products and factors were faster by programs
on rows of few entries, too, with gradients."""

_MOST_SCALED, _MOST_SCALED_TRAINING = 8, 12
"""How many numbers of nodes may be scaled for each entry of one head, without and with gradients,
where factors of rows and columns scale features of nodes in less time than values of entries. 10 in
WordNet with 64 channels took 0.97 to 1.39 times as long, and with gradients 0.95 to 1.1
times; 20 up to 1.7 times."""

_MOST_SCALED_SCORING = 24
"""The same for scores without a gradient. 20 in WordNet with 64 channels took 0.88 times as long,
24 in Debian with 128 as long, and 40 in WordNet with 128 1.15 times."""


@dataclass(frozen=True)
class Plan:
    """How a product or a reduction is computed by one operator.

    Attributes:
        operator: its name.
        run: computes it: of features ``[m, heads, k]``, as ``[n, heads, k]``, or the reduction.
        is_program: true if it is an edge program.
        kept: how many numbers of each row and head it stores for gradients.
        of_kept: of what these are.
    """

    operator: str
    run: Callable[..., Tensor]
    is_program: bool = False
    kept: int = 0
    of_kept: str = "the softmax of each row"


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
    _note_use(values)
    if isinstance(found, str):
        _count(found)
        return products.spmm(pattern, values.value(), x)
    values.check_unedited()
    _count(found)
    out = found.run(heads_first(x))
    if x.dim() == 3:
        return _heads_last(out)
    return out.reshape(pattern.shape[0], *x.shape[1:])


def _heads_last(x: Tensor) -> Tensor:
    """Features ``[n, heads, k]`` of operators as ``[n, k, heads]``, contiguous."""
    x = x.transpose(1, 2)
    if is_defined_by(x):
        return x.contiguous()
    return new_rows(x, x.shape).copy_(x)  # has the gradient of a copy


def reduction(values: Expression, dim: int, reduce: str) -> Tensor:
    """The reduction of the values of each row, for ``dim`` 1, or of each column, for 0.

    Args:
        values: of the matrix.
        dim: along which.
        reduce: one of ``fastgraph.sparse.groups.REDUCTIONS``.

    Returns:
        ``[n]`` or ``[n, heads]``.

    Raises:
        RuntimeError: an operand was edited in place.
    """
    found = plan_reduction(values, dim, reduce)
    _note_use(values)
    if isinstance(found, Plan):
        values.check_unedited()
        out = found.run().reshape(values.pattern.shape[1 - dim], *values.shape[1:])
        if found.is_program or not has_infinity(out.detach()):
            _count(found)
            return out
        found = _INFINITE_SUM
    _count(found)
    groups = values.pattern.by_row if dim == 1 else values.pattern.by_column
    return groups.reduce(values.value(), reduce)


_INFINITE_SUM = "a sum that is infinite, or NaN"
"""Of infinite features the sum may be NaN where that of their products is infinite."""


def _note_use(values: Expression) -> None:
    """Of values that are used again, all later ones of their structure will be computed."""
    if values.num_products > 0:
        values.pattern.reused.add(values.structure)
    values.num_products += 1


def _count(found: Plan | str) -> None:
    """Count a product or reduction by what computes it."""
    if isinstance(found, str):
        count_separate(NAME, found)
    elif found.is_program:
        count_program(NAME)
    else:
        count_routed(NAME)


def plan(values: Expression, x: Tensor) -> Plan | str:
    """The operator that computes a product, or why separate ones do."""
    reason = _separate(values, x)
    if reason is not None:
        return reason
    body, dropout = (
        (values, None) if not isinstance(values, Dropout) else (values.arguments[0], values)
    )
    body = bare(body)
    if isinstance(body, Softmax):
        return _weighted(body.arguments[0], dropout, x)
    if dropout is not None:
        return "dropout of values that are no softmax"
    return _FEW if are_few(values.pattern, values.shape.numel()) else _summed(body, x)


def plan_reduction(values: Expression, dim: int, reduce: str) -> Plan | str:
    """The operator that computes a reduction, or why separate ones do."""
    if reduce not in REDUCED_AS:
        return "products of the values of rows"
    reason = _separate(values)
    if reason is not None:
        return reason
    if are_few(values.pattern, values.shape.numel()):
        return _FEW
    made = monomial(values)
    is_sum = reduce in ("sum", "smean")
    if is_sum and made is not None and _is_sum_of_products(made, values):
        return _sum_of_products(made, values, dim, REDUCED_AS[reduce])
    heads = values.shape[1:].numel()
    has_gradient = torch.is_grad_enabled() and values.requires_grad
    message = _message(values, heads, heads, has_gradient, is_by_row=dim == 1)
    if isinstance(message, str):
        return message
    run = functools.partial(message.reduced, REDUCED_AS[reduce], heads)
    if reduce in ("smax", "smin"):
        return Plan("edge_program", run, True, 2, "the extremum of each row and its ties")
    return Plan("edge_program", run, True, 0, "each row")


def _separate(values: Expression, *tensors: Tensor) -> str | None:
    """Why nothing is fused, whatever the expression is."""
    if values.is_computed:
        return "values that were asked for before"
    reused = values.pattern.reused
    if values.num_products > 0 or (reused and values.structure in reused):
        return "values that several products use"
    is_sharded = values.pattern.is_sharded
    if not may_defer(*tensors) or any(is_defined_by(t) != is_sharded for t in tensors):
        return (
            "compiled, transformed, under autocast, in inference mode, of a tensor's subclass, or "
            "where hooks see what is saved"
        )
    is_empty = values.pattern.nnz == 0 or 0 in values.shape
    if is_empty or any(t.numel() == 0 for t in tensors):
        return "no entries or no channels"
    made = values.walk()
    if torch.is_grad_enabled() and any(m.is_cut for m in made):
        return "made where no gradients were recorded"
    if are_begun(made):
        return "scores that were asked for before"
    return None


def takes_dropout(values: Expression) -> bool:
    """True if a product with these values, some of them dropped, may be one operator."""
    body = bare(values)
    is_few = are_few(values.pattern, values.shape.numel())  # separate operators draw in less time
    if not isinstance(body, Softmax) or body.is_computed or is_few:
        return False
    score = body.arguments[0]
    return any(
        form(score) is not None for form in (sum_of_ends, dot_products, biased_dots, additive)
    )


def _weighted(score: Expression, dropout: Dropout | None, x: Tensor) -> Plan | str:
    """Of features that the softmax of scores weighs."""
    options: dict[str, Any] = {}
    if dropout is not None:
        options = {"dropout": dropout.rate, "seed": dropout.seed}
    found: Plan | str
    if (dots := dot_products(score)) is not None:
        found = _attention(dots, score, x, options)
    elif (biased := biased_dots(score)) is not None:
        found = _attention(biased.dots, score, x, options, biased)
    elif (ends := sum_of_ends(score)) is not None:
        found = _gat(ends, score, x, options)
    elif (added := additive(score)) is not None:
        found = _gatv2(added, score, x, options)
    else:
        found = "a softmax of scores that no operator knows"
    if isinstance(found, Plan):
        return found
    if dropout is not None or found in (_SCALED, INFINITE):
        return found
    return _program(score, x, is_softmax=True)


def _attention(
    dots: Monomial,
    score: Expression,
    x: Tensor,
    options: dict[str, Any],
    biased: BiasedDots | None = None,
) -> Plan | str:
    if biased is not None and score.device.type != "cpu":
        return "a bias that may be infinite, as only those on CPUs are looked at"
    if biased is not None and not biased.is_ordinary():
        return "a bias that is infinite, or NaN"
    (dot,) = dots.dots
    query, key = ends_of(dot)
    if key.shape[-1] != (1 if x.dim() == 1 else x.shape[1]):
        return "queries and features of different widths"
    if query.shape[1] != heads_of(x):
        return "scores of another number of heads"
    if score.dtype in _HALVES and (dots.rows or dots.cols):
        return "dot products in half precision that rows or columns scale"
    pattern = score.pattern
    has_gradient = torch.is_grad_enabled() and (score.requires_grad or x.requires_grad)
    num_scaled = _num_scaled(dots, pattern) * key.shape[-1]
    most = _MOST_SCALED if has_gradient else _MOST_SCALED_SCORING
    if heads_of(x) == 1 and num_scaled > most * pattern.nnz:
        return _SCALED
    if not dots.is_ordinary(pattern):
        return INFINITE

    def run(x: Tensor) -> Tensor:
        index, ptr, transpose, _, _ = pattern.edges
        return ops.attention(
            laid_out(scaled(query, dots.rows, pattern, "row")),
            laid_out(scaled(key, dots.cols, pattern, "col")),
            laid_out(x),
            index,
            ptr=ptr,
            transpose=transpose,
            scale=dots.scale,
            bias=None if biased is None else biased.bias(x.shape[1]),
            **options,
        )[0]

    return Plan("attention", run, kept=2)


_SCALED = "more features to scale than values, of one head"


def _num_scaled(made: Monomial, pattern: Pattern) -> int:
    """The number of rows and columns whose features factors scale; on ranks no matter."""
    if pattern.is_sharded:  # separate operators would send each other more than is scaled
        return 0
    n, m = pattern.shape
    return n * len(made.rows) + m * len(made.cols)


def _gat(ends: SumOfEnds, score: Expression, x: Tensor, options: dict[str, Any]) -> Plan | str:
    heads = heads_of(x)
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
            laid_out(x),
            total(ends.cols, m),
            total(ends.rows, n),
            index,
            score_edge=total(ends.entries, score.pattern.nnz) if ends.entries else None,
            ptr=ptr,
            transpose=transpose,
            negative_slope=ends.slope,
            **options,
        )[0]

    return Plan("gat", run, kept=2)


def _gatv2(found: Additive, score: Expression, x: Tensor, options: dict[str, Any]) -> Plan | str:
    if not is_same(found.cols, x):
        return "features other than those of the scores' columns"

    def run(x: Tensor) -> Tensor:
        index, ptr, transpose, _, _ = score.pattern.edges
        vector = heads_first(found.vector.unsqueeze(0))
        rows = heads_first(found.rows)
        return ops.gatv2(
            laid_out(x),
            laid_out(rows),
            vector,
            index,
            ptr=ptr,
            transpose=transpose,
            negative_slope=found.slope,
            **options,
        )[0]

    return Plan("gatv2", run, kept=2)


def _summed(body: Expression, x: Tensor) -> Plan | str:
    """Of features that values weigh, without a softmax."""
    made = monomial(body)
    if made is not None and not made.dots:
        return _scaled_spmm(made, body, x)
    return _program(body, x, is_softmax=False)


def _scaled_spmm(made: Monomial, body: Expression, x: Tensor) -> Plan | str:
    """Of scaled features, so that nobody stores what scales entries, as in graph convolutions."""
    pattern = body.pattern
    num_scaled = _num_scaled(made, pattern) * x.shape[1:].numel()
    if heads_of(x) == 1 and num_scaled > _MOST_SCALED * pattern.nnz:
        return _SCALED
    if not made.is_ordinary(pattern):
        return INFINITE

    def run(x: Tensor) -> Tensor:
        index, ptr, transpose, _, _ = pattern.edges
        weight = _product_of([t.value(pattern, "entry") for t in made.entries])
        out = ops.spmm(
            laid_out(scaled(x, made.cols, pattern, "col")),
            index,
            weight,
            ptr=ptr,
            num_out=pattern.shape[0],
            transpose=transpose,
        )
        out = scaled(out, made.rows, pattern, "row", is_after=True)
        return out if made.scale == 1 else out * made.scale

    return Plan("spmm", run, of_kept="each row")


def _is_sum_of_products(made: Monomial, values: Expression) -> bool:
    return len(made.dots) <= 1 and all(d.shape == values.shape for d in made.dots)


def _sum_of_products(made: Monomial, values: Expression, dim: int, reduce: str) -> Plan | str:
    """Of products of one dot product: the sum of neighbours is multiplied with the row."""
    pattern, heads = values.pattern, values.shape[1:].numel()
    own, other = ("row", "col") if dim == 1 else ("col", "row")
    factors = {"row": made.rows, "col": made.cols}
    num_out, num_in = pattern.shape if dim == 1 else pattern.shape[::-1]
    if made.dots and heads == 1:
        width = made.dots[0].tensors[0].shape[1]
        num_scaled = (num_out + num_in * len(factors[other])) * width
        has_gradient = torch.is_grad_enabled() and values.requires_grad
        if num_scaled > (_MOST_SCALED_TRAINING if has_gradient else _MOST_SCALED) * pattern.nnz:
            return _SCALED
    if not made.is_ordinary(pattern):
        return INFINITE

    def run() -> Tensor:
        index, ptr, transpose, _, _ = pattern.edges
        if made.dots:
            ends = ends_of(made.dots[0])
            query, key = ends if dim == 1 else ends[::-1]
        else:
            query = key = torch.ones(num_in, heads, 1, dtype=values.dtype, device=values.device)
        weight = _product_of([t.value(pattern, "entry") for t in made.entries])
        out = ops.spmm(
            laid_out(scaled(key, factors[other], pattern, other)),
            index,
            weight,
            ptr=ptr,
            num_out=num_out,
            reduce=reduce,
            transpose=transpose if dim == 1 else not transpose,
        )
        if made.dots:
            out = (query * out).sum(-1, keepdim=True)
            empty = pattern.empty_rows if dim == 1 else pattern.empty_columns
            out = out.index_fill(0, empty, 0.0) if empty.numel() > 0 else out
        out = scaled(out, factors[own], pattern, own, is_after=True)
        return out if made.scale == 1 else out * made.scale

    width = made.dots[0].tensors[0].shape[1] if made.dots else 1
    return Plan("spmm", run, kept=width, of_kept="the sum of features for each row")


def _product_of(tensors: list[Tensor]) -> Tensor | None:
    wide = max((t.dim() for t in tensors), default=0)
    given = [t.unsqueeze(1) if t.dim() < wide else t for t in tensors]
    return functools.reduce(operator.mul, given) if given else None


def _program(score: Expression, x: Tensor, *, is_softmax: bool) -> Plan | str:
    if score.shape[1:].numel() not in (1, heads_of(x)):
        return "scores of another number of heads"
    has_gradient = torch.is_grad_enabled() and (score.requires_grad or x.requires_grad)
    message = _message(score, x.shape[1:].numel(), heads_of(x), has_gradient, is_softmax=is_softmax)
    if isinstance(message, str):
        return message
    run = functools.partial(message.product, is_softmax=is_softmax)
    return Plan("edge_program", run, is_program=True, kept=2 if is_softmax else 0)


def _message(
    values: Expression,
    width: int,
    heads: int,
    has_gradient: bool,
    *,
    is_by_row: bool = True,
    is_softmax: bool = False,
) -> Message | str:
    """The values as those of a program, where it gains; on ranks it does, as it sends rows once."""
    if values.pattern.is_sharded:
        try:
            return Message(values, is_by_row=is_by_row)
        except Refused as refused:
            return str(refused)
    if values.device.type != "cpu":
        return "an edge program that was measured on CPUs only"
    widths = [m.tensors[0].shape[1] * heads for m in values.walk() if isinstance(m, Dot)]
    if values.pattern.nnz * max(width, *widths, 1) < _FEWEST_OF_PROGRAM:
        return "too few entries for an edge program to gain"
    made = None if is_softmax else monomial(values)
    is_product = False
    if made is not None and len(made.dots) == 1 and width > 1:
        is_product = True
        if heads == 1 and has_gradient and _is_slower(made, values.pattern, width):
            # Told before a program has features of all rows scaled.
            return "rows of few entries of one head, with gradients"
    try:
        message = Message(values, is_by_row=is_by_row)
    except Refused as refused:
        return str(refused)
    if is_product or heads > 1:
        return message
    return _slower_of_one_head(message, width, has_gradient, is_softmax=is_softmax) or message


def _has_few(pattern: Pattern) -> bool:
    return pattern.nnz < _FEWEST_OF_ROW * max(pattern.shape)


def _is_slower(made: Monomial, pattern: Pattern, width: int) -> bool:
    """True where gradients of one dot product of one head take longer by a program, as measured."""
    is_scaled = any(factor.tensor.requires_grad for factor in made.rows + made.cols)
    return _has_few(pattern) and (is_scaled or width < _WIDE)


def _slower_of_one_head(
    message: Message, width: int, has_gradient: bool, *, is_softmax: bool
) -> str | None:
    """Why separate operators on one head are faster for other values, as they were measured."""
    if has_gradient:
        return "gradients of values of one head that are no dot products"
    if _has_few(message.pattern) or (width == 1 and message.num_dots == 0):
        return "rows of few entries, of one head"
    if is_softmax and message.has_entries:
        return "a softmax of given values of entries, of one head"
    return None
