"""The choice to multiply by a layer's weights before aggregation or after it, by the work.

:math:`A (x W^T)` and :math:`(A x) W^T` are equal but for roundings. The first gathers
``out_channels`` values along each edge instead of ``in_channels``, and multiplies the rows of
sources instead of those of destinations. The error of the output is smaller for means on
all graphs that were measured, but by up to a quarter larger for sums on graphs with hubs. That of
the gradient of :math:`W` may be larger by half there: :math:`(A^T g)^T x` adds terms that a mean
over neighbours would have made small first. So where that is recorded, and for sums, a setting has
to ask for it. The error of the gradient of features is the same by either order. On a graph with
many edges between the same nodes it is larger than PyG's by either, as edges are sorted here: PyG's
own is as large where it is given them sorted.

On several ranks the narrower of both is also what these send each other, of each row of a halo, or
of a column and a row of a grid. There a layer that multiplies first, as ``GCNConv`` does, does so
last where that sends less: rows go there, and their gradients back, of features that have one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastgraph import settings
from fastgraph.layers.aggregation import SUMS, Aggregation
from fastgraph.layers.constant import may_be_constant
from fastgraph.ops.library import is_defined_by

_PLAIN = (Tensor, torch.nn.Parameter)
_DTYPES = (torch.float32, torch.float64)  # a shorter one would round the products as well

_LEAST_GAIN = 1 << 14
"""Gathered values: microseconds, in which the bias is added by itself."""

_PRODUCTS_OF_GATHERED = 2
"""Multiplications of a matrix product in the time in which one value is gathered."""


def projects_first(aggregation: Aggregation, weight: Tensor) -> bool:
    """True if features are to be multiplied by a matrix before they are aggregated.

    It depends on shapes, and on which gradients are recorded, alone.

    Args:
        aggregation: of features ``[sources, in_channels]``.
        weight: ``[out_channels, in_channels]``.
    """
    num_out, num_in = weight.shape
    if num_out >= num_in or aggregation.reduce not in SUMS or torch.compiler.is_compiling():
        return False
    x = aggregation.x
    is_sharded = is_defined_by(x)
    if is_sharded:  # each value of a row that ranks do not send each other is a gain
        gains = not may_be_constant(aggregation, is_private=True)
    else:
        gains = _gain(aggregation, num_in, num_out, weight.requires_grad) >= _LEAST_GAIN
    return (
        gains
        and (type(x) in _PLAIN or is_sharded)
        and _can_be_exchanged(x, weight)
        and _is_wanted(aggregation.reduce, weight)
    )


def projects_last(x: Tensor, weight: Tensor) -> bool:
    """True if features are to be multiplied by a matrix after they are aggregated.

    For a layer that upstream has multiply them before, and on several ranks. It depends on shapes,
    and on which gradients are recorded, alone.

    Args:
        x: features ``[sources, in_channels]``.
        weight: ``[out_channels, in_channels]``.
    """
    if not is_defined_by(x) or not _can_be_exchanged(x, weight):
        return False
    num_out, num_in = weight.shape
    is_recorded = torch.is_grad_enabled()
    first = num_out * (1 + (is_recorded and (x.requires_grad or weight.requires_grad)))
    return num_in * (1 + (is_recorded and x.requires_grad)) < first


def _can_be_exchanged(x: Tensor, weight: Tensor) -> bool:
    """True if a product before the aggregation and one behind it differ by roundings alone."""
    return (
        x.dim() == 2
        and x.shape[1] == weight.shape[1]
        and type(weight) in _PLAIN
        and x.dtype == weight.dtype
        and x.dtype in _DTYPES
        and x.device == weight.device
        and not torch.is_autocast_enabled(x.device.type)
        and not torch.are_deterministic_algorithms_enabled()
    )


def _is_wanted(reduce: str, weight: Tensor) -> bool:
    wanted = settings.current().project_first
    if wanted is not None:
        return wanted
    return reduce == "mean" and not (weight.requires_grad and torch.is_grad_enabled())


def _gain(aggregation: Aggregation, num_in: int, num_out: int, is_trained: bool) -> float:
    """Gathered values that are saved, forward and backward."""
    x, num_edges = aggregation.x, aggregation.edges.num_edges
    num_src = x.shape[0]
    is_recorded = torch.is_grad_enabled()
    products = 1 + is_recorded * (is_trained + x.requires_grad)
    more_products = (num_src - aggregation.num_out) * num_in * num_out * products
    passes = 1 if products == 1 else 2
    now = passes * num_edges * num_out + more_products / _PRODUCTS_OF_GATHERED
    if passes == 1 or x.requires_grad:
        return passes * num_edges * num_in - now
    if may_be_constant(aggregation, is_private=True):  # a checksum in the place of its aggregation
        return min(num_edges, num_src) * num_in - now
    return num_edges * num_in - now
