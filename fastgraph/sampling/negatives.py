"""Pairs of nodes without an edge."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgraph.sampling.native_calls import call_native, check_tensors
from fastgraph.sampling.random_seeds import chosen_seed


def negative_sample(
    colptr: Tensor,
    row: Tensor,
    num_samples: int,
    *,
    num_src: int | None = None,
    random_seed: int | None = None,
) -> Tensor:
    """Draw pairs of nodes, uniformly and with replacement, among those that no edge joins.

    Args:
        colptr: Where the edges of each destination begin and end, ``[destinations + 1]``, int32 or
            int64.
        row: The source of each edge, ``[edges]``, int32 or int64.
        num_samples: How many pairs.
        num_src: How many sources there are; by default as many as destinations, and then no pair is
            of a node with itself.
        random_seed: See :func:`fastgraph.sampling.neighbor_sample`.

    Returns:
        Sources and destinations, ``[2, pairs]``, of ``row``'s dtype. A pair is left out where a
        hundred attempts have met edges, so that graphs with nearly all edges give fewer.

    Raises:
        TypeError: An argument has another type or dtype.
        ValueError: Shapes do not fit, ``num_samples`` is negative, there are no nodes to draw from,
            or ``colptr`` falls where it is looked at.
    """
    check_tensors(colptr=colptr, row=row)
    if num_samples < 0:
        raise ValueError(f"num_samples must be at least 0, got {num_samples}")
    drawn = torch.empty(2, num_samples, dtype=row.dtype)
    call_native(
        "draw_negatives",
        *(colptr, row, colptr.numel() - 1 if num_src is None else num_src, num_src is not None),
        *(chosen_seed(random_seed), drawn[0], drawn[1]),
    )
    found = drawn[0] >= 0
    return drawn if bool(found.all()) else drawn[:, found]
