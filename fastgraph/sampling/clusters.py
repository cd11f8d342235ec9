"""Clusters of nodes with few edges between them."""

from __future__ import annotations

from torch import Tensor


def cluster(rowptr: Tensor, col: Tensor, num_parts: int, *, recursive: bool = False) -> Tensor:
    """Cut a graph into parts of about the same size by METIS (Karypis and Kumar, SISC 1998).

    Args:
        rowptr: Where the edges of each node begin and end, ``[nodes + 1]``, int32 or int64.
        col: The other end of each edge, ``[edges]``, int32 or int64. Directions, loops and repeated
            edges do not matter.
        num_parts: At least 1.
        recursive: Whether to bisect again and again rather than to cut at once.

    Returns:
        The part of each node, ``[nodes]``, int64.

    Raises:
        TypeError: An argument has another type or dtype.
        ValueError: Shapes do not fit, ``rowptr`` falls, or ``num_parts`` is not positive.
        IndexError: ``col`` names no node.
        ModuleNotFoundError: ``pymetis`` is not installed.
    """
    raise NotImplementedError
