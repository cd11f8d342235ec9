"""Rules for losses: sums over the rows of each rank, divided by the global count."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fastgraph.dist.tensor.collectives import sum_of_ranks
from fastgraph.dist.tensor.rules.pointwise import pointwise
from fastgraph.dist.tensor.sharded import ShardedTensor, aligned, enter, is_sharded
from fastgraph.dist.tensor.table import (
    Arguments,
    NoRuleError,
    Options,
    TorchFunction,
    name_of,
    rule,
    unpacked,
)

_REDUCTIONS = ("none", "mean", "sum")


@rule(
    """binary_cross_entropy binary_cross_entropy_with_logits mse_loss l1_loss smooth_l1_loss
    huber_loss kl_div poisson_nll_loss soft_margin_loss"""
)
@unpacked
def elementwise(func: TorchFunction, x: Tensor, target: Tensor, **options: object) -> Tensor:
    """Losses of one element at a time."""
    others, reduction = _options(options)
    if reduction not in (*_REDUCTIONS, "batchmean") or x.shape != target.shape:
        raise NoRuleError
    if reduction == "batchmean" and name_of(func) != "kl_div":
        raise NoRuleError
    each = pointwise(func, (x, target), {**others, "reduction": "none"})
    assert isinstance(each, Tensor)
    return each.sum() / each.shape[0] if reduction == "batchmean" else _reduced(each, reduction)


@rule("margin_ranking_loss hinge_embedding_loss triplet_margin_loss cosine_embedding_loss")
def by_rows(func: TorchFunction, args: Arguments, kwargs: Options) -> Tensor:
    """Losses that compare rows with each other, one by one."""
    options, reduction = _options(kwargs)
    tensors = [x for x in (*args, *options.values()) if isinstance(x, Tensor)]
    lead = next(x for x in tensors if is_sharded(x))
    if reduction not in _REDUCTIONS or len(args) > 3 or lead.axis != 0:
        raise NoRuleError
    if any(not x.dim() or x.shape[0] != lead.rows.n for x in tensors):
        raise NoRuleError
    local = [aligned(x, lead.rows, 0) for x in args]
    named = {name: aligned(x, lead.rows, 0) for name, x in options.items()}
    each = ShardedTensor(func(*local, **named, reduction="none"), lead.rows, 0)
    return _reduced(each, reduction)


def _options(given: Options) -> tuple[Options, object]:
    """The options of a loss, and apart from them how it is reduced, in today's way alone."""
    options = dict(given)
    if any(options.pop(name, None) is not None for name in ("reduce", "size_average")):
        raise NoRuleError
    return options, options.pop("reduction", "mean")


def _reduced(each: Tensor, reduction: object) -> Tensor:
    if reduction == "none":
        return each
    return each.sum() if reduction == "sum" else each.mean()


@rule("cross_entropy")
@unpacked
def cross_entropy(
    func: TorchFunction,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Of scores and classes, or their probabilities."""
    if size_average is not None or reduce is not None:
        raise NoRuleError
    smoothed = functools.partial(func, label_smoothing=label_smoothing)
    return _of_classes(smoothed, x, target, weight, ignore_index, reduction)


@rule("nll_loss")
@unpacked
def nll_loss(
    func: TorchFunction,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Of logarithms of probabilities, and classes."""
    if size_average is not None or reduce is not None:
        raise NoRuleError
    return _of_classes(func, x, target, weight, ignore_index, reduction)


def _of_classes(
    loss_of: TorchFunction,
    x: Tensor,
    y: Tensor,
    weight: Tensor | None,
    ignored: int,
    reduction: str,
) -> Tensor:
    """Losses of classes, whose mean is over the weights of the targets that count."""
    lead = x if is_sharded(x) else y
    if reduction not in _REDUCTIONS or not is_sharded(lead) or is_sharded(weight):
        raise NoRuleError
    if lead.axis != 0 or x.shape[0] != y.shape[0] or x.dim() < 2:
        raise NoRuleError
    scores, target = aligned(x, lead.rows, 0), aligned(y, lead.rows, 0)
    options: Options = {"weight": enter(weight), "ignore_index": ignored, "reduction": "none"}
    each = loss_of(scores, target, **options)
    if reduction == "none":
        return ShardedTensor(each, lead.rows, 0)
    if target.is_floating_point():
        count = each.new_full((), each.numel())
    else:
        count = _weight_of(target, weight, ignored).to(each.dtype)
    loss, total = sum_of_ranks(torch.stack([each.sum(), count])).unbind()
    return loss if reduction == "sum" else loss / total


def _weight_of(target: Tensor, weight: Tensor | None, ignored: int) -> Tensor:
    """The number of targets that count, or the sum of the weights of their classes.

    A tensor without dimensions, as the host would have to wait for a number.
    """
    counts = target != ignored
    if weight is None:
        return counts.sum()
    return torch.where(counts, weight.detach()[target.where(counts, 0)], 0).sum()
