"""Graphs of the shapes that programs have: tiny, sparse, batched, regular, dense and large."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from measure.graphs import GraphData, load


def _both_ways(edges: Tensor) -> Tensor:
    return torch.cat([edges, edges.flip(0)], dim=1).contiguous()


def at_random(name: str, num_nodes: int, num_edges: int) -> GraphData:
    """Edges between any two nodes, each in both directions."""
    generator = torch.Generator().manual_seed(0)
    ends = torch.randint(num_nodes, (2, num_edges // 2), generator=generator)
    return GraphData(name, _both_ways(ends), num_nodes)


def molecules(count: int, atoms: int = 25, rings: int = 2) -> GraphData:
    """Chains with branches of ``atoms`` nodes each, and some rings closed, as one graph."""
    generator = torch.Generator().manual_seed(0)
    atom = torch.arange(1, atoms).expand(count, -1)
    # Each atom is bound to one of the two before it.
    is_branch = (torch.rand(count, atoms - 1, generator=generator) < 0.2) & (atom > 1)
    bound = atom - 1 - is_branch.long()
    start = torch.randint(atoms - 6, (count, rings), generator=generator)
    ends = torch.stack([torch.cat([atom, start], 1), torch.cat([bound, start + 5], 1)])
    first = atoms * torch.arange(count).view(1, -1, 1)
    return GraphData("molecules", _both_ways((ends + first).flatten(1)), count * atoms)


def triangles(side: int) -> GraphData:
    """A closed surface of triangles, ``side`` times ``side`` nodes with six neighbours each."""
    node = torch.arange(side * side).view(side, side)
    moved = [node.roll(shifts, (0, 1)) for shifts in ((1, 0), (0, 1), (1, 1))]
    ends = torch.cat([torch.stack([node.flatten(), other.flatten()]) for other in moved], dim=1)
    return GraphData("mesh", _both_ways(ends), side * side)


SHAPES: dict[str, Callable[[], GraphData]] = {
    "tiny": lambda: at_random("tiny", 10, 30),
    "cora-size": lambda: at_random("cora-size", 2_708, 10_556),
    "molecules": lambda: molecules(128),
    "mesh": lambda: triangles(100),
    "dense": lambda: at_random("dense", 5_000, 217_000),
    "tolokers": lambda: load("tolokers"),
}
"""From the cheapest to the dearest. ``tolokers`` needs ``FASTGRAPH_DATA``."""
