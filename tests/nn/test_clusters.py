"""Clusters of patterns, by METIS and as many as fit into a cache."""

from __future__ import annotations

import subprocess

import pytest
import torch

from fastgraph.nn import clusters_of_cache, dual_pattern
from fastgraph.nn.clusters import clusters_by_metis


def test_a_batch_is_clustered_by_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes longer to start than small graphs take; each has the clusters that it has alone."""
    sizes, index = [7, 1, 12, 9], []
    for number, size in enumerate(sizes):
        ring = torch.arange(size) + sum(sizes[:number])
        index.append(torch.stack([ring, ring.roll(1)]))
    batch = torch.arange(4).repeat_interleave(torch.tensor(sizes))
    pattern = dual_pattern(torch.cat(index, 1), sum(sizes), batch)
    counts, started = [2, 1, 3, 3], []
    alone = [
        clusters_by_metis(dual_pattern(own - own.min(), size), [count]).cluster
        for own, size, count in zip(index, sizes, counts, strict=True)
    ]
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: started.append(1) or run(*a, **k))
    found = clusters_by_metis(pattern, counts).cluster
    assert len(started) == 1
    before = [0, 2, 3, 6]
    assert torch.equal(found, torch.cat([a + b for a, b in zip(alone, before, strict=True)]))


def test_clusters_by_metis() -> None:
    """With few edges in between, and of each graph as it would be alone."""
    clique = torch.combinations(torch.arange(12)).T
    edges = torch.cat([clique, clique + 12, clique + 24, torch.tensor([[0, 12], [12, 24]])], dim=1)
    shuffled = torch.randperm(36, generator=torch.Generator().manual_seed(0))
    pattern = dual_pattern(shuffled[edges], 36)
    found = clusters_by_metis(pattern, [3])
    own = found.cluster[shuffled].view(3, 12)
    assert (own == own[:, :1]).all() and len(set(own[:, 0].tolist())) == 3
    two = dual_pattern(
        torch.cat([shuffled[edges], shuffled[edges] + 36], 1), 72, torch.arange(72) // 36
    )
    both = clusters_by_metis(two, [3, 3]).cluster
    assert torch.equal(both, torch.cat([found.cluster, found.cluster + 3]))


def test_clusters_that_fit_into_a_cache() -> None:
    """Keys and values of 64 channels in float32 take 512 bytes of a node."""
    cache = 512 * 1000 * 10 // 8  # 0.8 of it has 1,000 nodes
    found = [clusters_of_cache(nodes, 256, cache) for nodes in (0, 1, 1000, 1001, 8000, 8001)]
    assert found == [1, 1, 1, 2, 8, 9]
    assert clusters_of_cache(10, 1 << 30, cache) == 10
    assert clusters_of_cache(5, 256) == 1  # of this machine
