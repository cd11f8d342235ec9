"""Random walks."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgraph.sampling.native_calls import call_native, check_tensors
from fastgraph.sampling.random_seeds import chosen_seed


def random_walk(
    rowptr: Tensor,
    col: Tensor,
    seed: Tensor,
    walk_length: int,
    *,
    p: float = 1.0,
    q: float = 1.0,
    return_edge_id: bool = False,
    random_seed: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Walk along edges at random from each seed (node2vec: Grover and Leskovec, KDD 2016).

    A step goes to ``x``, a neighbour of the node of this step, with a probability in proportion to
    ``1 / p`` if ``x`` is the node of the step before, to 1 if an edge leads from that one to ``x``,
    and to ``1 / q`` otherwise. A walk stays where no edge leads on.

    Args:
        rowptr: Where the edges of each source begin and end, ``[nodes + 1]``, int32 or int64.
        col: The destination of each edge, ``[edges]``, int32 or int64.
        seed: Where walks begin, ``[walks]``, of ``col``'s dtype.
        walk_length: How many steps each walk has.
        p: Above 0; the larger, the fewer steps go back.
        q: Above 0; the larger, the nearer walks stay.
        return_edge_id: Whether to return which edges were walked.
        random_seed: See :func:`fastgraph.sampling.neighbor_sample`.

    Returns:
        The nodes of each walk, ``[walks, walk_length + 1]``, of ``col``'s dtype, and the places of
        its edges in ``col``, ``[walks, walk_length]``, of ``rowptr``'s dtype, ``-1`` where it
        stays.

    Raises:
        TypeError: An argument has another type or dtype.
        ValueError: Shapes do not fit, ``rowptr`` falls where a walk looks at it, or
            ``walk_length``, ``p`` or ``q`` are out of their range.
        IndexError: ``seed``, or ``col`` where a walk looks at it, names no node.
    """
    check_tensors(rowptr=rowptr, col=col, seed=seed)
    if walk_length < 0:
        raise ValueError(f"walk_length must be at least 0, got {walk_length}")
    nodes = torch.empty(seed.numel(), walk_length + 1, dtype=col.dtype)
    edges = torch.empty(seed.numel(), walk_length, dtype=rowptr.dtype) if return_edge_id else None
    chosen = chosen_seed(random_seed)
    call_native("random_walk", rowptr, col, seed.contiguous(), p, q, chosen, nodes, edges)
    return nodes, edges
