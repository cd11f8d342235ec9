"""Batch normalisation by the rows of all ranks, of any number."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastgraph.nn.ranks import Ranks


class BatchNorm(nn.BatchNorm1d):
    """``torch.nn.BatchNorm1d`` of ``[rows, channels]`` over the rows of all ranks.

    With one process and two rows or more it is torch's own, with its parameters and buffers.
    Batches of all ranks count as one, in which ranks may have different numbers of rows, or none. A
    batch of one row in all has no variance: it is normalised by the running statistics, which it
    does not change. (torch raises an error in its place; its ``SyncBatchNorm`` is for GPUs alone.)

    Args:
        channels: of the rows.
        affine: whether there are a weight and a bias.
        ranks: that train together.
    """

    def __init__(self, channels: int, *, affine: bool = True, ranks: Ranks | None = None) -> None:
        super().__init__(channels, affine=affine)
        self.ranks = ranks or Ranks()

    def forward(self, x: Tensor) -> Tensor:
        """The rows, normalised: ``[rows, channels]``."""
        rows = x.shape[0]
        if not self.training or (self.ranks.size == 1 and rows > 1):
            return super().forward(x)
        if self.ranks.size > 1:
            rows = sum(self.ranks.sizes(x))
        assert self.running_mean is not None and self.running_var is not None
        if rows <= 1:
            running = (self.running_mean, self.running_var, self.weight, self.bias)
            return F.batch_norm(x, *running, training=False, eps=self.eps)
        mean = self.ranks.sum(x.sum(0)) / rows
        centred = x - mean
        variance = self.ranks.sum(centred.square().sum(0)) / rows
        with torch.no_grad():
            assert self.momentum is not None and self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            self.running_mean.lerp_(mean.to(self.running_mean), self.momentum)
            unbiased = variance * (rows / (rows - 1))
            self.running_var.lerp_(unbiased.to(self.running_var), self.momentum)
        out = centred * (variance + self.eps).rsqrt()
        return out if self.weight is None else torch.addcmul(self.bias, out, self.weight)
