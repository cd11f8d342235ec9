"""Sums and extrema of few channels, for which edges need not be grouped.

To group edges takes several times as long as to add up so little along them, and to look for the
weight of each edge in another order is what takes longest then. So ``spmm`` leaves such sums to the
kernel ``spmm_coo``, which goes through the edges in the order in which they were given. Along the
edges both come to the same bits, and ``spmm_coo`` is for those that are used for the first few
times, of which the caller knows (:class:`UngroupedEdges`). Sums of one or two channels with weights
or over reversed edges are always left to it, as bits must not depend on what is cached, and so are
those of a few channels over few reversed edges; of more edges, the gradient of features groups them
when it is asked for.

Maxima and minima of one or two channels are left to ``segment_reduce_coo`` in the same way, along
edges that are used for the first few times. Which edge an extremum came from is not recorded there,
so that its gradient groups the edges, and compares.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from fastgraph.graphs.edges import is_remembered
from fastgraph.graphs.memo import tensor_key
from fastgraph.graphs.sights import Sights
from fastgraph.machine import native
from fastgraph.plugins.backend import Kernel
from fastgraph.registry.registry import REGISTRY

NARROW = 2
"""The most channels of sums that never need grouped edges."""

FEW = 8
"""The most channels of those that can do without. It is what the kernel takes."""

_MOST_BYTES = 1 << 20
"""Of the rows of both ends. More are not found in the processor's own cache, edge by edge."""

_MOST_REVERSED_EDGES = 1 << 14
"""Of graphs that are ungrouped in sums over reversed edges always: one thread is as fast there as
it is along grouped edges."""

_MOST_EDGES = 1 << 17
"""For more than :data:`NARROW` channels, divided by the threads: these share the work of grouping
edges and of sums along grouped ones, but not that of sums along others."""

Result = TypeVar("Result")


class UngroupedEdges(NamedTuple):
    """An ``edge_index`` whose indices are in range, and which a reduction need not group."""

    index: Tensor  # type: ignore[assignment]  # shadows tuple.index

    def while_computing(self, compute: Callable[..., Result], *arguments: object) -> Result:
        """The result of ``compute(*arguments)``, in which no reduction groups these edges."""
        before, _THREAD.index = _THREAD.index, self.index
        try:
            return compute(*arguments)
        finally:
            _THREAD.index = before


class _Thread(threading.local):
    index: Tensor | None = None


_THREAD = _Thread()
_SIGHTS = Sights(uses=16)
"""By so many sums it takes as long to group edges as not to."""


def coo_kernel(
    x: Tensor,
    index: Tensor,
    ptr: Tensor | None,
    weight: Tensor | None,
    num_out: int,
    most: int,
    operator: str = "spmm",
) -> Kernel | None:
    """The kernel that reduces these features without a graph, if there is one for so few.

    Args:
        x: as for :func:`fastgraph.ops.spmm`.
        index: likewise.
        ptr: likewise.
        weight: likewise.
        num_out: number of aggregating nodes.
        most: the most channels.
        operator: ``"spmm"`` or ``"segment_reduce"``.
    """
    num_in, channels = x.shape[0], x.shape[1:].numel()
    if (
        not 1 <= channels <= most
        or not (x.is_cpu and native.is_available())
        or ptr is not None
        or (weight is not None and weight.dim() != 1)
        or (num_in + num_out) * channels * x.element_size() > _MOST_BYTES
    ):
        return None
    return REGISTRY.companion(f"{operator}_coo", operator, x.dtype)


def most_channels(index: Tensor, *, transpose: bool) -> int:
    """The channels up to which a sum can do without a graph.

    Args:
        index: as for :func:`fastgraph.ops.spmm`.
        transpose: likewise.
    """
    if transpose:
        return FEW if index.shape[-1] <= _MOST_REVERSED_EDGES else NARROW
    return FEW if is_checked(index) else NARROW


def is_checked(index: Tensor) -> bool:
    """True within :meth:`UngroupedEdges.while_computing` of this ``edge_index``."""
    return _THREAD.index is index


def are_few_edges(index: Tensor) -> bool:
    """True if one thread adds up a few channels along edges before all threads have grouped them.

    Args:
        index: an ``edge_index``.
    """
    return index.shape[1] * torch.get_num_threads() <= _MOST_EDGES


def most_channels_ever(index: Tensor, *, transpose: bool) -> int:
    """The channels up to which some sum does without a graph, whatever is cached by then.

    Args:
        index: an ``edge_index``.
        transpose: as for :func:`fastgraph.ops.spmm`.
    """
    if transpose:
        return most_channels(index, transpose=True)
    return FEW if index.shape[1] <= _MOST_EDGES else NARROW


def is_early_use(index: Tensor, num_src: int, num_dst: int) -> bool:
    """True if the graph of an ``edge_index`` is not cached, and this was asked a few times only."""
    if index.is_inference() or is_remembered(index, num_src, num_dst):
        return False
    return not _SIGHTS.is_enough((tensor_key(index), num_src, num_dst), [index])


def check_edges(index: Tensor, num_src: int, num_dst: int) -> None:
    """All indices of an ``edge_index`` on the CPU are nodes.

    Raises:
        IndexError: one of them is not.
    """
    native.library().check_edges(index[0], index[1], num_src, num_dst)
