"""How fused attention is computed on sharded tensors: by rows and their halo, or by heads.

``"halo"``: each rank computes all heads of its nodes, from their rows and those of the halo.
``"heads"``: each rank computes some heads of all nodes, over all edges (Ulysses: Jacobs et al.,
arXiv 2309.14509; for graphs: TorchGT, SC 2024, section III-C).
"""

from __future__ import annotations

from fastgraph.dist.counts import COUNTS
from fastgraph.dist.layout import Layout
from fastgraph.dist.world import WORLD

MODES = ("halo", "heads")


def check_mode(mode: str) -> None:
    """A mode is one that there is.

    Raises:
        ValueError: it is not.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {list(MODES)}, got {mode!r}")


def is_by_heads(num_heads: int, sources: Layout, destinations: Layout) -> bool:
    """Whether attention between these nodes is computed by heads; the choice is counted.

    All ranks come to the same answer.
    """
    if WORLD.size == 1 or "heads" not in (sources.mode, destinations.mode):
        COUNTS.attention["halo"] += 1
        return False
    if num_heads < 2:
        COUNTS.attention[f"halo: heads cannot be shared out, there are {num_heads}"] += 1
        return False
    COUNTS.attention["heads"] += 1
    return True
