"""The modes of fused operators on sharded tensors: by halo, by heads, or on a grid.

``"halo"``: each rank computes all heads of its nodes, from their rows and those of the halo.
``"heads"``: each rank computes some heads of all nodes, over all edges (Ulysses: Jacobs et al.,
arXiv 2309.14509; for graphs: TorchGT, SC 2024, section III-C).
``"grid"``: each rank computes with the edges between the nodes of two sets of ranks (A-stationary
1.5D: Besta et al., SC 2023), sums and extrema as well as attention.
``"auto"``: what :mod:`fastgraph.dist.operators.planner` finds fastest, for each layer of attention,
sums or extrema; others are by halo. The default.

A further mode is a folder beside these, see :mod:`fastgraph.dist.operators.protocol`, and an entry
of :data:`BY_NAME`.
"""

from __future__ import annotations

from fastgraph.dist.operators.grid.computing import Grid
from fastgraph.dist.operators.halo.computing import Halo
from fastgraph.dist.operators.heads.computing import Heads
from fastgraph.dist.operators.protocol import Mode
from fastgraph.dist.ranks.mesh import Mesh, check_mesh
from fastgraph.dist.ranks.world import WORLD

HALO = Halo()
"""The mode that computes whatever others do not."""

BY_NAME: dict[str, Mode] = {mode.name: mode for mode in (HALO, Heads(), Grid())}

AUTO = "auto"

MODES = (*BY_NAME, AUTO)

_BEFORE = {"2d": Grid.name}
"""Names that modes had once, which programs may still give."""


def current_name(mode: str) -> str:
    """The name of a mode that may be given by the one that it had once."""
    return _BEFORE.get(mode, mode)


def checked_mode(mode: str, mesh: Mesh | None = None, num_ranks: int | None = None) -> str:
    """The name of a mode that there is, for a mesh of so many ranks; default: of these.

    Raises:
        ValueError: there is none of this name, a mesh has other ranks, or one is given for
            another mode than the grid.
    """
    mode = current_name(mode)
    if mode not in BY_NAME and mode != AUTO:
        raise ValueError(f"mode must be one of {[*BY_NAME, AUTO]}, got {mode!r}")
    if mesh is not None:
        if mode != Grid.name:
            raise ValueError(f"mesh is for mode={Grid.name!r}, got mode={mode!r}")
        check_mesh(mesh, num_ranks or WORLD.size)
    return mode
