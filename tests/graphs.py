"""Small graphs with the awkward cases that every operator and route must survive."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """A named graph."""

    name: str
    edge_index: Tensor
    num_src: int
    num_dst: int

    @property
    def num_edges(self) -> int:
        return self.edge_index.shape[1]

    def __str__(self) -> str:
        return self.name


def random_edges(num_src: int, num_dst: int, num_edges: int, seed: int = 0) -> Tensor:
    """Unsorted edges with duplicates and, where sizes allow, self-loops."""
    generator = torch.Generator().manual_seed(seed)
    src = torch.randint(num_src, (num_edges,), generator=generator)
    dst = torch.randint(num_dst, (num_edges,), generator=generator)
    return torch.stack([src, dst])


def hub_edges(num_nodes: int, num_edges: int) -> Tensor:
    """A destination with so many edges that kernels split its row, beside light ones."""
    edges = random_edges(num_nodes, num_nodes, num_edges, seed=1)
    edges[1, ::2] = 3
    return edges


def mixed_communities(
    num_nodes: int,
    edges_of_node: int,
    *,
    size: int = 50,
    noise: float = 0.0,
    mixed: bool = True,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Communities of ``size`` nodes, numbered at random if ``mixed``.

    A part ``noise`` of the edges leads to any node, the others stay in the community.
    """
    first = torch.arange(num_nodes).repeat(edges_of_node)
    near = first // size * size + torch.randint(size, first.shape, generator=generator)
    second = near.clamp(max=max(num_nodes - 1, 0))
    if noise:
        far = torch.randint(num_nodes, first.shape, generator=generator)
        second = torch.where(torch.rand(first.shape, generator=generator) < noise, far, second)
    edges = torch.stack([first, second])
    return torch.randperm(num_nodes, generator=generator)[edges] if mixed else edges


def cut_case() -> Case:
    """Rows of 300, 0, 301 and 257 edges, and a few: CUDA kernels cut those of more than 256, or of
    more than 64, into pieces that are not all of one length."""
    dst = torch.tensor([0] * 300 + [2] * 301 + [3] * 257 + [4] * 3)
    return Case("cut", torch.stack([random_edges(50, 1, dst.numel())[0], dst]), 50, 6)


def square_cases() -> list[Case]:
    """Graphs with as many sources as destinations."""
    loops = torch.arange(6).repeat(2, 1)
    edges = random_edges(12, 12, 40)
    by_destination = edges[:, edges[1].argsort(stable=True)]
    return [
        Case("random", edges, 12, 12),
        Case("sorted", by_destination, 12, 12),
        Case("isolated", random_edges(5, 5, 12), 20, 20),
        Case("self_loops", torch.cat([loops, random_edges(6, 6, 9)], dim=1), 6, 6),
        Case("duplicates", random_edges(3, 3, 50), 3, 3),
        Case("one_edge", torch.tensor([[1], [0]]), 2, 2),
        Case("no_edges", torch.empty(2, 0, dtype=torch.long), 4, 4),
        Case("no_nodes", torch.empty(2, 0, dtype=torch.long), 0, 0),
        Case("int32", edges.int(), 12, 12),
        Case("strided", edges.t().contiguous().t(), 12, 12),
        Case("hub", hub_edges(40, 12_000), 40, 40),
    ]


def all_cases() -> list[Case]:
    """Square and bipartite graphs."""
    return [
        *square_cases(),
        Case("bipartite_wide", random_edges(9, 4, 30), 9, 4),
        Case("bipartite_tall", random_edges(3, 15, 30), 3, 15),
    ]


def quantised(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Few distinct values, half of them zero, as after a ReLU: extrema tie and hit 0."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).clamp(min=0).to(dtype)
