"""Steps of attention layers around one operator: common dtypes, joined heads, bias and residual."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgraph.layers.linear import linear
from fastgraph.layers.modules import KnownLinear, affine_map_of
from fastgraph.layers.sums import add_to


class Inputs(NamedTuple):
    """Features of sources and of destinations, ``[nodes, channels]`` each."""

    src: Tensor
    dst: Tensor


def same_dtype(*tensors: Tensor | None) -> list[Any]:
    """The tensors in one dtype: the one that upstream's arithmetic, or autocast, promotes to."""
    dtypes = [tensor.dtype for tensor in tensors if tensor is not None]
    dtype = functools.reduce(torch.promote_types, dtypes)
    return [None if tensor is None else tensor.to(dtype) for tensor in tensors]


class Terms(NamedTuple):
    """The terms that a layer adds to the joined heads, in the operator's own output if possible."""

    addend: Tensor | None
    others: list[Tensor]


def terms_of(concat: bool, x: Tensor, *terms: Tensor | None) -> Terms:
    """The bias and residual of a layer, split into the operator's addend and the others.

    The first one is the addend if heads are concatenated and dtypes agree.

    Args:
        concat: whether the layer concatenates heads, or averages them.
        x: ``[sources, heads, channels]``, the features that the operator aggregates.
        terms: ``[nodes, heads * channels]``, or ``[heads * channels]`` for a bias.
    """
    present = [term for term in terms if term is not None]
    if not present or not concat or present[0].dtype != x.dtype:
        return Terms(None, present)
    return Terms(present[0].view(-1, *x.shape[1:]), present[1:])


def combine_heads(concat: bool, out: Tensor, terms: Terms) -> Tensor:
    """Concatenate or average heads, then add the terms that the operator did not.

    ``out`` ``[nodes, heads, channels]`` is an operator's output that nothing else refers to.
    """
    out = join_heads(concat, out, terms.addend is not None or len(terms.others) > 0)
    return functools.reduce(add_to, terms.others, out)


def join_heads(concat: bool, out: Tensor, changed: bool) -> Tensor:
    """Concatenate or average heads ``[nodes, heads, channels]``.

    Args:
        concat: whether to concatenate.
        out: the operator's output, that nothing else refers to.
        changed: whether terms will be added to the result in place. Upstream adds them out of
            place, so that its result is no view to autograd. Then ours must not be one either.
    """
    if not concat:
        return out.mean(dim=1)
    size = (out.shape[0], out.shape[1] * out.shape[2])
    return torch.ops.aten._unsafe_view(out, size) if changed else out.view(size)


def folded(weight: Tensor, att: Tensor) -> Tensor:
    """``W^T a`` of each head, with which ``<a, W x>`` is ``<W^T a, x>``.

    Args:
        weight: ``[heads * channels, in_channels]``.
        att: ``[1, heads, channels]``.

    Returns:
        ``[heads, in_channels]``.
    """
    _, heads, channels = att.shape
    return (weight.view(heads, channels, -1) * att.squeeze(0).unsqueeze(-1)).sum(dim=1)


def folded_scores(known: KnownLinear, module: Any, x: Tensor, att: Tensor) -> Tensor | None:
    """Products of ``module(x)`` with a vector for each head, ``[nodes, heads]``, without itself.

    Destinations of attention between two sets of nodes need nothing else of their projection, which
    then has ``heads`` rows instead of ``heads * channels``. Half types would round them once more.
    ``None`` for those, for features that do not fit, and where somebody sees what the module does.

    Args:
        known: what is known of modules of its class.
        module: the projection.
        x: ``[nodes, in_channels]``.
        att: ``[1, heads, channels]``.
    """
    if not known.knows(module) or x.dtype not in (torch.float32, torch.float64):
        return None
    weight, bias = affine_map_of(module)
    if bias is not None or not x.dtype == weight.dtype == att.dtype:
        return None
    if x.shape != (len(x), weight.shape[1]) or torch.is_autocast_enabled(x.device.type):
        return None
    return linear(x, folded(weight, att), None)
