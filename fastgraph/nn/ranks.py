"""The processes that train one model, as sums and rows of all of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


class _Sum(torch.autograd.Function):
    """A sum over ranks, whose gradient is one, too: what one rank adds moves the losses of all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = x.contiguous().clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(grad, ctx.group), None  # type: ignore[no-untyped-call]


class Ranks:
    """The ranks of a process group, or this process alone.

    All methods are collective: every rank calls them in the same order.

    Args:
        group: None for one process, which then sends nothing.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self  # a group is no value: copies of a model are trained by the same processes

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks, with a gradient."""
        if self.size == 1:
            return x
        out: Tensor = _Sum.apply(x, self.group)  # type: ignore[no-untyped-call]
        return out

    def sizes(self, x: Tensor) -> list[int]:
        """How many rows each rank has."""
        if self.size == 1:
            return [x.shape[0]]
        out = torch.zeros(self.size, dtype=torch.int64, device=x.device)
        out[self.rank] = x.shape[0]
        found: list[int] = self.sum(out).tolist()
        return found

    def gather(self, x: Tensor, sizes: list[int]) -> Tensor:
        """The rows of all ranks, in their order, without a gradient.

        Args:
            x: ``[sizes[rank], ...]``.
            sizes: as :meth:`sizes` gives them.
        """
        if self.size == 1:
            return x
        most = max(sizes)
        # Gloo has no gathering of blocks of several sizes.
        padded = x.new_zeros(most, *x.shape[1:])
        padded[: x.shape[0]] = x
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=self.group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
