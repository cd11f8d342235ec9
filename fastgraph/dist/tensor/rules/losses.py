"""Rules for losses: sums over the rows of each rank, divided by the global count."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastgraph.dist.tensor.collectives import sum_of_ranks
from fastgraph.dist.tensor.rules.pointwise import pointwise
from fastgraph.dist.tensor.sharded import ShardedTensor, aligned, enter, is_sharded
from fastgraph.dist.tensor.table import (
    REQUIRED,
    Arguments,
    NoRuleError,
    Options,
    bound,
    name_of,
    rule,
)

_REDUCTIONS = ("none", "mean", "sum")


@rule(
    """binary_cross_entropy binary_cross_entropy_with_logits mse_loss l1_loss smooth_l1_loss
    huber_loss kl_div poisson_nll_loss soft_margin_loss"""
)
def elementwise(func: Any, args: Arguments, kwargs: Options) -> Any:
    """Losses of one element at a time."""
    options, reduction = _options(kwargs)
    if len(args) > 2:
        raise NoRuleError
    target: Any = args[1] if len(args) > 1 else options.get("target")
    if reduction not in (*_REDUCTIONS, "batchmean") or args[0].shape != target.shape:
        raise NoRuleError
    if reduction == "batchmean" and name_of(func) != "kl_div":
        raise NoRuleError
    each = pointwise(func, args, {**options, "reduction": "none"})
    return each.sum() / each.shape[0] if reduction == "batchmean" else _reduced(each, reduction)


@rule("margin_ranking_loss hinge_embedding_loss triplet_margin_loss cosine_embedding_loss")
def by_rows(func: Any, args: Arguments, kwargs: Options) -> Any:
    """Losses that compare rows with each other, one by one."""
    options, reduction = _options(kwargs)
    tensors = [x for x in (*args, *options.values()) if isinstance(x, Tensor)]
    lead: Any = next(x for x in tensors if is_sharded(x))
    if reduction not in _REDUCTIONS or len(args) > 3 or lead.axis != 0:
        raise NoRuleError
    if any(not x.dim() or x.shape[0] != lead.rows.n for x in tensors):
        raise NoRuleError
    local = [aligned(x, lead.rows, 0) for x in args]
    named = {name: aligned(x, lead.rows, 0) for name, x in options.items()}
    each = ShardedTensor(func(*local, **named, reduction="none"), lead.rows, 0)
    return _reduced(each, reduction)


def _options(kwargs: Options) -> tuple[Options, Any]:
    """The options of a loss, and apart from them how it is reduced, in today's way alone."""
    options = dict(kwargs)
    if any(options.pop(name, None) is not None for name in ("reduce", "size_average")):
        raise NoRuleError
    return options, options.pop("reduction", "mean")


def _reduced(each: Any, reduction: str) -> Any:
    if reduction == "none":
        return each
    return each.sum() if reduction == "sum" else each.mean()


@rule("cross_entropy nll_loss")
def of_classes(func: Any, args: Arguments, kwargs: Options) -> Any:
    """Losses of classes, whose mean is over the weights of the targets that count."""
    names = ("weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    defaults = dict(zip(names, (None, None, -100, None, "mean", 0.0), strict=True))
    if name_of(func) == "nll_loss":
        del defaults["label_smoothing"]
    x, y, weight, size_average, ignored, reduce, reduction, *smoothing = bound(
        args, kwargs, input=REQUIRED, target=REQUIRED, **defaults
    )
    lead = x if is_sharded(x) else y
    if size_average is not None or reduce is not None or reduction not in _REDUCTIONS:
        raise NoRuleError
    if lead.axis != 0 or is_sharded(weight) or x.shape[0] != y.shape[0] or x.dim() < 2:
        raise NoRuleError
    scores, target = aligned(x, lead.rows, 0), aligned(y, lead.rows, 0)
    options: Options = {"weight": enter(weight), "ignore_index": ignored, "reduction": "none"}
    if smoothing:
        options["label_smoothing"] = smoothing[0]
    each = func(scores, target, **options)
    if reduction == "none":
        return ShardedTensor(each, lead.rows, 0)
    count = each.numel() if target.is_floating_point() else _weight_of(target, weight, ignored)
    loss, total = sum_of_ranks(torch.stack([each.sum(), each.new_tensor(count)])).unbind()
    return loss if reduction == "sum" else loss / total


def _weight_of(target: Tensor, weight: Any, ignored: int) -> float:
    """The number of targets that count, or the sum of the weights of their classes."""
    counts = target != ignored
    if weight is None:
        return int(counts.sum())
    return float(weight.detach()[target[counts]].sum())
