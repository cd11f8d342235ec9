"""Rules for reductions: over the sharded dimension collectives, with replicated results."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.tensor.collectives import records_gradient, sum_of_ranks
from fastgraph.dist.tensor.rules.pointwise import pointwise
from fastgraph.dist.tensor.sharded import ShardedTensor, aligned, is_sharded, wrapped
from fastgraph.dist.tensor.table import (
    REQUIRED,
    Arguments,
    NoRuleError,
    Options,
    bound,
    name_of,
    rule,
)


def _dims(x: ShardedTensor, dim: Any) -> list[int]:
    """The reduced dimensions, of which one is sharded, in ascending order."""
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return list(range(x.dim()))
    given = [dim] if isinstance(dim, int) else dim
    if not isinstance(given, (list, tuple)) or not all(isinstance(d, int) for d in given):
        raise NoRuleError
    if any(not -x.dim() <= d < x.dim() for d in given):
        raise NoRuleError
    return sorted(d % x.dim() for d in given)


def _count(x: ShardedTensor, dims: list[int]) -> int:
    return math.prod(x.shape[d] for d in dims)


def _local_result(
    func: Any, x: ShardedTensor, dims: list[int], args: Arguments, kw: Options
) -> Any:
    """A reduction over other dimensions than the sharded one: each rank reduces its own rows."""
    out = func(x.local, *args, **kw)
    first = out[0] if isinstance(out, tuple) else out
    kept = first.dim() == x.local.dim()
    return wrapped(out, x.rows, x.axis if kept else x.axis - sum(d < x.axis for d in dims))


@rule("sum nansum mean")
def total(func: Any, args: Arguments, kwargs: Options) -> Any:
    """Sums and means."""
    x, dim, keepdim, dtype = bound(
        args, kwargs, input=REQUIRED, dim=None, keepdim=False, dtype=None
    )
    dims, mean = _dims(x, dim), name_of(func) == "mean"
    if x.axis not in dims:
        return _local_result(func, x, dims, args[1:], kwargs)
    floating = (x.dtype if dtype is None else dtype).is_floating_point or x.is_complex()
    if mean and not floating:
        raise NoRuleError  # upstream's own message
    local = (torch.sum if mean else func)(x.local, dim=dims, keepdim=keepdim, dtype=dtype)
    out = sum_of_ranks(local)
    return out / _count(x, dims) if mean else out


@rule("count_nonzero")
def count_nonzero(func: Any, args: Arguments, kwargs: Options) -> Any:
    """``count_nonzero``: the number of elements that are not zero."""
    x, dim = bound(args, kwargs, input=REQUIRED, dim=None)
    return (x != 0).sum(_dims(x, dim))


@rule("any all")
def any_all(func: Any, args: Arguments, kwargs: Options) -> Any:
    """True where any or all elements are true."""
    x, dim, keepdim = bound(args, kwargs, input=REQUIRED, dim=None, keepdim=False)
    dims = _dims(x, dim)
    if x.dtype == torch.uint8 or x.dim() == 0:
        raise NoRuleError
    if x.axis not in dims:
        return _local_result(func, x, dims, args[1:], kwargs)
    found = x.local.bool()
    wants_all = name_of(func) == "all"
    found = (~found if wants_all else found).any(dims, keepdim=keepdim)
    found = transport.all_reduce(found) > 0
    return ~found if wants_all else found


@rule("bincount")
def bincount(func: Any, args: Arguments, kwargs: Options) -> Any:
    """The number of times that each integer occurs, or the sums of weights; replicated."""
    x, weights, minlength = bound(args, kwargs, input=REQUIRED, weights=None, minlength=0)
    if x.dim() != 1 or x.is_floating_point() or x.dtype == torch.bool or not x.numel():
        raise NoRuleError
    if int(x.min()) < 0 or minlength < 0 or (weights is not None and weights.shape != x.shape):
        raise NoRuleError  # upstream's own message
    lead = x if is_sharded(x) else weights
    length = max(minlength, int(x.max()) + 1)
    of_rows = None if weights is None else aligned(weights, lead.rows, 0)
    return sum_of_ranks(func(aligned(x, lead.rows, 0), of_rows, length))


@rule("max min")
def extremum(func: Any, args: Arguments, kwargs: Options) -> Any:
    """The largest or smallest of all elements, of rows with its index, or of two tensors."""
    other = args[1] if len(args) > 1 else kwargs.get("other")
    if isinstance(other, Tensor):
        return pointwise(func, args, kwargs)
    if len(args) == 1 and not kwargs:
        return getattr(args[0], f"a{name_of(func)}")()
    x, dim, _ = bound(args, kwargs, input=REQUIRED, dim=REQUIRED, keepdim=False)
    dims = _dims(x, dim)
    if x.axis in dims:
        return _with_position(func, x, args, kwargs)
    return _local_result(func, x, dims, args[1:], kwargs)


def _with_position(func: Any, x: ShardedTensor, args: Arguments, kwargs: Options) -> Any:
    """The extremum of a vector of integers, and the first position where it is found."""
    if x.local.dim() != 1 or x.is_floating_point() or x.dtype == torch.bool or not x.rows.n:
        raise NoRuleError  # which of several rows, upstream does not say
    best = getattr(x, f"a{name_of(func)}")()
    position = torch.where(x.local == best, x.rows.position, x.rows.n)
    first = ShardedTensor(position, x.rows, 0).amin()
    found = func(torch.empty(1, dtype=x.dtype), *args[1:], **kwargs)
    shape = found.values.shape
    return type(found)((best.view(shape), first.view(shape)))


@rule("argmax argmin")
def position_of_extremum(func: Any, args: Arguments, kwargs: Options) -> Any:
    """``argmax`` and ``argmin``: the index of the extremum of each row."""
    x, dim, _ = bound(args, kwargs, input=REQUIRED, dim=None, keepdim=False)
    dims = _dims(x, dim)
    if dim is None or x.axis in dims:
        raise NoRuleError
    return _local_result(func, x, dims, args[1:], kwargs)


@rule("amax amin")
def extreme_value(func: Any, args: Arguments, kwargs: Options) -> Any:
    """The largest or smallest value; the gradient is shared among ties, as upstream's is."""
    x, dim, keepdim = bound(args, kwargs, input=REQUIRED, dim=None, keepdim=False)
    dims = _dims(x, dim)
    if x.axis not in dims:
        return _local_result(func, x, dims, args[1:], kwargs)
    if x.dtype == torch.bool or x.is_complex() or not x.numel():
        raise NoRuleError
    reduce = torch.amax if name_of(func) == "amax" else torch.amin
    values = x.local.detach()
    if values.numel():
        values = reduce(values, dims, keepdim=True)
    else:
        shape = [1 if d in dims else size for d, size in enumerate(values.shape)]
        values = values.new_full(shape, _neutral(x.dtype, name_of(func)))
    # Gathered, as not every library's maximum keeps NaN.
    best = reduce(transport.all_gather(values[None], [1] * WORLD.size), 0)
    if records_gradient(x.local):
        ties = (x.detach() == best).to(x.dtype)
        best = best + ((x - x.detach()) * ties).sum(dims, keepdim=True) / ties.sum(
            dims, keepdim=True
        )
    return best if keepdim else best.squeeze(tuple(dims))


def _neutral(dtype: torch.dtype, name: str) -> float | int:
    if dtype.is_floating_point:
        return -math.inf if name == "amax" else math.inf
    info = torch.iinfo(dtype)
    return info.min if name == "amax" else info.max


@rule("var std")
def variance(func: Any, args: Arguments, kwargs: Options) -> Any:
    """Variances, in two passes."""
    if len(args) > 1 and isinstance(args[1], bool):  # var(unbiased)
        args, kwargs = (args[0], None, args[1], *args[2:]), kwargs
    x, dim, unbiased, keepdim, correction = bound(
        args, kwargs, input=REQUIRED, dim=None, unbiased=True, keepdim=False, correction=None
    )
    dims = _dims(x, dim)
    if not x.is_floating_point():
        raise NoRuleError
    if x.axis not in dims:
        return _local_result(func, x, dims, args[1:], kwargs)
    less = int(unbiased) if correction is None else correction
    degrees = max(_count(x, dims) - less, 0)
    squares = (x - x.mean(dims, keepdim=True)).square().sum(dims, keepdim=keepdim)
    result = squares / degrees
    return result if name_of(func) == "var" else _root(result)


def _root(x: Tensor) -> Tensor:
    """The square root, with gradient 0 at 0, as upstream defines it for norms."""
    zero = x == 0
    return torch.where(zero, torch.zeros_like(x), torch.where(zero, 1.0, x).sqrt())


@rule("norm linalg_vector_norm linalg_norm")
def norm(func: Any, args: Arguments, kwargs: Options) -> Any:
    """Euclidean norms."""
    x, p, dim, keepdim, dtype = bound(
        args,
        {"p" if key == "ord" else key: value for key, value in kwargs.items()},
        input=REQUIRED,
        p=2,
        dim=None,
        keepdim=False,
        dtype=None,
    )
    matrix = (
        name_of(func) == "linalg_norm"
        and p is not None
        and (dim is None or not isinstance(dim, int))
    )
    if p not in (2, None, "fro") or dtype is not None or not x.is_floating_point() or matrix:
        raise NoRuleError
    dims = _dims(x, dim)
    if x.axis not in dims:
        return _local_result(func, x, dims, args[1:], kwargs)
    return _root(x.square().sum(dims, keepdim=keepdim))


@rule("logsumexp")
def logsumexp(func: Any, args: Arguments, kwargs: Options) -> Any:
    """Logarithms of sums of exponentials."""
    x, dim, keepdim = bound(args, kwargs, input=REQUIRED, dim=REQUIRED, keepdim=False)
    dims = _dims(x, dim)
    if x.axis not in dims:
        return _local_result(func, x, dims, args[1:], kwargs)
    if not x.is_floating_point() or not is_sharded(x):
        raise NoRuleError
    largest = x.detach().amax(dims, keepdim=True)
    largest = torch.where(largest.isfinite(), largest, 0.0)
    out = (x - largest).exp().sum(dims, keepdim=True).log() + largest
    return out if keepdim else out.squeeze(tuple(dims))
