"""Rules for normalisation layers: statistics are over the rows of all ranks."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.tensor.collectives import sum_of_ranks
from fastgraph.dist.tensor.sharded import ShardedTensor, enter, is_sharded
from fastgraph.dist.tensor.table import NoRuleError, TorchFunction, rule, unpacked


@rule("batch_norm")
@unpacked
def batch_norm(
    func: TorchFunction,
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``torch.nn.functional.batch_norm``; all ranks update the running statistics alike."""
    if not is_sharded(x) or x.axis != 0 or x.dim() < 2:
        raise NoRuleError
    if not training:
        if running_mean is None:
            raise NoRuleError  # upstream's own message
        local = F.batch_norm(
            x.local, running_mean, running_var, enter(weight), enter(bias), False, momentum, eps
        )
        return ShardedTensor(local, x.rows, 0)
    count = x.numel() // max(x.shape[1], 1)
    if count <= 1:
        raise NoRuleError  # upstream's own message
    dims = [dim for dim in range(x.dim()) if dim != 1]
    shape = [-1 if dim == 1 else 1 for dim in range(x.dim())]
    own_mean, centred, mean, variance = _moments(x, dims, shape)
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            unbiased = variance * (count / (count - 1))
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    # Entered as one tensor, as both gradients are summed over ranks.
    mean, scale = enter(torch.stack([mean, (variance + eps).rsqrt()])).unbind()
    scale = scale if weight is None else scale * enter(weight)
    shift = (own_mean - mean) * scale
    shift = shift if bias is None else shift + enter(bias)
    return ShardedTensor(centred * scale.view(shape) + shift.view(shape), x.rows, 0)


def _moments(
    x: ShardedTensor, dims: list[int], shape: list[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The mean of this rank's rows, what they are without it, and mean and variance of all rows.

    Ranks send each other their own mean and variance at once, which each of them joins in the
    order of ranks.
    """
    local, rank = x.local, WORLD.rank
    if len(x.local):
        own_mean = local.mean(dims)
        centred = local - own_mean.view(shape)
        own_variance = centred.square().mean(dims)
    else:
        own_mean = own_variance = local.sum(dims)
        centred = local
    share = torch.full_like(own_mean, x.rows.mine / x.rows.n)
    own = torch.stack([own_mean, own_variance, share])
    others = (rank, WORLD.size - 1 - rank)
    of_ranks = sum_of_ranks(F.pad(own.unsqueeze(0), (0, 0, 0, 0, *others)))
    means, variances, shares = of_ranks.unbind(1)
    mean = (shares * means).sum(0)
    variance = (shares * (variances + (means - mean).square())).sum(0)
    return own_mean, centred, mean, variance


@rule("instance_norm")
@unpacked
def instance_norm(
    func: TorchFunction,
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``torch.nn.functional.instance_norm``, ``[instances, channels, ...]``."""
    if not is_sharded(x) or x.axis == 1 or x.dim() < 3:
        raise NoRuleError
    dims = list(range(2, x.dim()))
    count = math.prod(x.shape[dim] for dim in dims)
    if not use_input_stats or count <= 1:
        raise NoRuleError  # upstream's own message, or that of a batch norm
    mean = x.mean(dims, keepdim=True)
    centred = x - mean
    variance = centred.square().mean(dims, keepdim=True)
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            own = mean.flatten(1).mean(0), (variance * (count / (count - 1))).flatten(1).mean(0)
            for running, found in zip((running_mean, running_var), own, strict=True):
                running.lerp_(found.to(running.dtype), momentum)
    shape = [-1 if dim == 1 else 1 for dim in range(x.dim())]
    out = centred * (variance + eps).rsqrt()
    out = out if weight is None else out * weight.view(shape)
    return out if bias is None else out + bias.view(shape)


@rule("prelu")
@unpacked
def prelu(func: TorchFunction, x: Tensor, weight: Tensor) -> Tensor:
    """Leaky units with replicated slopes, one for all channels or one for each."""
    if not is_sharded(x) or is_sharded(weight) or (x.axis == 1 and weight.numel() > 1):
        raise NoRuleError
    return ShardedTensor(func(x.local, enter(weight)), x.rows, x.axis)
