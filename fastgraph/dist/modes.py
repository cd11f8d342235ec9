"""How fused attention is computed on sharded tensors: by rows and their halo, or by heads.

``"halo"``: each rank computes all heads of its nodes, from their rows and those of the halo.
``"heads"``: each rank computes some heads of all nodes, over all edges (Ulysses: Jacobs et al.,
arXiv 2309.14509; for graphs: TorchGT, SC 2024, section III-C).
``"auto"``: what :mod:`fastgraph.dist.planner` finds faster, for each layer.
"""

from __future__ import annotations

from collections.abc import Callable

from fastgraph.dist.counts import COUNTS
from fastgraph.dist.layout import Layout
from fastgraph.dist.world import WORLD

MODES = ("halo", "heads", "auto")


def check_mode(mode: str) -> None:
    """A mode is one that there is.

    Raises:
        ValueError: it is not.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {list(MODES)}, got {mode!r}")


def is_by_heads(
    num_heads: int, sources: Layout, destinations: Layout, is_faster: Callable[[], bool]
) -> bool:
    """Whether attention between these nodes is computed by heads; the choice is counted.

    All ranks come to the same answer.

    Args:
        num_heads: how many heads there are.
        sources: the layout of the nodes that edges start from.
        destinations: that of those which they lead to.
        is_faster: whether heads are faster, asked where that decides.
    """
    mode = sources.mode if destinations.mode == "halo" else destinations.mode
    if WORLD.size == 1 or mode == "halo":
        COUNTS.attention["halo"] += 1
    elif num_heads < 2:
        COUNTS.attention[f"halo: heads cannot be shared out, there are {num_heads}"] += 1
    elif mode == "auto" and not is_faster():
        COUNTS.attention["halo: faster than heads"] += 1
    else:
        COUNTS.attention["heads: faster than halo" if mode == "auto" else "heads"] += 1
        return True
    return False
