"""Scatters: values go to the owners of the rows that they are for."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgraph.dist.ranks import transport
from fastgraph.dist.tensor.collectives import halo_sum, sum_of_ranks
from fastgraph.dist.tensor.exchange import Plan, plan
from fastgraph.dist.tensor.layout import known, usual
from fastgraph.dist.tensor.rules.indexing import plan_of_range
from fastgraph.dist.tensor.sharded import ShardedTensor, aligned, is_sharded, placed
from fastgraph.dist.tensor.table import (
    REQUIRED,
    Arguments,
    NoRuleError,
    Options,
    bound,
    is_in_place,
    name_of,
    rule,
)


class _Call(NamedTuple):
    """A scatter.

    Attributes:
        x: what is added to.
        dim: the dimension of its rows.
        index: where the values go, int64 ``[E]`` by rows.
        source: the local values, which ``index`` is as long as.
        broadcast: whether the index was given with all dimensions of the values.
        reduce: ``sum``, ``amax``, ...
        factor: of the values.
        options: of the operation itself.
    """

    x: Tensor
    dim: int
    index: ShardedTensor  # type: ignore[assignment]  # shadows tuple.index
    source: Tensor
    broadcast: bool
    reduce: str
    factor: float
    options: Options


def _parsed(func: Any, args: Arguments, kwargs: Options) -> _Call:
    name = name_of(func).removesuffix("_")
    factor, options, reduce = 1, {}, "sum"
    if name == "index_add":
        x, dim, index, source, factor = bound(
            args, kwargs, input=REQUIRED, dim=REQUIRED, index=REQUIRED, source=REQUIRED, alpha=1
        )
    elif name == "scatter_add":
        x, dim, index, source = bound(
            args, kwargs, input=REQUIRED, dim=REQUIRED, index=REQUIRED, src=REQUIRED
        )
    else:
        x, dim, index, source, reduce, include = bound(
            args,
            kwargs,
            input=REQUIRED,
            dim=REQUIRED,
            index=REQUIRED,
            src=REQUIRED,
            reduce=REQUIRED,
            include_self=True,
        )
        options = {"reduce": reduce, "include_self": include}
    if not isinstance(source, Tensor) or not -x.dim() <= dim < x.dim():
        raise NoRuleError
    if source.dim() != x.dim() or (name != "index_add" and index.dim() != x.dim()):
        raise NoRuleError
    if name != "index_add" and index.shape != source.shape:
        raise NoRuleError
    dim %= x.dim()
    expected = [*x.shape[:dim], source.shape[dim], *x.shape[dim + 1 :]]
    if (
        list(source.shape) != expected
        or index.shape[dim if index.dim() > 1 else 0] != expected[dim]
    ):
        raise NoRuleError
    vector = _vector(_laid_out(x, dim, index, source), dim)
    local = aligned(source, vector.rows, dim)
    return _Call(x, dim, vector, local, name != "index_add", reduce, factor, options)


def _laid_out(x: Tensor, dim: int, index: Tensor, source: Tensor) -> ShardedTensor:
    """The index as a sharded tensor."""
    if isinstance(index, ShardedTensor):
        return index
    if isinstance(source, ShardedTensor):
        if source.axis != dim:
            raise NoRuleError
        rows = source.rows
    elif is_sharded(x):
        rows = usual(source.shape[dim])
    else:
        raise NoRuleError
    if index.dim() == 1:
        return placed(index, rows, 0)
    return ShardedTensor(aligned(index, rows, dim), rows, dim)


def _vector(index: ShardedTensor, dim: int) -> ShardedTensor:
    """One entry for each row; an index of more dimensions must repeat it for the others."""
    if index.dim() == 1:
        return index
    if index.axis != dim:
        raise NoRuleError
    local = index.local
    others = [other for other in reversed(range(local.dim())) if other != dim]
    if any(local.shape[other] == 0 for other in others):
        raise NoRuleError
    repeats = all(local.stride(other) == 0 or local.shape[other] == 1 for other in others)
    # Strides of no elements say nothing.
    if min(index.rows.counts) == 0:
        repeats = transport.agree(repeats or not index.rows.mine)
    if not repeats:
        raise NoRuleError
    for other in others:
        local = local.select(other, 0)
    return ShardedTensor(local, index.rows, 0)


@rule("scatter_add index_add scatter_reduce", in_place=True)
def scatter(func: Any, args: Arguments, kwargs: Options) -> Any:
    """Sums, and what else is reduced among rows of one rank."""
    call = _parsed(func, args, kwargs)
    if call.index.dtype != torch.int64 and call.broadcast:
        raise NoRuleError
    in_place = is_in_place(name_of(func))
    if not isinstance(call.x, ShardedTensor):
        return _to_replicated(call, in_place)
    if call.x.axis != call.dim:
        raise NoRuleError
    found = plan(call.index.local, call.x.rows)
    if found.remote:
        return _to_owners(call, call.x, found, in_place)
    index = found.place
    if call.broadcast:
        shape = [-1 if dim == call.dim else 1 for dim in range(call.source.dim())]
        index = index.view(shape).expand(call.source.shape)
    options = call.options if call.options else {} if call.broadcast else {"alpha": call.factor}
    out = func(call.x.local, call.dim, index, call.source, **options)
    return call.x if in_place else ShardedTensor(out, call.x.rows, call.dim)


def _check_adds(call: _Call) -> None:
    if call.reduce != "sum" or not call.options.get("include_self", True):
        raise NoRuleError


def _to_owners(call: _Call, x: ShardedTensor, found: Plan, in_place: bool) -> ShardedTensor:
    """Each rank adds up what it has for each row of the others, which then add that."""
    _check_adds(call)
    values = call.source.movedim(call.dim, 0)
    if call.factor != 1:
        values = values * call.factor
    sums = values.new_zeros((found.mine + sum(found.receives), *values.shape[1:]))
    sums = sums.index_add(0, found.place, values)
    own = sums[: found.mine] + halo_sum(sums[found.mine :], found)
    own = own.movedim(0, call.dim)
    if in_place:
        x.local.add_(own)
        return x
    return ShardedTensor(x.local + own, x.rows, call.dim)


def _to_replicated(call: _Call, in_place: bool) -> Tensor:
    """The sum over ranks is added to a replicated tensor."""
    _check_adds(call)
    plan_of_range(call.index, call.x.shape[call.dim])
    zeros = torch.zeros_like(call.x, memory_format=torch.contiguous_format)
    own = zeros.index_add(call.dim, call.index.local, call.source, alpha=call.factor)
    added = sum_of_ranks(own)
    return call.x.add_(added) if in_place else call.x + added


@rule("new_zeros new_ones new_full new_empty")
def new(func: Any, args: Arguments, kwargs: Options) -> Any:
    """New tensors of as many rows as there are nodes or edges are sharded like these."""
    x, rest = args[0], args[1:]
    options = dict(kwargs)
    size = options.pop("size", None)
    filled = ()
    if name_of(func) == "new_full":
        filled = rest[-1:] if size is None and "fill_value" not in options else rest
        rest = rest[: len(rest) - len(filled)]
    if size is None:
        size = rest[0] if len(rest) == 1 and isinstance(rest[0], (list, tuple)) else rest
    if not all(isinstance(s, int) for s in size):
        raise NoRuleError
    size = list(size)
    for axis, n in enumerate(size):
        rows = x.rows if n == x.rows.n else known(n)
        if rows is not None and n > 1:
            size[axis] = rows.mine
            return ShardedTensor(func(x.local, size, *filled, **options), rows, axis)
    return func(x.local, size, *filled, **options)
