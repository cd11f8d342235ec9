"""The routes of PyG's functions that reduce groups of rows: ``scatter``, ``segment``, ``softmax``.

Aggregations that are called by themselves, pooling and readouts compute with them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric import utils

from fastgraph.graphs.edges import Grouped, too_large
from fastgraph.graphs.groups import groups_by_index, groups_by_ptr
from fastgraph.layers.aggregation import SUMS
from fastgraph.layers.groups import reduce_groups, softmax_of_groups
from fastgraph.ops.library import DEFINING
from fastgraph.plugins.backend import device_type
from fastgraph.plugins.patching import Patches
from fastgraph.plugins.refusal import Refusal
from fastgraph.pyg.functions import Planned, replace_functions, routed
from fastgraph.registry.registry import REGISTRY
from fastgraph.routing.conditions import execution_mode, plain_tensor, too_few_edges
from fastgraph.routing.sizes import FEWEST_CHANNELS_OF_SUMS, TOO_SMALL, is_too_little_of_groups

_REDUCTIONS = {
    "sum": "sum",
    "add": "sum",
    "mean": "mean",
    "max": "max",
    "amax": "max",
    "min": "min",
    "amin": "min",
}

_KINDS = {
    "sum": ("sum", "spmm"),
    "mean": ("sum", "spmm"),
    "max": ("extremum", "segment_reduce"),
    "min": ("extremum", "segment_reduce"),
    "softmax": ("softmax", "edge_softmax"),
}
"""By operation, the kind by which :mod:`fastgraph.routing.sizes` knows it, and its operator."""

_DTYPES = (torch.float32, torch.float64)

_BY_PTR = Refusal("a softmax of groups that ptr delimits")


def _plan_scatter(
    src: Any, index: Any, dim: Any = 0, dim_size: Any = None, reduce: Any = "sum"
) -> Planned:
    operation = _REDUCTIONS.get(reduce) if isinstance(reduce, str) else None
    if operation is None or not _has_operator(operation, src, dim, index):
        return None
    if index.shape[0] != src.shape[0]:
        return None  # an error, or one group of all rows
    return _refusal(operation, src, index) or _reduction(
        operation, src, _groups(index, dim_size), index
    )


def _plan_segment(src: Any, ptr: Any, reduce: Any = "sum") -> Planned:
    # Extrema have other ties here, and their infinities become 0.
    if reduce not in SUMS or not _has_operator(reduce, src, 0, ptr) or ptr.numel() == 0:
        return None
    return _refusal(reduce, src, ptr) or _reduction(reduce, src, groups_by_ptr(ptr, len(src)), ptr)


def _plan_softmax(
    src: Any, index: Any = None, ptr: Any = None, num_nodes: Any = None, dim: Any = 0
) -> Planned:
    if ptr is not None:
        # Its maxima have their infinities replaced by 0.
        return _BY_PTR if _has_operator("softmax", src, dim, ptr) else None
    if not _has_operator("softmax", src, dim, index) or index.shape[0] != src.shape[0]:
        return None
    refusal = _refusal("softmax", src, index)
    if refusal is not None:
        return refusal
    groups = _groups(index, num_nodes)
    if not isinstance(groups, Grouped):
        return groups
    return lambda: softmax_of_groups(src, groups, index)


def _reduction(
    operation: str, src: Tensor, groups: Grouped | Refusal | None, caller_index: Tensor
) -> Planned:
    if not isinstance(groups, Grouped):
        return groups
    return lambda: reduce_groups(src, groups, operation, caller_index)


def _has_operator(operation: str, src: Any, dim: Any, index: Any) -> bool:
    """True if an operator may compute a call, on arguments of these types, dtypes and sizes.

    Args:
        operation: ``"sum"``, ``"mean"``, ``"max"``, ``"min"`` or ``"softmax"``.
        src: the caller's rows.
        dim: the dimension in which they follow each other.
        index: the group of each row, or where groups begin and end.
    """
    if not isinstance(src, Tensor) or not isinstance(index, Tensor):
        return False
    if src.is_nested or index.is_nested:  # which have no shape
        return False
    shape = src.shape
    # Of so few channels a plain loop is as fast.
    if operation in SUMS and (len(shape) < 2 or shape[1:].numel() < FEWEST_CHANNELS_OF_SUMS):
        return False
    return (
        src.dtype in _DTYPES
        and index.dtype is torch.int64
        and index.dim() == 1
        and len(shape) > 0
        and type(dim) is int
        and dim in (0, -len(shape))
        and src.is_cpu
        and index.is_cpu
        and src.layout is torch.strided
        and index.layout is torch.strided
        and src.numel() > 0
        and type(src) not in DEFINING  # for which what PyG calls has rules
        and type(index) not in DEFINING
    )


def _refusal(operation: str, src: Tensor, index: Tensor) -> Refusal | None:
    """Why a call that has an operator is left to upstream, if it is."""
    kind, operator = _KINDS[operation]
    if is_too_little_of_groups(kind, src):
        return TOO_SMALL
    return (
        execution_mode()
        or plain_tensor("src", src)
        or plain_tensor("index", index)
        or too_few_edges(len(src))
        or too_large(len(src))
        or REGISTRY.refusal(operator, device_type(src), src.dtype)
    )


def _groups(index: Tensor, num_groups: Any) -> Grouped | Refusal | None:
    """The groups of rows; ``None`` for a number of them that is none."""
    if num_groups is None:
        num_groups = int(index.max()) + 1
    if type(num_groups) is not int or num_groups < 0:
        return None
    return too_large(num_groups) or groups_by_index(index, num_groups)


_FUNCTIONS = tuple(
    (upstream, routed(upstream, plan))
    for upstream, plan in (
        (utils.scatter, _plan_scatter),
        (utils.segment, _plan_segment),
        (utils.softmax, _plan_softmax),
    )
)


def install(patches: Patches) -> None:
    """Replace the functions where programs have them."""
    replace_functions(patches, _FUNCTIONS)
