"""Rules for operations that change shapes and keep rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.tensor.collectives import sum_of_ranks
from fastgraph.dist.tensor.layout import Layout, joined, usual
from fastgraph.dist.tensor.sharded import (
    ShardedTensor,
    aligned,
    alike,
    enter,
    is_sharded,
    placed,
    wrapped,
)
from fastgraph.dist.tensor.table import (
    Arguments,
    NoRuleError,
    Options,
    TorchFunction,
    name_of,
    rule,
    unpacked,
)


def _sizes(args: Sequence[object]) -> list[int]:
    """Sizes that were given one by one or as a sequence."""
    sizes = args[0] if len(args) == 1 and isinstance(args[0], (list, tuple)) else args
    if not all(isinstance(size, int) for size in sizes):
        raise NoRuleError
    return list(sizes)


@rule("view reshape _unsafe_view flatten unflatten view_as reshape_as")
def reshape(func: TorchFunction, args: Arguments, kwargs: Options) -> ShardedTensor:
    """Dimensions before the sharded one stay; it may be joined with those behind it, or split.

    It may be joined with all of those before it, too.
    """
    x, name = args[0], name_of(func)
    if not is_sharded(x):
        raise NoRuleError
    if name in ("view", "reshape", "_unsafe_view"):
        if kwargs.keys() - {"shape"} or (len(args) == 2 and isinstance(args[1], torch.dtype)):
            raise NoRuleError
        new = _sizes(args[1:] or (kwargs["shape"],))
    elif name in ("view_as", "reshape_as"):
        new = _shape_of_other(func, args, kwargs)
    else:
        new = list(func(torch.empty(x.shape, device="meta"), *args[1:], **kwargs).shape)
    if -1 in new:
        others = -math.prod(new)
        if others == 0:
            raise NoRuleError
        new[new.index(-1)] = x.numel() // others
    if math.prod(new) != x.numel():
        raise NoRuleError  # upstream's own message
    before = math.prod(x.shape[: x.axis])
    for axis, size in enumerate(new):
        if math.prod(new[:axis]) != before:
            continue
        rows = _reshaped(x, size, axis)
        if rows is not None:
            local_shape = [rows.mine if i == axis else size for i, size in enumerate(new)]
            return ShardedTensor(alike(x, x.local.reshape(local_shape)), rows, axis)
    return _with_leading(x, new)


@unpacked
def _shape_of_other(func: TorchFunction, x: Tensor, other: Tensor) -> list[int]:
    return list(other.shape)


def _with_leading(x: ShardedTensor, new: list[int]) -> ShardedTensor:
    """All dimensions before the sharded one are joined with it, or such are taken apart again."""
    behind = list(x.shape[x.axis + 1 :])
    if x.axis and new == [math.prod(x.shape[: x.axis + 1]), *behind]:
        rows, axis = x.rows.repeated(math.prod(x.shape[: x.axis])), 0
    elif x.axis == 0 and x.rows.repeats is not None:
        rows, k = x.rows.repeats
        axis = len(new) - len(behind) - 1
        if axis < 1 or new[axis:] != [rows.n, *behind] or math.prod(new[:axis]) != k:
            raise NoRuleError
    else:
        raise NoRuleError
    local_shape = [rows.mine if i == axis else size for i, size in enumerate(new)]
    return ShardedTensor(alike(x, x.local.reshape(local_shape)), rows, axis)


def _reshaped(x: ShardedTensor, size: int, axis: int) -> Layout | None:
    """The layout of a dimension of this size that starts where the sharded one does."""
    rows = x.rows
    if size == rows.n and (size != 1 or axis == x.axis):
        return rows
    if rows.split_from is not None and rows.split_from[0].n == size:
        return rows.split_from[0]
    joint = rows.n
    for further in x.shape[x.axis + 1 :]:
        joint *= further
        if joint == size and rows.n:
            return rows.split(size // rows.n)
    return None


@rule("unsqueeze")
@unpacked
def unsqueeze(func: TorchFunction, x: ShardedTensor, dim: int) -> ShardedTensor:
    """``unsqueeze``: add a dimension."""
    at = dim + x.local.dim() + 1 if dim < 0 else dim
    return ShardedTensor(x.local.unsqueeze(dim), x.rows, x.axis + (at <= x.axis))


@rule("squeeze")
@unpacked
def squeeze(
    func: TorchFunction, x: ShardedTensor, dim: int | Sequence[int] | None = None
) -> ShardedTensor:
    """``squeeze``: drop dimensions of size 1, but for the sharded one, whatever its local size."""
    wanted = range(x.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    if any(not -x.dim() <= d < x.dim() for d in wanted):
        raise NoRuleError
    gone = sorted({d % x.dim() for d in wanted if x.shape[d] == 1})
    if x.axis in gone:
        raise NoRuleError
    local = x.local.squeeze(tuple(gone)) if gone else x.local
    return ShardedTensor(local, x.rows, x.axis - sum(d < x.axis for d in gone))


@rule("expand expand_as repeat tile broadcast_to")
@unpacked
def expand(func: TorchFunction, x: Tensor, *rest: object) -> ShardedTensor:
    """``expand`` and ``repeat`` of other dimensions than the sharded one."""
    name = name_of(func)
    like = rest[0] if name == "expand_as" else None
    if is_sharded(like):
        local = aligned(x, like.rows, like.axis - like.local.dim())
        return ShardedTensor(local.expand(like.local.shape), like.rows, like.axis)
    if not is_sharded(x):
        raise NoRuleError
    sizes = list(like.shape) if isinstance(like, Tensor) else _sizes(rest)
    if name == "tile":
        sizes, name = [1] * (x.local.dim() - len(sizes)) + sizes, "repeat"
    axis = x.axis + len(sizes) - x.local.dim()
    kept = (1,) if name == "repeat" else (-1, x.rows.n)
    if axis < 0 or sizes[axis] not in kept:
        raise NoRuleError
    if name == "repeat":
        return ShardedTensor(x.local.repeat(sizes), x.rows, axis)
    sizes[axis] = x.rows.mine
    return ShardedTensor(x.local.expand(sizes), x.rows, axis)


@rule("stack")
@unpacked
def stack(func: TorchFunction, tensors: Sequence[Tensor], dim: int = 0) -> ShardedTensor:
    """``stack``: each rank stacks its rows."""
    lead = next(x for x in tensors if is_sharded(x))
    if any(x.shape != lead.shape for x in tensors):
        raise NoRuleError
    at = dim % (lead.dim() + 1)
    local = torch.stack([aligned(x, lead.rows, lead.axis) for x in tensors], at)
    return ShardedTensor(local, lead.rows, lead.axis + (at <= lead.axis))


@rule("cat concat concatenate")
@unpacked
def cat(func: TorchFunction, tensors: Sequence[Tensor], dim: int = 0) -> ShardedTensor:
    """Rows one after the other stay where they are; along other dimensions each rank does its own.

    Replicated rows are laid out like nodes or edges if they are as many.
    """
    lead = next(x for x in tensors if is_sharded(x))
    # torch leaves out empty vectors, whatever the others' dimensions.
    tensors = [x for x in tensors if not (x.dim() == 1 and x.shape[0] == 0) or lead.dim() == 1]
    if any(x.dim() != lead.dim() for x in tensors):
        raise NoRuleError
    axis = lead.axis
    if dim % lead.dim() != axis:
        if any(x.shape[axis] != lead.shape[axis] for x in tensors):
            raise NoRuleError
        local = torch.cat([aligned(x, lead.rows, axis) for x in tensors], dim)
        return ShardedTensor(local, lead.rows, axis)
    if any(is_sharded(x) and x.axis != axis for x in tensors):
        raise NoRuleError
    parts = [x if is_sharded(x) else placed(x, usual(x.shape[axis]), axis) for x in tensors]
    rows = joined([x.rows for x in parts])
    return ShardedTensor(torch.cat([x.local for x in parts], axis), rows, axis)


# Where the dimension stands among the arguments, and which it is by default.
_ALONG = {
    "softmax": (1, None), "log_softmax": (1, None), "softmin": (1, None), "cumsum": (1, None),
    "cumprod": (1, None), "logcumsumexp": (1, None), "cummax": (1, None), "cummin": (1, None),
    "sort": (1, -1), "argsort": (1, -1), "topk": (2, -1), "kthvalue": (2, -1), "mode": (1, -1),
    "median": (1, None), "normalize": (2, 1), "glu": (1, -1), "unbind": (1, 0), "chunk": (2, 0),
    "split": (2, 0), "tensor_split": (2, 0), "split_with_sizes": (2, 0), "slice": (1, 0),
    "select": (1, None),
    "narrow": (1, None), "flip": (1, None), "cosine_similarity": (2, 1), "gather": (1, None),
    "roll": (2, None), "diff": (2, -1), "unfold": (1, None), "take_along_dim": (2, None),
}  # fmt: skip
_PIECES = ("chunk", "split", "split_with_sizes", "tensor_split")


@rule(" ".join(_ALONG))
def along(func: TorchFunction, args: Arguments, kwargs: Options) -> object:
    """Operations along one dimension are each rank's own, unless it is the sharded one."""
    name = name_of(func)
    lead = next(x for x in args if is_sharded(x))
    axis, num_dims = lead.axis, lead.local.dim()
    position, default = _ALONG[name]
    dim = args[position] if len(args) > position else kwargs.get("dim", default)
    dims = kwargs.get("dims", dim)
    dims = [dims] if isinstance(dims, int) else dims
    if not isinstance(dims, (list, tuple)) or not all(isinstance(d, int) for d in dims):
        raise NoRuleError
    if any(not -num_dims <= d < num_dims for d in dims):
        raise NoRuleError
    if axis in [d % num_dims for d in dims]:
        if name in ("softmax", "log_softmax") and kwargs.get("dtype") is None and len(args) < 3:
            return _softmax(lead, axis, name == "log_softmax")
        if name == "cumsum":
            return _cumsum(func, args, kwargs)
        if name in ("gather", "take_along_dim") and num_dims == 1:
            return (_gathered if name == "gather" else _taken)(func, args, kwargs)
        if name in _PIECES and args[0] is lead and not any(map(is_sharded, args[1:])):
            return _pieces(func, lead, args, kwargs)
        raise NoRuleError
    for x in (*args, *kwargs.values()):
        if isinstance(x, Tensor) and (x.dim() != num_dims or x.shape[axis] != lead.rows.n):
            raise NoRuleError
    out = func(
        *(aligned(x, lead.rows, axis) for x in args),
        **{key: aligned(x, lead.rows, axis) for key, x in kwargs.items()},
    )
    first = out[0] if isinstance(out, (list, tuple)) else out
    return wrapped(out, lead.rows, axis - (first.dim() < num_dims and dims[0] % num_dims < axis))


@unpacked
def _gathered(func: TorchFunction, x: Tensor, dim: int, index: Tensor) -> Tensor:
    return _of_a_vector(x, index)


@unpacked
def _taken(func: TorchFunction, x: Tensor, indices: Tensor, dim: int) -> Tensor:
    return _of_a_vector(x, indices)


def _of_a_vector(x: Tensor, index: Tensor) -> Tensor:
    """Entries of a vector at the positions of another, which are not negative."""
    if x.dim() != 1 or index.dim() != 1 or index.dtype != torch.int64:
        raise NoRuleError
    if index.numel() and _has_negative(index):
        raise NoRuleError  # upstream's own message, or its way to count
    return x[index]


def _has_negative(index: Tensor) -> bool:
    def find() -> bool:
        return bool((index < 0).any())

    return index.cached(("has negative",), find) if is_sharded(index) else find()


def _pieces(
    func: TorchFunction, x: ShardedTensor, args: Arguments, kwargs: Options
) -> tuple[Tensor, ...]:
    """``split``, ``chunk`` and their like: slices of consecutive rows."""
    whole = torch.empty(x.shape, device="meta")
    sizes = [piece.shape[x.axis] for piece in func(whole, *args[1:], **kwargs)]
    before = (slice(None),) * x.axis
    stops = itertools.accumulate(sizes)
    return tuple(
        x[(*before, slice(stop - size, stop))] for size, stop in zip(sizes, stops, strict=True)
    )


def _softmax(x: ShardedTensor, dim: int, log: bool) -> Tensor:
    shifted = x - x.detach().amax(dim, keepdim=True)
    exponentials = shifted.exp()
    total = exponentials.sum(dim, keepdim=True)
    return shifted - total.log() if log else exponentials / total


@unpacked
def _cumsum(
    func: TorchFunction, x: ShardedTensor, dim: int, dtype: torch.dtype | None = None
) -> ShardedTensor:
    """Each rank adds up consecutive rows, from the sum of those of the ranks before it."""
    rows = x.rows.in_order()
    local = x.aligned(rows)
    sums = local.cumsum(dim, dtype=dtype)
    total = local.sum(dim, keepdim=True, dtype=sums.dtype)
    ranks = torch.arange(WORLD.size, device=total.device)
    is_later = ranks.view(-1, *[1] * total.dim()) > WORLD.rank
    before = enter(sum_of_ranks(torch.where(is_later, total, 0)))[WORLD.rank]
    found = ShardedTensor(sums + before, rows, x.axis)
    return ShardedTensor(found.aligned(x.rows), x.rows, x.axis)


@rule("cumsum_")
@unpacked
def cumsum_in_place(
    func: TorchFunction, x: Tensor, dim: int, dtype: torch.dtype | None = None
) -> Tensor:
    """``cumsum_``, which keeps the dtype of what it overwrites."""
    if not is_sharded(x) or (dtype is not None and dtype != x.dtype):
        raise NoRuleError
    return x.copy_(x.cumsum(dim, dtype=x.dtype))


@rule("__iter__")
@unpacked
def iterate(func: TorchFunction, x: ShardedTensor) -> Iterator[Tensor]:
    """The parts along the first dimension."""
    if x.axis == 0:
        raise NoRuleError
    return (ShardedTensor(part, x.rows, x.axis - 1) for part in x.local.unbind(0))


@rule("layer_norm rms_norm group_norm")
@unpacked
def normalise_features(
    func: TorchFunction, x: Tensor, *rest: object, **options: object
) -> ShardedTensor:
    """Normalisation over the last dimensions."""
    shape = rest[0] if rest else options.get("normalized_shape")
    if name_of(func) == "group_norm":
        normalised = x.dim() - 1
    else:
        normalised = len(shape) if isinstance(shape, (list, tuple)) else x.dim()
    if not is_sharded(x) or x.axis >= x.dim() - normalised:
        raise NoRuleError
    local = [_entered(v) for v in rest]
    named = {key: _entered(v) for key, v in options.items()}
    return ShardedTensor(func(x.local, *local, **named), x.rows, x.axis)


def _entered(x: object) -> object:
    if is_sharded(x):
        raise NoRuleError
    return enter(x)


@rule("pad")
@unpacked
def pad(
    func: TorchFunction, x: ShardedTensor, sizes: Sequence[int], *rest: object, **options: object
) -> ShardedTensor:
    """``pad``: add columns."""
    if len(sizes) // 2 > x.local.dim() - 1 - x.axis:
        raise NoRuleError
    return ShardedTensor(func(x.local, sizes, *rest, **options), x.rows, x.axis)
