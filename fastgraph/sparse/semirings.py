"""Products over semirings: messages of another kind, reduced in another way.

After section 4.3 of "High-Performance and Programmable Attentional Graph Neural Networks with
Global Tensor Formulations" (SC 2023). Sums are :func:`fastgraph.ops.spmm`; extrema and
``logsumexp`` are edge programs, which store nothing of entries x channels, or
:func:`fastgraph.ops.segment_reduce` where that is the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgraph import ops
from fastgraph.edge_programs.builder import Builder, Value
from fastgraph.edge_programs.operations import EXTREMA, SOFTMAX_MAX, SOFTMAX_SCALE
from fastgraph.edge_programs.program import Program
from fastgraph.edge_programs.winners import RANK, with_winners
from fastgraph.ops.segment_reduce import TIES
from fastgraph.ops.topology import check_choice
from fastgraph.plugins.backend import accumulator
from fastgraph.sparse.pairs import pairs
from fastgraph.sparse.pattern import Pattern
from fastgraph.sparse.products import check_spmm, check_spspmm

ADDITIONS: Mapping[str, float] = {
    "plus": 0.0,
    "min": math.inf,
    "max": -math.inf,
    "logsumexp": -math.inf,
    "mean": 0.0,
    "weighted_mean": 0.0,
}
"""Reductions of messages, and what a row without entries has: the identity of the monoid, or 0 of
a mean, which has none."""

MULTIPLICATIONS = ("times", "plus", "minus", "first", "second", "pair")
"""Messages of a value of the matrix and a number of the features."""

_Names = tuple[str, str]


def parse(semiring: str) -> _Names:
    """The addition and the multiplication of a semiring, ``"min_plus"`` for example.

    Raises:
        ValueError: there is no such semiring.
    """
    add, _, multiply = semiring.rpartition("_") if isinstance(semiring, str) else ("", "", "")
    if add not in ADDITIONS or multiply not in MULTIPLICATIONS:
        raise ValueError(
            f"semiring must be ADD_MULTIPLY with ADD of {[*ADDITIONS]} and MULTIPLY of "
            f"{[*MULTIPLICATIONS]}, got {semiring!r}"
        )
    return add, multiply


def matmul(pattern: Pattern, val: Tensor, x: Tensor, semiring: str, ties: str = "split") -> Tensor:
    """The product with a dense matrix, a vector, or one matrix for each head, over a semiring.

    Each entry is a message, several in one place, too. Computed in float32, or float64, and rounded
    once; extrema of half types that are split are compared as they are rounded.

    Args:
        pattern: of ``[n, m]``.
        val: ``[nnz]``, or ``[nnz, heads]`` for dense matrices of heads.
        x: ``[m]``, ``[m, k]`` or ``[m, k, heads]``, of the dtype of ``val``.
        semiring: see :func:`parse`.
        ties: of extrema, see :func:`fastgraph.sparse.matmul`.

    Returns:
        ``[n]``, ``[n, k]`` or ``[n, k, heads]``.

    Raises:
        ValueError: there is no such semiring, or no such treatment of ties.
        RuntimeError: shapes, dtypes or devices do not fit, or no kernel takes the dtype.
    """
    names = parse(semiring)
    check_choice("ties", ties, TIES)
    check_spmm(pattern, val, x)
    if x.dim() == 1:
        return _matmul(pattern, val, x.unsqueeze(1), names, ties).squeeze(1)
    if x.dim() == 2:
        return _matmul(pattern, val, x, names, ties)
    out = _matmul(pattern, val, x.transpose(1, 2), names, ties)
    return out.transpose(1, 2).contiguous()


def _matmul(pattern: Pattern, val: Tensor, x: Tensor, names: _Names, ties: str) -> Tensor:
    """Of ``[m, k]``, or ``[m, heads, k]`` with values ``[nnz, heads]``."""
    if x.numel() == 0 or pattern.nnz == 0:
        return _of_nothing(pattern, val, x, names)
    add, multiply = names
    if multiply not in ("first", "pair"):
        return reduced(_Messages(pattern, multiply, val, x), add, ties)
    of_rows = reduced(_Messages(pattern, multiply, val), add, ties)
    return of_rows.expand(pattern.shape[0], *x.shape[1:]).contiguous()


def _of_nothing(pattern: Pattern, val: Tensor, x: Tensor, names: _Names) -> Tensor:
    """No kernel runs for no channels, and a gradient has its shape even so."""
    add, multiply = names
    a, b = val.unsqueeze(-1), x.index_select(0, pattern.col)
    made = {"times": a * b, "plus": a + b, "minus": a - b, "first": a + torch.zeros_like(b)}
    messages = made.get(multiply, b)
    out = x.new_full((pattern.shape[0], *x.shape[1:]), ADDITIONS[add])
    return out.index_add(0, pattern.row, messages)


def spspmm(
    a: Pattern,
    a_val: Tensor,
    b: Pattern,
    b_val: Tensor,
    semiring: str,
    ties: str = "split",
) -> tuple[Pattern, Tensor]:
    """The product of two sparse matrices without duplicates over a semiring.

    There is an entry where two entries meet, and nowhere else.

    Args:
        a: of ``[n, m]``.
        a_val: ``[nnz]``, also the weights of weighted means.
        b: of ``[m, p]``.
        b_val: ``[nnz]`` of B, of the dtype of ``a_val``.
        semiring: as for :func:`matmul`.
        ties: as for :func:`matmul`; entries of A are ordered first.

    Returns:
        The pattern, in ascending order, and its values.

    Raises:
        ValueError: as for :func:`matmul`.
        RuntimeError: as for :func:`fastgraph.sparse.products.spspmm`.
    """
    add, multiply = parse(semiring)
    check_choice("ties", ties, TIES)
    check_spspmm(a, a_val, b, b_val)
    made = pairs(a, b)
    left, right = made.of_a.gather(a_val), made.of_b.gather(b_val)
    of_pairs: dict[str, Callable[[], Tensor]] = {
        "times": lambda: left * right,
        "plus": lambda: left + right,
        "minus": lambda: left - right,
        "second": lambda: right,
        "pair": lambda: torch.ones_like(left),
    }
    message = of_pairs.get(multiply, lambda: left)()
    if message.numel() == 0:
        return made.pattern, message
    messages = _Messages(made.by_product, "first", message, weight=left)
    if add != "weighted_mean":
        messages = messages._replace(weight=None)
    return made.pattern, reduced(messages, add, ties).squeeze(-1)


class _Messages(NamedTuple):
    """The messages of all entries, which are not computed.

    Attributes:
        pattern: where the entries are.
        multiply: one of :data:`MULTIPLICATIONS`, ``first`` or ``pair`` if there are no features.
        val: ``[nnz]``, or ``[nnz, heads]``.
        x: ``[m, k]``, ``[m, heads, k]`` where values have heads, or ``None``. Results have as many
            channels, or one for each head.
        weight: of the messages in sums and weighted means, like ``val``; default: 1, and the values
            themselves.
    """

    pattern: Pattern
    multiply: str
    val: Tensor
    x: Tensor | None = None
    weight: Tensor | None = None

    @property
    def channels(self) -> torch.Size:
        """Those of results."""
        return torch.Size([*self.val.shape[1:], 1]) if self.x is None else self.x.shape[1:]

    @property
    def operands(self) -> dict[str, Tensor]:
        """Tensors of which the messages are made, as programs call them."""
        found: dict[str, Tensor] = {}
        if self.multiply not in ("second", "pair"):
            found["a"] = self.val
        if self.x is not None:
            found["x"] = self.x
        return found

    def to(self, dtype: torch.dtype) -> _Messages:
        """The same of another dtype."""
        x, weight = (None if t is None else t.to(dtype) for t in (self.x, self.weight))
        return self._replace(val=self.val.to(dtype), x=x, weight=weight)

    def filled(self, reduced: Tensor, identity: float) -> Tensor:
        """Results with this number in rows without entries."""
        empty = self.pattern.empty_rows
        return reduced.index_fill(0, empty, identity) if len(empty) else reduced


def _reduced(messages: _Messages, add: str, ties: str) -> Tensor:
    """Messages reduced over each row by one of :data:`ADDITIONS`, ``[n, *channels]``."""
    if messages.multiply == "pair":
        ones = torch.ones_like(messages.val)
        messages = messages._replace(multiply="first", val=ones)
        if add == "weighted_mean":  # of ones
            add = "mean"
    dtype = messages.val.dtype
    # One operator rounds once, several do not.
    is_one = add in EXTREMA and ties == "split"
    is_one = is_one or (add in ("plus", "mean") and messages.multiply not in ("plus", "minus"))
    if not is_one and accumulator(dtype) != dtype:
        return reduced(messages.to(accumulator(dtype)), add, ties).to(dtype)
    if add == "plus":
        return _sum(messages, "sum")
    if add == "mean":
        return _sum(messages, "mean")
    if add == "weighted_mean":
        return _weighted_mean(messages)
    out = _logsumexp(messages) if add == "logsumexp" else _extremum(messages, add, ties)
    return messages.filled(out, ADDITIONS[add])


# Programs are made in Python, once, and not by compiled code.
reduced: Callable[[_Messages, str, str], Tensor] = torch.compiler.disable(_reduced)


def _sum(messages: _Messages, reduce: str) -> Tensor:
    """The weighted sums of messages, or their means over all entries of each row."""
    pattern, multiply, val, x, weight = messages
    if multiply in ("plus", "minus"):
        of_values = _sum(messages._replace(multiply="first", x=None), reduce)
        of_features = _sum(messages._replace(multiply="second"), reduce)
        return of_values + of_features if multiply == "plus" else of_values - of_features
    if multiply == "first":
        message = val if weight is None else weight * val
        sums = pattern.by_row.reduce(message, "sum" if reduce == "sum" else "smean")
        return sums.unsqueeze(-1)
    assert x is not None
    if multiply == "times":
        weight = val if weight is None else weight * val
    return ops.spmm(x, weight=weight, reduce=reduce, **_edges(pattern))


def _weighted_mean(messages: _Messages) -> Tensor:
    weight = messages.val if messages.weight is None else messages.weight
    sums = _sum(messages._replace(weight=weight), "sum")
    totals = _sum(_Messages(messages.pattern, "first", weight), "sum")
    return sums / messages.filled(totals, 1.0)


def _extremum(messages: _Messages, add: str, ties: str) -> Tensor:
    """Extrema, which are 0 in rows without entries."""
    operands, pattern = messages.operands, messages.pattern
    is_recorded = torch.is_grad_enabled() and any(t.requires_grad for t in operands.values())
    x, multiply = messages.x, messages.multiply
    is_weighted = multiply == "times" and messages.val.dim() == 1
    is_known = x is not None and (
        (multiply == "second" and (not is_recorded or ties == "winner"))
        or (is_weighted and not is_recorded)
    )
    if is_known:
        assert x is not None
        weight = messages.val if is_weighted else None
        edges = _edges(pattern)
        return ops.segment_reduce(x, weight=weight, reduce=add, ties="winner", **edges)
    outputs: tuple[str, ...] = (add, EXTREMA[add]) if is_recorded and ties == "split" else (add,)
    program = _program(messages, outputs)
    if is_recorded and ties == "winner":
        return _won(messages, program, ADDITIONS[add])
    out, *shares = _run(messages, program, operands)
    return _Alone.apply(out, *shares) if shares else out  # type: ignore[no-untyped-call]


def _won(messages: _Messages, program: Program, identity: float) -> Tensor:
    """Extrema whose gradient the first of equal messages has, and nobody that of the identity."""
    operands = messages.operands
    made = with_winners(program, frozenset([0]))
    (name,) = made.names
    ranks = messages.pattern.ranks.to(messages.val.dtype)
    with torch.no_grad():
        (extremum,) = _run(messages, made.extrema, operands)
        taken = {**operands, RANK: ranks, name: extremum}
        taken[name] = _run(messages, made.ranks, taken)[0]
    (winner,) = _run(messages, made.program, taken)
    return torch.where(extremum.isnan() | (extremum == identity), extremum, winner)


def _logsumexp(messages: _Messages) -> Tensor:
    """``log(sum(exp(message)))``, of the largest message and the sum of what it exceeds others by.

    The largest one is a constant: whatever is subtracted and added again has no gradient.
    """
    program = _program(messages, (SOFTMAX_MAX, SOFTMAX_SCALE))
    largest, scale = _run(messages, program, messages.operands)
    out = largest - messages.filled(scale, 1.0).log()
    bound = torch.finfo(out.dtype).max  # to which messages were clamped
    return out.masked_fill(largest >= bound, math.inf).masked_fill(largest <= -bound, -math.inf)


def _program(messages: _Messages, outputs: tuple[str, ...]) -> Program:
    heads = messages.val.shape[1:].numel()
    bound = torch.finfo(messages.val.dtype).max if SOFTMAX_MAX in outputs else None
    return _programmed(messages.multiply, heads, messages.channels.numel(), outputs, bound)


@functools.lru_cache(maxsize=256)
def _programmed(
    multiply: str, heads: int, width: int, outputs: tuple[str, ...], bound: float | None
) -> Program:
    """A program with these reductions of messages, which are clamped if there is a bound."""
    b = Builder()

    def a() -> Value:
        return b.operand("a", "edge", heads)

    def x() -> Value:
        return b.operand("x", "gathered", width)

    made = {
        "times": lambda: a() * x(),
        "plus": lambda: a() + x(),
        "minus": lambda: a() - x(),
        "first": a,
        "second": x,
    }
    message = made[multiply]()
    if bound is not None:  # the difference of two infinities is no number
        message = b.apply("clamp", message, -bound, bound)
    return b.program(*((reduction, message) for reduction in outputs))


def _run(
    messages: _Messages, program: Program, operands: Mapping[str, Tensor]
) -> tuple[Tensor, ...]:
    """The results of a program, ``[n, *channels]`` each."""
    taken = {name: operands[name] for name in program.names}
    pattern = messages.pattern
    found = ops.edge_program(program, taken, num_in=pattern.shape[1], **_edges(pattern))
    return tuple(out.view(-1, *messages.channels) for out in found)


def _edges(pattern: Pattern) -> dict[str, Any]:
    index, ptr, transpose, _, _ = pattern.edges
    return {"index": index, "ptr": ptr, "num_out": pattern.shape[0], "transpose": transpose}


class _Alone(torch.autograd.Function):
    """Extrema of edge programs without the zero that shares the gradient of those that are 0.

    Upstream's results begin with it, but rows begin with the identity here.
    """

    @staticmethod
    def forward(out: Tensor, shares: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        out, shares = inputs
        ctx.mark_non_differentiable(shares)
        ctx.save_for_backward(out, shares)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        out, shares = ctx.saved_tensors
        is_zero = out == 0
        if not is_zero.any():
            return grads[0], None
        messages = (shares - 1).clamp(min=1)
        return torch.where(is_zero, grads[0] * shares / messages, grads[0]), None
