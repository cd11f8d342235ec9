"""Rules for reductions: over the sharded dimension collectives, with replicated results."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.own_device import HOST
from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.tensor.collectives import records_gradient, sum_of_ranks
from fastgraph.dist.tensor.rules.pointwise import pointwise
from fastgraph.dist.tensor.sharded import ShardedTensor, aligned, is_sharded
from fastgraph.dist.tensor.table import (
    Arguments,
    NoRuleError,
    Options,
    TorchFunction,
    name_of,
    rule,
    unpacked,
)

Dims = int | Sequence[int] | None


def _dims(x: Tensor, dim: Dims) -> list[int]:
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


def _sharded(local: Tensor, x: ShardedTensor, dims: list[int]) -> ShardedTensor:
    """The result of a reduction of local rows over other dimensions than the sharded one."""
    kept = local.dim() == x.local.dim()
    return ShardedTensor(local, x.rows, x.axis if kept else x.axis - sum(d < x.axis for d in dims))


@rule("sum nansum mean")
@unpacked
def total(
    func: TorchFunction,
    x: ShardedTensor,
    dim: Dims = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Sums and means."""
    dims, mean = _dims(x, dim), name_of(func) == "mean"
    if x.axis not in dims:
        return _sharded(func(x.local, dim, keepdim, dtype=dtype), x, dims)
    floating = (x.dtype if dtype is None else dtype).is_floating_point or x.is_complex()
    if mean and not floating:
        raise NoRuleError  # upstream's own message
    local = (torch.sum if mean else func)(x.local, dim=dims, keepdim=keepdim, dtype=dtype)
    out = sum_of_ranks(local)
    return out / _count(x, dims) if mean else out


@rule("count_nonzero")
@unpacked
def count_nonzero(func: TorchFunction, x: ShardedTensor, dim: Dims = None) -> Tensor:
    """``count_nonzero``: the number of elements that are not zero."""
    return (x != 0).sum(_dims(x, dim))


@rule("any all")
@unpacked
def any_all(
    func: TorchFunction, x: ShardedTensor, dim: Dims = None, keepdim: bool = False
) -> Tensor:
    """True where any or all elements are true."""
    dims = _dims(x, dim)
    if x.dtype == torch.uint8 or x.dim() == 0:
        raise NoRuleError
    if x.axis not in dims:
        return _sharded(func(x.local, dim, keepdim), x, dims)
    found = x.local.bool()
    wants_all = name_of(func) == "all"
    found = (~found if wants_all else found).any(dims, keepdim=keepdim)
    found = transport.all_reduce(found) > 0
    return ~found if wants_all else found


@rule("bincount")
@unpacked
def bincount(
    func: TorchFunction, x: Tensor, weights: Tensor | None = None, minlength: int = 0
) -> Tensor:
    """The number of times that each integer occurs, or the sums of weights; replicated."""
    if x.dim() != 1 or x.is_floating_point() or x.dtype == torch.bool or not x.numel():
        raise NoRuleError
    if int(x.min()) < 0 or minlength < 0 or (weights is not None and weights.shape != x.shape):
        raise NoRuleError  # upstream's own message
    lead = x if is_sharded(x) else weights
    if not is_sharded(lead):
        raise NoRuleError
    length = max(minlength, int(x.max()) + 1)
    of_rows = aligned(weights, lead.rows, 0)
    return sum_of_ranks(func(aligned(x, lead.rows, 0), of_rows, length))


@rule("max min")
def extremum(func: TorchFunction, args: Arguments, kwargs: Options) -> object:
    """The largest or smallest of all elements, of rows with its index, or of two tensors."""
    x, other = args[0], args[1] if len(args) > 1 else kwargs.get("other")
    if isinstance(other, Tensor):
        return pointwise(func, args, kwargs)
    if len(args) == 1 and not kwargs and isinstance(x, Tensor):
        return _extremum_of_all(x, name_of(func))
    return _extremum_along(func, args, kwargs)


def _extremum_of_all(x: Tensor, name: str) -> Tensor:
    return x.amax() if name == "max" else x.amin()


@unpacked
def _extremum_along(
    func: TorchFunction, x: ShardedTensor, dim: Dims, keepdim: bool = False
) -> tuple[Tensor, ...]:
    dims = _dims(x, dim)
    if x.axis in dims:
        return _with_position(func, x, dim, keepdim)
    found: tuple[Tensor, ...] = func(x.local, dim, keepdim)
    return type(found)([_sharded(part, x, dims) for part in found])


def _with_position(
    func: TorchFunction, x: ShardedTensor, dim: Dims, keepdim: bool
) -> tuple[Tensor, ...]:
    """The extremum of a vector of integers, and the first position where it is found."""
    if x.local.dim() != 1 or x.is_floating_point() or x.dtype == torch.bool or not x.rows.n:
        raise NoRuleError  # which of several rows, upstream does not say
    best = _extremum_of_all(x, name_of(func))
    position = torch.where(x.local == best, x.rows.position_on(best.device), x.rows.n)
    first = ShardedTensor(position, x.rows, 0).amin()
    found: tuple[Tensor, ...] = func(torch.empty(1, dtype=x.dtype, device=HOST), dim, keepdim)
    shapes = [value.shape for value in found]
    return type(found)([best.view(shapes[0]), first.view(shapes[1])])


@rule("argmax argmin")
@unpacked
def position_of_extremum(
    func: TorchFunction, x: ShardedTensor, dim: Dims = None, keepdim: bool = False
) -> Tensor:
    """``argmax`` and ``argmin``: the index of the extremum of each row."""
    dims = _dims(x, dim)
    if dim is None or x.axis in dims:
        raise NoRuleError
    return _sharded(func(x.local, dim, keepdim), x, dims)


@rule("amax amin")
@unpacked
def extreme_value(
    func: TorchFunction, x: ShardedTensor, dim: Dims = None, keepdim: bool = False
) -> Tensor:
    """The largest or smallest value; the gradient is shared among ties, as upstream's is."""
    dims = _dims(x, dim)
    if x.axis not in dims:
        return _sharded(func(x.local, dim, keepdim), x, dims)
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
def variance(func: TorchFunction, args: Arguments, kwargs: Options) -> Tensor:
    """Variances, in two passes."""
    if len(args) > 1 and isinstance(args[1], bool):  # var(unbiased)
        args = (args[0], None, *args[1:])
    return _variance(func, args, kwargs)


@unpacked
def _variance(
    func: TorchFunction,
    x: ShardedTensor,
    dim: Dims = None,
    unbiased: bool = True,
    keepdim: bool = False,
    correction: float | None = None,
) -> Tensor:
    dims, is_root = _dims(x, dim), name_of(func) == "std"
    if not x.is_floating_point():
        raise NoRuleError
    less = int(unbiased) if correction is None else correction
    if x.axis not in dims:
        reduce = torch.std if is_root else torch.var
        return _sharded(reduce(x.local, dims, correction=less, keepdim=keepdim), x, dims)
    degrees = max(_count(x, dims) - less, 0)
    squares = (x - x.mean(dims, keepdim=True)).square().sum(dims, keepdim=keepdim)
    result = squares / degrees
    return _root(result) if is_root else result


def _root(x: Tensor) -> Tensor:
    """The square root, with gradient 0 at 0, as upstream defines it for norms."""
    zero = x == 0
    return torch.where(zero, torch.zeros_like(x), torch.where(zero, 1.0, x).sqrt())


@rule("norm linalg_vector_norm linalg_norm")
def norm(func: TorchFunction, args: Arguments, kwargs: Options) -> Tensor:
    """Euclidean norms."""
    return _norm(func, args, {"p" if k == "ord" else k: value for k, value in kwargs.items()})


@unpacked
def _norm(
    func: TorchFunction,
    x: ShardedTensor,
    p: float | str | None = 2,
    dim: Dims = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    of_matrix = name_of(func) == "linalg_norm" and p is not None and not isinstance(dim, int)
    if p not in (2, None, "fro") or dtype is not None or not x.is_floating_point() or of_matrix:
        raise NoRuleError
    dims = _dims(x, dim)
    if x.axis not in dims:
        return _sharded(func(x.local, p, dim, keepdim), x, dims)
    return _root(x.square().sum(dims, keepdim=keepdim))


@rule("logsumexp")
@unpacked
def logsumexp(func: TorchFunction, x: ShardedTensor, dim: Dims, keepdim: bool = False) -> Tensor:
    """Logarithms of sums of exponentials."""
    dims = _dims(x, dim)
    if x.axis not in dims:
        return _sharded(func(x.local, dim, keepdim), x, dims)
    if not x.is_floating_point():
        raise NoRuleError
    largest = x.detach().amax(dims, keepdim=True)
    largest = torch.where(largest.isfinite(), largest, 0.0)
    out = (x - largest).exp().sum(dims, keepdim=True).log() + largest
    return out if keepdim else out.squeeze(tuple(dims))
