"""Rows that belong to groups: their sums, means, extrema and products, and the way back.

All of them have gradients of any order, and equal bits for any number of threads: a group is
reduced by one thread in the order of its rows, on GPUs without atomics.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fastgraph.graphs.edges import Edges, Grouped
from fastgraph.graphs.graph import normal_mode
from fastgraph.graphs.groups import grouped
from fastgraph.ops import segment_reduce, spmm
from fastgraph.ops.library import is_defined_by
from fastgraph.plugins.backend import FLOATING

REDUCTIONS = ("sum", "smin", "smax", "smean", "sprod")
"""Names of reductions, as ``dgl.sparse`` has them."""

# As ``torch.Tensor.scatter_reduce`` calls them.
_OF_TORCH = {"sum": "sum", "smin": "amin", "smax": "amax", "smean": "mean", "sprod": "prod"}


class Groups:
    """The groups of rows, sorted when they are first reduced.

    Args:
        index: int64 or int32 ``[rows]``, the group of each row.
        num_groups: as many as there are.
    """

    def __init__(self, index: Tensor, num_groups: int) -> None:
        self.index = index
        self.num_groups = num_groups
        self._is_sharded = is_defined_by(index)

    @cached_property
    def _grouped(self) -> Grouped:
        return grouped(self.index, self.num_groups)

    @property
    def _edges(self) -> Edges:
        return self._grouped.edges

    def reduce(self, x: Tensor, reduction: str) -> Tensor:
        """One of :data:`REDUCTIONS` of each group; 0 for a group without rows.

        As in torch, the gradient of an extremum is split evenly among the rows that attain it, and
        the zero of an empty group counts as one of them where the extremum is 0.

        Args:
            x: ``[rows]`` or ``[rows, channels]`` of any dtype.
            reduction: its name.

        Returns:
            ``[num_groups]`` or ``[num_groups, channels]``.
        """
        if self._is_sharded:
            return self._by_torch(x, reduction)
        if reduction == "sprod":
            return self._product(x)
        if x.dtype not in FLOATING or x.numel() == 0:
            return self._by_torch(x, reduction)
        flat = x if x.dim() == 2 else x.unsqueeze(1)
        index, ptr = self._edges.index, self._edges.ptr
        if reduction in ("smax", "smin"):
            out = segment_reduce(
                flat, index, ptr=ptr, num_out=self.num_groups, reduce=reduction.removeprefix("s")
            )
        else:
            name = "sum" if reduction == "sum" else "mean"
            out = spmm(flat, index, ptr=ptr, num_out=self.num_groups, reduce=name)
        return out if x.dim() == 2 else out.squeeze(1)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of each group; see :meth:`reduce`."""
        return self.reduce(x, "sum")

    def gather(self, x: Tensor) -> Tensor:
        """The row of its group for each row, of ``[num_groups, *channels]``.

        Backward, torch's own ``index_select`` adds row by row, and on GPUs in any order. As there,
        it is an error if the index was edited in between.
        """
        if x.dim() > 2:
            return self.gather(x.flatten(1)).view(-1, *x.shape[1:])
        if x.requires_grad and torch.is_grad_enabled() and not self._is_sharded:
            return _gather(x, self)
        return x.index_select(0, self.index)

    def _by_torch(self, x: Tensor, reduction: str) -> Tensor:
        """Of integers and the like, for which the order of additions does not matter."""
        index = self.index.long()
        index = index if x.dim() == 1 else index.unsqueeze(1).expand_as(x)
        zeros = x.new_zeros(self.num_groups, *x.shape[1:])
        if reduction == "sum":  # which ranks have a rule for
            return zeros.scatter_add(0, index, x)
        return zeros.scatter_reduce(0, index, x, _OF_TORCH[reduction], include_self=False)

    def _product(self, x: Tensor) -> Tensor:
        """Products in pairs, of which there are half as many each time."""
        rows = self._grouped.graph.by_destination
        dtype = torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else x.dtype
        factors = x[rows.col.long()].to(dtype)
        counts, ptr = rows.ptr.diff(), rows.ptr
        while factors.shape[0] > 0 and int(counts.max()) > 1:
            pairs = (counts + 1) // 2
            group = torch.repeat_interleave(pairs)
            ends = pairs.cumsum(0)
            number = torch.arange(len(group), device=x.device) - (ends - pairs)[group]
            first = ptr[group] + 2 * number
            has_second = first + 1 < ptr[group + 1]
            one_behind = torch.cat([factors, factors.new_ones(1, *factors.shape[1:])])
            second = torch.where(has_second, first + 1, len(factors))
            factors = factors[first] * one_behind[second]
            counts, ptr = pairs, torch.cat([ends.new_zeros(1), ends])
        filled = counts.nonzero().squeeze(1)
        zeros = factors.new_zeros(self.num_groups, *x.shape[1:])
        return zeros.index_copy(0, filled, factors).to(x.dtype)


class _Gather(torch.autograd.Function):
    """A gather whose gradient is a sum over groups, as theirs is a gather."""

    @staticmethod
    def forward(x: Tensor, groups: Groups) -> Tensor:
        return x.index_select(0, groups.index)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Groups], output: Tensor) -> None:
        ctx.groups = inputs[1]
        if not ctx.groups.index.is_inference():  # edits of which nobody counts
            ctx.save_for_backward(ctx.groups.index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        _ = ctx.saved_tensors  # raises where it was edited
        return ctx.groups.sum(grads[0]), None


def _gather(x: Tensor, groups: Groups) -> Tensor:
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        out: Tensor = _Gather.apply(x, groups)  # type: ignore[no-untyped-call]
    else:  # without what torch does before it for these, which takes longer than all the rest
        out = super(torch.autograd.Function, _Gather).apply(x, groups)  # type: ignore[no-untyped-call]
    return out


def one_group(num_rows: int, device: torch.device) -> Groups:
    """All rows as one group."""
    with normal_mode():
        return Groups(torch.zeros(num_rows, dtype=torch.int32, device=device), 1)
