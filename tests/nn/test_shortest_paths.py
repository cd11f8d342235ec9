"""Distances in graphs, of which each form says what NetworkX does."""

from __future__ import annotations

import networkx as nx
import pytest
import torch
from torch import Tensor

from fastgraph.nn.shortest_paths import (
    distances_all_at_once,
    distances_in_ranges,
    distances_of_pairs,
    nodes_within,
)

SIZES = [5, 1, 8, 4]
"""Of graphs in a row, the third in several parts, the last without edges."""
EDGES = torch.tensor(
    [[0, 1, 2, 3, 3, 0, 6, 7, 8, 8, 11, 12], [1, 2, 3, 4, 4, 0, 7, 8, 6, 9, 12, 11]]
)
NODES = sum(SIZES)


def by_destination() -> tuple[Tensor, Tensor]:
    order = EDGES[1].argsort(stable=True)
    counts = torch.bincount(EDGES[1], minlength=NODES)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)]), EDGES[0][order]


def exact(longest: int) -> Tensor:
    """``[query, key]``."""
    graph = nx.DiGraph(EDGES.T.tolist())
    graph.add_nodes_from(range(NODES))
    found = torch.full((NODES, NODES), longest + 1, dtype=torch.uint8)
    for key, lengths in nx.all_pairs_shortest_path_length(graph, cutoff=longest):
        for query, length in lengths.items():
            found[query, key] = length
    return found


@pytest.mark.parametrize("longest", [0, 1, 2, 254])
def test_all_forms(longest: int) -> None:
    ptr, sources = by_destination()
    starts = torch.tensor([0, *SIZES]).cumsum(0)
    sizes = torch.tensor(SIZES).repeat_interleave(torch.tensor(SIZES))
    first = starts[:-1].repeat_interleave(torch.tensor(SIZES))
    begins = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    whole = exact(longest)
    expected = torch.cat([whole[own, own].flatten() for own in map(slice, starts[:-1], starts[1:])])
    given = ptr, sources, torch.arange(NODES), first, begins, longest
    assert torch.equal(distances_in_ranges(*given), expected)
    assert torch.equal(distances_all_at_once(*given), expected)
    keys, queries = torch.randint(NODES, (2, 300), generator=torch.Generator().manual_seed(0))
    assert torch.equal(
        distances_of_pairs(ptr, sources, keys, queries, longest), whole[queries, keys]
    )
    near, node, distance = nodes_within(ptr, sources, longest)
    assert torch.equal(distance, whole[node, near])
    assert len(near) == int((whole <= longest).sum())


def test_a_query_is_a_row() -> None:
    pair = torch.tensor([0])
    with pytest.raises(IndexError, match="queries: expected rows of 0 to 17, got -1 to -1"):
        distances_of_pairs(*by_destination(), pair, pair - 1, 3)
