"""Operators of torch along channels, composed of others that are known: norms, softmax, parts.

A composition is equal to the operator up to rounding, gradients included, also where these are none
by rights: of a norm of zeros it is zero, and of several equal maxima all have a share, or the first
has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fastgraph.edge_programs.calls import aten
from fastgraph.edge_programs.recorded import Refused


class Runs(Protocol):
    """Runs operators of torch on what is recorded."""

    def run(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """The result of an operator."""
        ...

    def largest(self, tensor: Tensor, dims: Sequence[int]) -> Tensor:
        """The largest numbers along dimensions, which stay, without their gradient."""
        ...

    def first_largest(self, tensor: Tensor, dim: int, keepdim: bool) -> tuple[Tensor, Tensor]:
        """The largest numbers along a dimension, of which the first has the gradient, and where."""
        ...


def _dims(dim: int | Sequence[int] | None) -> list[int]:
    found = [dim] if isinstance(dim, int) else list(dim or ())
    if not found:
        raise Refused("it works across edges")
    return found


def _add(r: Runs, a: Tensor, b: Any) -> Any:
    return r.run(aten.add.Tensor, a, b)


def _sub(r: Runs, a: Tensor, b: Any) -> Any:
    return r.run(aten.sub.Tensor, a, b)


def _mul(r: Runs, a: Tensor, b: Any) -> Any:
    return r.run(aten.mul.Tensor, a, b)


def _div(r: Runs, a: Tensor, b: Any) -> Any:
    return r.run(aten.div.Tensor, a, b)


def _neg(r: Runs, a: Tensor) -> Any:
    return r.run(aten.neg.default, a)


def _sum(r: Runs, a: Tensor, dims: Sequence[int], keepdim: bool) -> Any:
    return r.run(aten.sum.dim_IntList, a, dims, keepdim)


def _mean(r: Runs, a: Tensor, dims: Sequence[int], keepdim: bool = True) -> Any:
    return r.run(aten.mean.dim, a, dims, keepdim)


def _affine(r: Runs, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Any:
    x = x if weight is None else _mul(r, x, weight)
    return x if bias is None else _add(r, x, bias)


def _exponentials(r: Runs, x: Tensor, dim: int, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Numbers minus the largest one, and the sum of the exponentials of that."""
    if dtype not in (None, x.dtype):
        raise Refused(f"it has a softmax of another dtype ({dtype})")
    left = _sub(r, x, r.largest(x, (dim,)))
    return left, _sum(r, r.run(aten.exp.default, left), (dim,), keepdim=True)


def softmax(r: Runs, self: Tensor, dim: int, dtype: torch.dtype | None) -> Any:
    """Numbers above 0 whose sum is 1."""
    left, total = _exponentials(r, self, dim, dtype)
    return _div(r, r.run(aten.exp.default, left), total)


def log_softmax(r: Runs, self: Tensor, dim: int, dtype: torch.dtype | None) -> Any:
    """Their logarithms."""
    left, total = _exponentials(r, self, dim, dtype)
    return _sub(r, left, r.run(aten.log.default, total))


def logsumexp(r: Runs, self: Tensor, dim: int | Sequence[int], keepdim: bool) -> Any:
    """The logarithm of the sum of exponentials, also where the largest number is infinite."""
    dims = _dims(dim)
    most = r.largest(self, dims)
    is_infinite = r.run(aten.eq.Scalar, r.run(aten.abs.default, most), math.inf)
    most = r.run(aten.masked_fill.Scalar, most, is_infinite, 0.0)
    total = _sum(r, r.run(aten.exp.default, _sub(r, self, most)), dims, keepdim=True)
    found = _add(r, r.run(aten.log.default, total), most)
    return found if keepdim else _sum(r, found, dims, keepdim=False)


def _root(r: Runs, square: Tensor) -> Any:
    """The square root, of which the gradient at 0 is 0."""
    is_zero = r.run(aten.eq.Scalar, square, 0.0)
    root = r.run(aten.sqrt.default, r.run(aten.masked_fill.Scalar, square, is_zero, 1.0))
    return r.run(aten.masked_fill.Scalar, root, is_zero, 0.0)


def norm(
    r: Runs,
    self: Tensor,
    ord: float,
    dim: int | Sequence[int] | None,
    keepdim: bool,
    dtype: torch.dtype | None,
) -> Any:
    """The norm with the exponents 1, 2 and infinity."""
    dims = _dims(dim)
    if dtype not in (None, self.dtype):
        raise Refused(f"it has a norm of another dtype ({dtype})")
    if ord == 2:
        return _root(r, _sum(r, _mul(r, self, self), dims, keepdim))
    if ord == 1:
        return _sum(r, r.run(aten.abs.default, self), dims, keepdim)
    if ord == math.inf:
        return r.run(aten.amax.default, r.run(aten.abs.default, self), dims, keepdim)
    raise Refused(f"it has a norm with the exponent {ord}")


def pairwise_distance(r: Runs, x1: Tensor, x2: Tensor, p: float, eps: float, keepdim: bool) -> Any:
    """The norm of a difference."""
    return norm(r, _add(r, _sub(r, x1, x2), eps), p, -1, keepdim, None)


def cosine_similarity(r: Runs, x1: Tensor, x2: Tensor, dim: int, eps: float) -> Any:
    """The cosine of the angle between two vectors."""
    first, second = (
        _div(r, x, r.run(aten.clamp_min.default, norm(r, x, 2, dim, True, None), eps))
        for x in (x1, x2)
    )
    return _sum(r, _mul(r, first, second), (dim,), keepdim=False)


def amin(r: Runs, self: Tensor, dim: Sequence[int], keepdim: bool) -> Any:
    """The least numbers, of which equal ones share the gradient."""
    return _neg(r, r.run(aten.amax.default, _neg(r, self), _dims(dim), keepdim))


def largest(r: Runs, self: Tensor, **given: Any) -> Any:
    """The larger one of two numbers; or the largest along a dimension, without their places."""
    if "other" in given:
        return r.run(aten.maximum.default, self, given["other"])
    if "dim" not in given:
        raise Refused("it works across edges")
    return torch.return_types.max(r.first_largest(self, given["dim"], given["keepdim"]))


def least(r: Runs, self: Tensor, **given: Any) -> Any:
    """The same of least ones."""
    if "other" in given:
        return r.run(aten.minimum.default, self, given["other"])
    if "dim" not in given:
        raise Refused("it works across edges")
    values, places = r.first_largest(_neg(r, self), given["dim"], given["keepdim"])
    return torch.return_types.min((_neg(r, values), places))


def _variance(r: Runs, x: Tensor, dims: Sequence[int], keepdim: bool, correction: float) -> Any:
    count = math.prod(x.shape[d] for d in dims)
    if count <= correction:
        raise Refused("it has a variance of too few numbers")
    left = _sub(r, x, _mean(r, x, dims))
    return _div(r, _sum(r, _mul(r, left, left), dims, keepdim), count - correction)


def _correction(given: Mapping[str, Any]) -> float:
    if "unbiased" in given:
        return float(given["unbiased"])
    return 1.0 if given["correction"] is None else float(given["correction"])


def var(r: Runs, self: Tensor, dim: Any = None, keepdim: bool = False, **given: Any) -> Any:
    """The variance along dimensions."""
    return _variance(r, self, _dims(dim), keepdim, _correction(given))


def std(r: Runs, self: Tensor, dim: Any = None, keepdim: bool = False, **given: Any) -> Any:
    """The standard deviation along dimensions."""
    return _root(r, _variance(r, self, _dims(dim), keepdim, _correction(given)))


def _standardised(r: Runs, x: Tensor, dims: Sequence[int], eps: float) -> Any:
    left = _sub(r, x, _mean(r, x, dims))
    scale = _add(r, _mean(r, _mul(r, left, left), dims), eps)
    return _div(r, left, r.run(aten.sqrt.default, scale))


def _last(x: Tensor, normalized_shape: Sequence[int]) -> list[int]:
    if len(normalized_shape) >= x.dim():
        raise Refused("it works across edges")
    return list(range(-len(normalized_shape), 0))


def layer_norm(
    r: Runs,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    cudnn_enable: bool,
) -> Any:
    """Channels of mean 0 and variance 1, times a weight."""
    x = _standardised(r, input, _last(input, normalized_shape), eps)
    return _affine(r, x, weight, bias)


def rms_norm(
    r: Runs,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    eps: float | None,
) -> Any:
    """Channels whose squares have the mean 1, times a weight."""
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    square = _mean(r, _mul(r, input, input), _last(input, normalized_shape))
    x = _div(r, input, r.run(aten.sqrt.default, _add(r, square, eps)))
    return _affine(r, x, weight, None)


def group_norm(
    r: Runs,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    """Channels of which some have the mean 0 and the variance 1, times a weight."""
    if input.dim() != 2:
        raise Refused("it has groups of channels of several dimensions")
    grouped = r.run(aten.view.default, input, [input.shape[0], num_groups, -1])
    x = r.run(aten.view.default, _standardised(r, grouped, (-1,), eps), list(input.shape))
    return _affine(r, x, weight, bias)


def batch_norm(r: Runs, input: Tensor, **given: Any) -> Any:
    """Channels minus a mean over a root, which are parameters."""
    if input.dim() != 2:
        raise Refused("it has a batch norm of several dimensions")
    x = _sub(r, input, given["running_mean"])
    scale = r.run(aten.sqrt.default, _add(r, given["running_var"], given["eps"]))
    return _affine(r, _div(r, x, scale), given["weight"], given["bias"])


def prelu(r: Runs, self: Tensor, weight: Tensor) -> Any:
    """The number itself above 0, and a multiple elsewhere."""
    if weight.numel() > 1 and self.dim() != 2:
        shape = [weight.numel(), *(1,) * (self.dim() - 2)]
        weight = r.run(aten.view.default, weight, shape)
    is_positive = r.run(aten.gt.Scalar, self, 0.0)
    # Not of a positive number: infinity times an unused gradient would be NaN.
    rest = _mul(r, r.run(aten.masked_fill.Scalar, self, is_positive, 0.0), weight)
    return r.run(aten.where.self, is_positive, self, rest)


def glu(r: Runs, self: Tensor, dim: int) -> Any:
    """The first half times the sigmoid of the second."""
    size = self.shape[dim]
    if size % 2:
        raise Refused("it has halves of an odd number of channels")
    first = r.run(aten.slice.Tensor, self, dim, 0, size // 2)
    second = r.run(aten.slice.Tensor, self, dim, size // 2, size)
    return _mul(r, first, r.run(aten.sigmoid.default, second))


def cross(r: Runs, self: Tensor, other: Tensor, dim: int | None) -> Any:
    """The cross product."""
    if dim is None:
        raise Refused("it has a cross product along whatever dimension has the size 3")
    a, b = ([r.run(aten.select.int, x, dim, k) for k in range(3)] for x in (self, other))
    made = [_sub(r, _mul(r, a[k], b[m]), _mul(r, a[m], b[k])) for k, m in ((1, 2), (2, 0), (0, 1))]
    return r.run(aten.stack.default, made, dim)


def _parts(r: Runs, x: Tensor, dim: int, sizes: Sequence[int]) -> list[Any]:
    found, start = [], 0
    for size in sizes:
        found.append(r.run(aten.slice.Tensor, x, dim, start, start + size))
        start += size
    return found


def chunk(r: Runs, self: Tensor, chunks: int, dim: int) -> list[Any]:
    """So many parts, of which the last may be smaller."""
    return split(r, self, -(-self.shape[dim] // chunks), dim)


def split(r: Runs, self: Tensor, split_size: int | Sequence[int], dim: int) -> list[Any]:
    """Parts of a size, or of some sizes."""
    if not isinstance(split_size, int):
        return _parts(r, self, dim, split_size)
    size = max(split_size, 1)
    whole, rest = divmod(self.shape[dim], size)
    return _parts(r, self, dim, [*(size,) * whole, *((rest,) if rest else ())])


def split_with_sizes(r: Runs, self: Tensor, split_sizes: Sequence[int], dim: int) -> list[Any]:
    """Parts of some sizes."""
    return _parts(r, self, dim, split_sizes)


def unbind(r: Runs, self: Tensor, dim: int) -> list[Any]:
    """All channels along a dimension."""
    return [r.run(aten.select.int, self, dim, k) for k in range(self.shape[dim])]


def narrow(r: Runs, self: Tensor, dim: int, start: int, length: int) -> Any:
    """Some channels along a dimension."""
    if not isinstance(start, int):
        raise Refused("it takes channels from a place that is a tensor")
    return r.run(aten.slice.Tensor, self, dim, start, start + length)


SEVERAL: Mapping[Any, Callable[..., Any]] = {
    aten.chunk: chunk,
    aten.split: split,
    aten.split_with_sizes: split_with_sizes,
    aten.unbind: unbind,
    aten.narrow: narrow,
    aten.max: largest,
    aten.min: least,
}
"""Operators with several results, which are composed of whatever they take."""

COMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    **SEVERAL,
    aten.softmax: softmax,
    aten.log_softmax: log_softmax,
    aten.logsumexp: logsumexp,
    aten.linalg_vector_norm: norm,
    aten.pairwise_distance: pairwise_distance,
    aten.cosine_similarity: cosine_similarity,
    aten.amin: amin,
    aten.var: var,
    aten.std: std,
    aten.layer_norm: layer_norm,
    aten.rms_norm: rms_norm,
    aten.group_norm: group_norm,
    aten.batch_norm: batch_norm,
    aten.prelu: prelu,
    aten.glu: glu,
    aten.cross: cross,
    aten.linalg_cross: cross,
}
"""By operator: the result, given what runs others and the operator's arguments by name."""
