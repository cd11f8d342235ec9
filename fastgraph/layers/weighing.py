"""Sums over neighbourhoods that are weighted by each head on its own, with weights that exist."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgraph import ops
from fastgraph.graphs.edges import Edges


def sum_of_heads(x: Tensor, weight: Tensor, edges: Edges, num_out: int) -> Tensor:
    r""":math:`y_{ih} = \sum_j w_{jih} x_{jh}`.

    Args:
        x: ``[sources, heads, channels]``; ``[sources, 1, channels]``, the same for all heads.
        weight: ``[E, heads]``, by the numbers of edges.
        edges: along which features are gathered.
        num_out: the number of aggregating nodes.

    Returns:
        ``[num_out, heads, channels]``.
    """
    heads = weight.shape[1]
    of_heads = x.expand(-1, heads, -1)
    sums = [  # not of `unbind`, whose results torch refuses in other words once `x` was edited
        ops.spmm(of_heads[:, h], edges.index, weight[:, h], ptr=edges.ptr, num_out=num_out)
        for h in range(heads)
    ]
    return torch.stack(sums, 1)
