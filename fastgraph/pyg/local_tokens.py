"""A transform that gives a graph in memory all that a loader of tokens needs."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.data.datapipes import functional_transform
from torch_geometric.transforms import BaseTransform

from fastgraph.ops.gcn import gcn
from fastgraph.pyg.token_loader import HOP_FEATURES, LOCAL_NODES
from fastgraph.tokens.local_nodes import local_nodes


@functional_transform("local_tokens")
class LocalTokens(BaseTransform):  # type: ignore[misc]  # PyG has no types
    r"""Gives a graph local nodes and context features (LargeGT, arXiv 2312.11109, section 3.2).

    ``local_nodes``, int32 ``[nodes, k]``, are those of :func:`fastgraph.tokens.local_nodes`.
    ``hop_features``, ``[nodes, hops + 1, channels]``, are the features ``x`` and what
    :math:`\tilde A` makes of them once and more often, see :func:`fastgraph.ops.gcn`. Of these a
    :class:`TokenLoader` makes batches. All other attributes stay.

    Args:
        k: how many local nodes a node has, itself the first.
        hops: how often the features are aggregated.
        seed: of the local nodes, any int64.
        dtype: of ``hop_features``; default: that of ``x``.
        direction: ``"in"`` looks for local nodes against edges, ``"out"`` along them, ``"both"``
            either way.

    Raises:
        TypeError: ``dtype`` is no floating-point dtype.
        ValueError: the graph has no ``edge_index`` or no ``x`` ``[nodes, channels]``, or an option
            is out of range.
        IndexError: ``edge_index`` points outside the nodes.
    """

    def __init__(
        self,
        k: int,
        hops: int = 2,
        seed: int = 0,
        *,
        dtype: torch.dtype | None = None,
        direction: str = "in",
    ) -> None:
        if isinstance(hops, bool) or not isinstance(hops, int) or hops < 0:
            raise ValueError(f"hops must be an int of at least 0, got {hops!r}")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"dtype must be a floating-point dtype of torch, got {dtype!r}")
        self.k = k
        self.hops = hops
        self.seed = seed
        self.dtype = dtype
        self.direction = direction

    def forward(self, data: Data) -> Data:
        """The same graph with ``local_nodes`` and ``hop_features``."""
        index, x, num_nodes = data.edge_index, data.x, data.num_nodes
        if not isinstance(index, Tensor):
            raise ValueError(f"data must have an edge_index, got {data}")
        if not isinstance(x, Tensor) or x.dim() != 2 or x.shape[0] != num_nodes:
            raise ValueError(f"data.x must have shape [{num_nodes}, channels], got {data}")
        num_nan = int(x.isnan().sum())
        if num_nan:
            warnings.warn(f"data.x holds {num_nan} NaN, which spread to the context", stacklevel=2)
        with torch.no_grad():
            parts = [x.detach() if self.dtype is None else x.detach().to(self.dtype)]
            for _ in range(self.hops):
                parts.append(gcn(parts[-1], index))
        sampled = local_nodes(
            index.cpu(),
            self.k,
            seed=self.seed,
            direction=self.direction,
            num_nodes=num_nodes,
        )
        data[LOCAL_NODES] = sampled
        data[HOP_FEATURES] = torch.stack(parts, dim=1).cpu()
        return data

    def __repr__(self) -> str:
        return f"{type(self).__name__}(k={self.k}, hops={self.hops}, seed={self.seed})"
