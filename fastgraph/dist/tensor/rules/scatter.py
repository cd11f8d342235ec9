"""Rules for scatters: values are sent to the owners of the rows that they are added to."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.own_device import HOST
from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.tensor.collectives import gather, halo_sum, returned, sum_of_ranks
from fastgraph.dist.tensor.exchange import Plan, plan
from fastgraph.dist.tensor.layout import Layout, known, usual
from fastgraph.dist.tensor.memo import on
from fastgraph.dist.tensor.rules.indexing import plan_of_range
from fastgraph.dist.tensor.sharded import ShardedTensor, aligned, is_sharded, placed
from fastgraph.dist.tensor.table import (
    Arguments,
    NoRuleError,
    Options,
    TorchFunction,
    is_in_place,
    name_of,
    rule,
    unpacked,
)


class _Call(NamedTuple):
    """The arguments of a scatter.

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


@unpacked
def _index_add(
    func: TorchFunction, x: Tensor, dim: int, index: Tensor, source: object, alpha: float = 1
) -> _Call:
    return _checked(x, dim, index, source, factor=alpha)


@unpacked
def _scatter_add(func: TorchFunction, x: Tensor, dim: int, index: Tensor, src: object) -> _Call:
    return _checked(x, dim, index, src, broadcast=True)


@unpacked
def _scatter_reduce(
    func: TorchFunction,
    x: Tensor,
    dim: int,
    index: Tensor,
    src: object,
    reduce: str,
    include_self: bool = True,
) -> _Call:
    options: Options = {"reduce": reduce, "include_self": include_self}
    return _checked(x, dim, index, src, broadcast=True, reduce=reduce, options=options)


_CALLS = {
    "index_add": _index_add,
    "scatter_add": _scatter_add,
    "scatter_reduce": _scatter_reduce,
}


def _checked(
    x: Tensor,
    dim: int,
    index: Tensor,
    source: object,
    *,
    broadcast: bool = False,
    reduce: str = "sum",
    factor: float = 1,
    options: Options | None = None,
) -> _Call:
    if not isinstance(source, Tensor) or not -x.dim() <= dim < x.dim():
        raise NoRuleError
    if source.dim() != x.dim() or (broadcast and index.dim() != x.dim()):
        raise NoRuleError
    if broadcast and index.shape != source.shape:
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
    return _Call(x, dim, vector, local, broadcast, reduce, factor, options or {})


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
def scatter(func: TorchFunction, args: Arguments, kwargs: Options) -> Tensor:
    """Sums, extrema and products over all ranks; means where all rows are of one rank."""
    call = _CALLS[name_of(func).removesuffix("_")](func, args, kwargs)
    if call.index.dtype != torch.int64 and call.broadcast:
        raise NoRuleError
    in_place = is_in_place(name_of(func))
    if not isinstance(call.x, ShardedTensor):
        if call.reduce in _EXTREMA:
            return _replaced(call, _extremum(call, None), in_place)
        if call.reduce == "prod":
            return _replaced(call, _product_on_all(call), in_place)
        return _to_replicated(call, in_place)
    if call.x.axis != call.dim:
        raise NoRuleError
    found = plan(call.index.local, call.x.rows)
    if found.remote:
        if call.reduce in _EXTREMA:
            return _replaced(call, _extremum(call, found), in_place)
        if call.reduce == "prod":
            return _replaced(call, _product(call, call.x, found), in_place)
        return _to_owners(call, call.x, found, in_place)
    index = on(found.place, call.source.device)
    if call.broadcast:
        shape = [-1 if dim == call.dim else 1 for dim in range(call.source.dim())]
        index = index.view(shape).expand(call.source.shape)
    options = call.options if call.options else {} if call.broadcast else {"alpha": call.factor}
    out = func(call.x.local, call.dim, index, call.source, **options)
    return call.x if in_place else ShardedTensor(out, call.x.rows, call.dim)


@rule("scatter", in_place=True)
def assign(func: TorchFunction, args: Arguments, kwargs: Options) -> Tensor:
    """Values put into columns, or other dimensions than the sharded one: each rank has its rows."""
    return _assigned(func, args, {"src" if k == "value" else k: v for k, v in kwargs.items()})


@unpacked
def _assigned(
    func: TorchFunction, x: Tensor, dim: int, index: Tensor, src: Tensor | float
) -> ShardedTensor:
    if not is_sharded(x) or index.dim() != x.dim() or not -x.dim() <= dim < x.dim():
        raise NoRuleError
    axis = x.axis
    if dim % x.dim() == axis or index.shape[axis] != x.rows.n:
        raise NoRuleError
    if isinstance(src, Tensor) and (src.dim() != x.dim() or src.shape[axis] != x.rows.n):
        raise NoRuleError
    places = aligned(index, x.rows, axis)
    out = func(x.local, dim, places, aligned(src, x.rows, axis))
    return x if is_in_place(name_of(func)) else ShardedTensor(out, x.rows, axis)


def _check_adds(call: _Call) -> None:
    if call.reduce != "sum" or not call.options.get("include_self", True):
        raise NoRuleError


def _to_owners(call: _Call, x: ShardedTensor, found: Plan, in_place: bool) -> ShardedTensor:
    """Each rank adds up its values for each row, and sends these sums to the rows' owners."""
    _check_adds(call)
    values = call.source.movedim(call.dim, 0)
    if call.factor != 1:
        values = values * call.factor
    sums = values.new_zeros((found.mine + sum(found.receives), *values.shape[1:]))
    sums = sums.index_add(0, on(found.place, values.device), values)
    own = sums[: found.mine] + halo_sum(sums[found.mine :], found)
    own = own.movedim(0, call.dim)
    if in_place:
        x.local.add_(own)
        return x
    return ShardedTensor(x.local + own, x.rows, call.dim)


def _to_replicated(call: _Call, in_place: bool) -> Tensor:
    """Scatter into a replicated tensor: the sum over all ranks is added to it."""
    _check_adds(call)
    plan_of_range(call.index, call.x.shape[call.dim])
    zeros = torch.zeros_like(call.x, memory_format=torch.contiguous_format)
    own = zeros.index_add(call.dim, call.index.local, call.source, alpha=call.factor)
    added = sum_of_ranks(own)
    return call.x.add_(added) if in_place else call.x + added


def _product_on_all(call: _Call) -> Tensor:
    """A replicated tensor, which may be edited then, times the products of all ranks."""
    if not call.options["include_self"]:
        raise NoRuleError
    plan_of_range(call.index, call.x.shape[call.dim])
    index, n = call.index.local, call.x.shape[call.dim]
    index = torch.where(index < 0, index + n, index)
    own = _products(call.source.movedim(call.dim, 0), index, n)
    of_ranks = Layout(torch.tensor([WORLD.rank], device=HOST), WORLD.size, [1] * WORLD.size)
    return call.x.clone() * gather(own[None], of_ranks, 0).prod(0).movedim(0, call.dim)


def _product(call: _Call, x: ShardedTensor, found: Plan) -> ShardedTensor:
    """Each rank sends its products for the rows of others to their owners, which multiply them."""
    if not call.options["include_self"]:
        raise NoRuleError
    values = call.source.movedim(call.dim, 0)
    place = on(found.place, values.device)
    own = _products(values, place, found.mine + sum(found.receives))
    parts = torch.cat([own[: found.mine], returned(own[found.mine :], found)])
    joined = on(found.joined, values.device)
    total = _products(parts, joined, found.mine).movedim(0, call.dim)
    return ShardedTensor(x.local.clone() * total, x.rows, call.dim)


def _products(values: Tensor, place: Tensor, size: int) -> Tensor:
    place = place.view(-1, *[1] * (values.dim() - 1)).expand(values.shape)
    return values.new_ones((size, *values.shape[1:])).scatter_reduce(0, place, values, "prod")


_EXTREMA = ("amax", "amin")


def _replaced(call: _Call, out: Tensor, in_place: bool) -> Tensor:
    return call.x.copy_(out) if in_place else out


def _extremum(call: _Call, found: Plan | None) -> Tensor:
    """The largest or smallest values, of which ties share the gradient, as upstream's do.

    Args:
        call: the scatter.
        found: how values get to the rows of a sharded tensor; ``None`` for a replicated one.
    """
    if call.dim != 0 or not call.x.is_floating_point():
        raise NoRuleError
    x, source = call.x, ShardedTensor(call.source, call.index.rows, 0)
    includes_self = bool(call.options["include_self"])
    if found is None:
        plan_of_range(call.index, x.shape[0])
    with torch.no_grad():
        best = _best(call, found)
        counts = torch.zeros_like(x[..., 0] if x.dim() > 1 else x).index_add(
            0, call.index, torch.ones_like(source[..., 0] if x.dim() > 1 else source)
        )
        is_empty = (counts == 0).unsqueeze(-1) if x.dim() > 1 else counts == 0
        if includes_self:
            best = (torch.maximum if call.reduce == "amax" else torch.minimum)(best, x)
        best = torch.where(is_empty, x.detach(), best)
    if not torch.is_grad_enabled() or not (source.requires_grad or x.requires_grad):
        return best
    tied = (source.detach() == best.index_select(0, call.index)).to(x.dtype)
    of_self = ((x.detach() == best) & (is_empty | includes_self)).to(x.dtype)
    shares = torch.zeros_like(best).index_add(0, call.index, tied) + of_self
    shares = torch.where(shares == 0, 1.0, shares)
    own = _change(source) * tied / shares.index_select(0, call.index)
    return (
        best + torch.zeros_like(best).index_add(0, call.index, own) + _change(x) * of_self / shares
    )


def _change(x: Tensor) -> Tensor:
    """Zeros with the gradient of a tensor; without one where it is infinite."""
    return torch.where(x.isfinite(), x - x.detach(), 0.0)


def _best(call: _Call, found: Plan | None) -> Tensor:
    """The extremum of the values for each row; any number where there are none."""
    values = call.source.detach()
    neutral = float("-inf") if call.reduce == "amax" else float("inf")

    def reduced(size: int, place: Tensor, rows: Tensor) -> Tensor:
        place = place.view(-1, *[1] * (rows.dim() - 1)).expand(rows.shape)
        start = rows.new_full((size, *rows.shape[1:]), neutral)
        return start.scatter_reduce(0, place, rows, call.reduce)

    if found is None:
        n = call.x.shape[0]
        index = torch.where(call.index.local < 0, call.index.local + n, call.index.local)
        own = reduced(n, index, values)
        of_all = transport.all_gather(own[None], [1] * WORLD.size)
        return of_all.amax(0) if call.reduce == "amax" else of_all.amin(0)
    own = reduced(found.mine + sum(found.receives), on(found.place, values.device), values)
    sent = transport.all_to_all(own[found.mine :], found.receives, found.sends)
    joined = on(found.joined, values.device)
    best = reduced(found.mine, joined, torch.cat([own[: found.mine], sent]))
    assert isinstance(call.x, ShardedTensor)
    return ShardedTensor(best, call.x.rows, 0)


@rule("new_zeros new_ones new_full new_empty")
@unpacked
def new(func: TorchFunction, x: ShardedTensor, *rest: object, **options: object) -> Tensor:
    """New tensors with one row for each node or edge are sharded like these."""
    given = options.pop("size", None)
    filled: Arguments = ()
    if name_of(func) == "new_full":
        filled = rest[-1:] if given is None and "fill_value" not in options else rest
        rest = rest[: len(rest) - len(filled)]
    if given is None:
        given = rest[0] if len(rest) == 1 and isinstance(rest[0], (list, tuple)) else rest
    if not isinstance(given, (list, tuple)) or not all(isinstance(n, int) for n in given):
        raise NoRuleError
    size = list(given)
    for axis, n in enumerate(size):
        rows = x.rows if n == x.rows.n else known(n)
        if rows is not None and n > 1:
            size[axis] = rows.mine
            return ShardedTensor(func(x.local, size, *filled, **options), rows, axis)
    # Ranks compare replicated tensors, also what nobody has set.
    make: TorchFunction = Tensor.new_zeros if name_of(func) == "new_empty" else func
    replicated: Tensor = make(x.local, size, *filled, **options)
    return replicated
