"""Induced subgraphs."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgraph.sampling.native_calls import check_tensors, in_named_items
from fastgraph.sampling.neighbors import neighbor_sample


def subgraph(
    rowptr: Tensor, col: Tensor, nodes: Tensor, *, return_edge_id: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """All edges between some nodes, which are numbered by their positions in ``nodes``.

    A node that comes twice has its edges twice; edges to it lead to its first position.

    Args:
        rowptr: Where the edges of each node begin and end, ``[nodes + 1]``, int32 or int64.
        col: The other end of each edge, ``[edges]``, int32 or int64.
        nodes: Of ``col``'s dtype.
        return_edge_id: Whether to return which edges these are.

    Returns:
        ``rowptr`` and ``col`` of the subgraph and the places of its edges in ``col``, of
        ``rowptr``'s dtype; edges of a node are in their order.

    Raises:
        TypeError: An argument has another type or dtype.
        ValueError: Shapes do not fit, or ``rowptr`` falls at one of the nodes.
        IndexError: ``nodes`` names no node.
    """
    check_tensors(rowptr=rowptr, col=col, nodes=nodes)
    names = {"colptr": "rowptr", "row": "col", "seed": "nodes"}
    with in_named_items(names):
        # The sample of no hops, whose destinations ascend.
        sample = neighbor_sample(rowptr, col, nodes, [], directed=False, random_seed=0)
    counts = torch.bincount(sample.col, minlength=nodes.numel())
    starts = torch.zeros(nodes.numel() + 1, dtype=rowptr.dtype)
    starts[1:] = counts.cumsum(0)
    return starts, sample.row, sample.edge if return_edge_id else None
