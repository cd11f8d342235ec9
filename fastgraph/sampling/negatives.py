"""Pairs of nodes without an edge."""

from __future__ import annotations

from torch import Tensor


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
        Sources and destinations, ``[2, pairs]``, of ``row``'s dtype. A pair is left out where hundred
        attempts have met edges, so that there may be fewer in graphs with nearly all edges.

    Raises:
        TypeError: An argument has another type or dtype.
        ValueError: Shapes do not fit, ``num_samples`` or ``num_src`` are negative, or ``colptr`` falls
            where it is looked at.
    """
    raise NotImplementedError
