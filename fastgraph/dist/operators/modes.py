"""The modes of fused operators on sharded tensors: by halo, by heads, or on a grid.

``"halo"``: each rank computes all heads of its nodes, from their rows and those of the halo.
``"heads"``: each rank computes some heads of all nodes, over all edges (Ulysses: Jacobs et al.,
arXiv 2309.14509; for graphs: TorchGT, SC 2024, section III-C).
``"2d"``: each rank computes with the edges between the nodes of two sets of ranks (A-stationary
1.5D: Besta et al., SC 2023), sums and extrema as well as attention.
``"auto"``: what :mod:`fastgraph.dist.operators.planner` finds fastest, for each layer of attention,
sums or extrema; others are by halo. The default.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fastgraph.dist.operators.grid.exchange import Grid, grid
from fastgraph.dist.ranks.counts import COUNTS
from fastgraph.dist.ranks.mesh import Mesh, check_mesh
from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.tensor.layout import Layout

MODES = ("halo", "heads", "2d", "auto")


class Chosen(NamedTuple):
    """How a layer is computed with ``"auto"``.

    Attributes:
        name: of the mode.
        mesh: of the grid, if it is one.
        why: by what it was chosen.
    """

    name: str
    mesh: Mesh | None
    why: str


Fastest = Callable[[Sequence[str]], Chosen]
"""Chooses from some modes, asked where that decides."""


def check_mode(mode: str, mesh: Mesh | None = None, num_ranks: int | None = None) -> None:
    """A mode is one that there is, and a mesh one of so many ranks; default: of these.

    Raises:
        ValueError: it is not, or a mesh is given for another mode than ``"2d"``.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {list(MODES)}, got {mode!r}")
    if mesh is not None:
        if mode != "2d":
            raise ValueError(f"mesh is for mode='2d', got mode={mode!r}")
        check_mesh(mesh, num_ranks or WORLD.size)


def grid_of(
    sources: Layout,
    destinations: Layout,
    counter: Counter[str],
    why_not: str = "",
    fastest: Fastest | None = None,
) -> Grid | None:
    """The grid on which operators among these nodes are computed; ``None``: by halo.

    All ranks come to the same answer, which is counted.

    Args:
        sources: the layout of the nodes that edges start from.
        destinations: that of the nodes which they lead to.
        counter: of calls.
        why_not: why this operator cannot be computed by blocks.
        fastest: decides where the mode is ``"auto"``; without it that is by halo.
    """
    modes = sources.mode, destinations.mode
    if WORLD.size == 1:
        return None
    if "2d" in modes:
        counter[f"halo: {why_not}" if why_not else "2d"] += 1
        return None if why_not else grid((sources if modes[0] == "2d" else destinations).mesh)
    if "auto" in modes and fastest is not None and not why_not:
        name, mesh, why = fastest(("halo", "2d"))
        counter[f"{name}: {why}"] += 1
        return None if mesh is None else grid(mesh)
    return None


def of_attention(
    num_heads: int,
    sources: Layout,
    destinations: Layout,
    fastest: Fastest,
) -> tuple[str, Grid | None]:
    """How attention between these nodes is computed, and on which grid; the choice is counted.

    All ranks come to the same answer.

    Args:
        num_heads: how many heads there are.
        sources: the layout of the nodes that edges start from.
        destinations: that of those which they lead to.
        fastest: decides where the mode is ``"auto"``.
    """
    on_blocks = grid_of(sources, destinations, COUNTS.attention)
    if on_blocks is not None:
        return "2d", on_blocks
    mode = sources.mode if destinations.mode == "halo" else destinations.mode
    if WORLD.size == 1 or mode == "halo":
        COUNTS.attention["halo"] += 1
        return "halo", None
    if mode == "auto":
        name, mesh, why = fastest(("halo", "2d") if num_heads < 2 else ("halo", "heads", "2d"))
        COUNTS.attention[f"{name}: {why}"] += 1
        return name, None if mesh is None else grid(mesh)
    if num_heads < 2:
        COUNTS.attention[f"halo: heads cannot be shared out, there are {num_heads}"] += 1
        return "halo", None
    COUNTS.attention["heads"] += 1
    return "heads", None
