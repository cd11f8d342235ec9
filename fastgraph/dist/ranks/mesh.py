"""Ranks as the rows and columns of a mesh: its shape, and the rank where an edge is."""

from __future__ import annotations

import math

from torch import Tensor

Mesh = tuple[int, int]
"""The numbers of rows and columns of a grid; rank ``r`` is in row ``r // columns``."""


GRID = "grid"
"""The mode of operators in which ranks are a grid."""


def usual_mesh(num_ranks: int) -> Mesh:
    """The most square grid of so many ranks, with no more columns than rows."""
    width = next(w for w in range(math.isqrt(num_ranks), 0, -1) if num_ranks % w == 0)
    return num_ranks // width, width


def meshes(ranks: int) -> list[Mesh]:
    """All grids of so many ranks, from one column to one row."""
    return [(ranks // width, width) for width in range(1, ranks + 1) if ranks % width == 0]


def check_mesh(mesh: Mesh, num_ranks: int) -> None:
    """A mesh is two numbers, whose product is a number of ranks.

    Raises:
        ValueError: it is not.
    """
    fits = isinstance(mesh, tuple) and len(mesh) == 2
    fits = fits and all(isinstance(size, int) and size > 0 for size in mesh)
    if not fits or math.prod(mesh) != num_ranks:
        raise ValueError(
            f"mesh must be a tuple of the numbers of rows and columns of a grid of {num_ranks} "
            f"ranks, such as {usual_mesh(num_ranks)}, got {mesh}"
        )


def holder(sources: Tensor, destinations: Tensor, mesh: Mesh) -> Tensor:
    """The rank of each edge: of the row of its destination and the column of its source.

    Args:
        sources: int64 ``[E]``, the rank that holds the node where an edge starts.
        destinations: the same for where it leads to.
        mesh: of the grid.
    """
    width = mesh[1]
    return destinations // width * width + sources % width
