"""Random numbers that do not depend on the number of ranks.

torch's default generator must stay the same on all ranks, as programs draw replicated tensors from
it, parameters above all. So a sharded tensor takes one number from it, as a seed, and each element
its own by a hash of the seed and its global position (`fastgraph.graphs.splitmix64`). Under
``random="exact"`` each rank draws what one process would draw, and keeps its rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.own_device import HOST
from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.tensor.memo import on
from fastgraph.dist.tensor.sharded import ShardedTensor, is_sharded, leaves
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
from fastgraph.graphs.splitmix64 import GOLDEN, mixed, shifted

Positions = dict[int, Tensor]
"""Some elements of a tensor: where they are along some dimensions; all along the others."""


def _at(x: ShardedTensor) -> Positions:
    return {x.axis: x.rows.position}


def _uniform(shape: Sequence[int], at: Positions, device: torch.device, stream: int = 0) -> Tensor:
    """Uniform numbers in [0, 1) for some elements of a tensor of a shape, float64.

    Each depends on a common seed and where the element is in the whole tensor, not on who holds it.
    The seed is drawn on the host, which a device need not be waited for.
    """
    seed = int(torch.randint(2**62, (), device=HOST))
    element = torch.zeros((), dtype=torch.int64, device=device)
    for dim, size in enumerate(shape):
        along = on(at[dim], device) if dim in at else torch.arange(size, device=device)
        element = element.unsqueeze(-1) * size + along
    of_stream = _wrapped((stream + 1) * GOLDEN)
    bits = mixed(mixed(element * GOLDEN + seed) + of_stream)
    return shifted(bits, 11).double() * 2.0**-53


def _wrapped(number: int) -> int:
    """As int64 has it, modulo 2^64."""
    return (number + 2**63) % 2**64 - 2**63


def uniform(x: ShardedTensor, stream: int = 0) -> Tensor:
    """Local uniform numbers in [0, 1) for the elements of a tensor, float64."""
    return _uniform(x.shape, _at(x), x.local.device, stream)


def _exact(
    func: Callable[..., Tensor],
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    at: Positions,
    *args: object,
    order: Sequence[int] | None = None,
    **kwargs: object,
) -> Tensor:
    """Some elements of what one process would draw, whose dimensions have this order in memory."""
    in_memory = tuple(order or range(len(shape)))
    empty = torch.empty_permuted(tuple(shape), in_memory, dtype=dtype, device=device)
    drawn: Tensor = func(empty, *args, **kwargs)
    for axis, positions in at.items():
        drawn = drawn.index_select(axis, on(positions, device))
    return drawn


def _memory_order(x: ShardedTensor) -> Sequence[int] | None:
    """The dimensions of a tensor on one process from the outermost in memory: torch draws in it.

    Strides of a single row can be any, so the rank with most rows tells; where no rank has two, the
    order of one process is not known. ``None`` where numbers do not depend on it.
    """
    if WORLD.random != "exact" or x.dim() < 2:
        return None
    strides = torch.empty_like(x.local).stride()
    order = sorted(range(x.dim()), key=lambda dim: -strides[dim])
    counts = x.rows.counts
    found: list[int] = transport.gather_objects(order)[counts.index(max(counts))]
    return found


def dropout_factor(
    shape: Sequence[int],
    at: Positions,
    p: float,
    like: Tensor,
    order: Sequence[int] | None = None,
) -> Tensor:
    """The dropout factors of some elements of a tensor: 0, or ``1 / (1 - p)``.

    Args:
        shape: of the whole tensor.
        at: which elements.
        p: the probability of 0.
        like: of the dtype and on the device that factors are to have.
        order: the dimensions from the outermost in memory; default: as they are.
    """
    if WORLD.random == "exact":
        ones = lambda empty: F.dropout(torch.ones_like(empty), p)  # noqa: E731
        return _exact(ones, shape, like.dtype, like.device, at, order=order)
    if p == 0 or p == 1:
        sizes = [len(at[dim]) if dim in at else size for dim, size in enumerate(shape)]
        return like.new_full(sizes, 1.0 - p)
    return (_uniform(shape, at, like.device) >= p).to(like.dtype).div_(1 - p)


@rule("dropout dropout_")
@unpacked
def dropout(
    func: TorchFunction, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Dropout: elements are set to 0 or scaled."""
    if not is_sharded(x) or not 0 <= p <= 1 or not x.is_floating_point():
        raise NoRuleError
    if not training:
        return x
    factor = dropout_factor(x.shape, _at(x), p, x.local, _memory_order(x))
    if inplace or is_in_place(name_of(func)):
        x.local.mul_(factor)
        return x
    return ShardedTensor(x.local * factor, x.rows, x.axis)


def _drawn(func: TorchFunction, x: ShardedTensor, args: Arguments, kwargs: Options) -> Tensor:
    if any(is_sharded(value) for value in leaves(args, kwargs)):
        raise NoRuleError
    if kwargs.get("generator") is not None:
        raise NoRuleError
    if WORLD.random == "exact":
        order = _memory_order(x)
        return _exact(func, x.shape, x.dtype, x.local.device, _at(x), *args, order=order, **kwargs)
    name = name_of(func)
    if name in ("rand_like", "randn_like"):
        if args or kwargs.keys() - {"dtype", "device", "requires_grad"}:
            raise NoRuleError
        numbers = uniform(x) if name == "rand_like" else _normal(x)
        dtype = kwargs.get("dtype")
        local = numbers.to(dtype if isinstance(dtype, torch.dtype) else x.dtype)
        return local.requires_grad_(bool(kwargs.get("requires_grad", False)))
    own = _uniform_between if name == "uniform_" else _normal_around
    return own(func, (x, *args), kwargs).to(x.dtype)


@unpacked
def _uniform_between(
    func: TorchFunction, x: ShardedTensor, low: float = 0.0, high: float = 1.0
) -> Tensor:
    return low + (high - low) * uniform(x)


@unpacked
def _normal_around(
    func: TorchFunction, x: ShardedTensor, mean: float = 0.0, std: float = 1.0
) -> Tensor:
    return mean + std * _normal(x)


def _normal(x: ShardedTensor) -> Tensor:
    """Box and Muller's transform of two uniform numbers, of which the first is not 0."""
    radius = torch.sqrt(-2 * torch.log1p(-uniform(x)))
    return radius * torch.cos(2 * math.pi * uniform(x, 1))


@rule("rand_like randn_like")
@unpacked
def like(func: TorchFunction, x: ShardedTensor, *rest: object, **options: object) -> ShardedTensor:
    """A new tensor of random numbers."""
    return ShardedTensor(_drawn(func, x, rest, options), x.rows, x.axis)


@rule("uniform_ normal_")
@unpacked
def fill(func: TorchFunction, x: Tensor, *rest: object, **options: object) -> Tensor:
    """Fill a tensor with random numbers in place."""
    if not is_sharded(x):
        raise NoRuleError
    x.local.copy_(_drawn(func, x, rest, options))
    return x


@rule("bernoulli")
@unpacked
def bernoulli(func: TorchFunction, x: Tensor) -> Tensor:
    """``bernoulli``: 1 with the probability that each element gives, else 0."""
    if WORLD.random == "exact" or not is_sharded(x):
        raise NoRuleError
    return ShardedTensor((uniform(x) < x.local).to(x.dtype), x.rows, x.axis)
