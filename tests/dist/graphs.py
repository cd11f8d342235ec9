"""Graphs, and ways to lay them out that leave ranks with little or nothing."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.data import Data

NUM_NODES, NUM_EDGES, NUM_CLASSES, NUM_FEATURES = 60, 300, 4, 8


def graph() -> Data:
    """Unsorted edges with duplicates and self-loops; the last five nodes have none."""
    g = torch.Generator().manual_seed(0)
    edge_index = torch.randint(0, NUM_NODES - 5, (2, NUM_EDGES), generator=g)
    edge_index[:, :6] = edge_index[:, 6:12]
    edge_index[1, 12:15] = edge_index[0, 12:15]
    return Data(
        x=torch.randn(NUM_NODES, NUM_FEATURES, generator=g),
        y=torch.randint(0, NUM_CLASSES, (NUM_NODES,), generator=g),
        edge_index=edge_index,
        edge_attr=torch.rand(NUM_EDGES, 3, generator=g),
        edge_weight=torch.rand(NUM_EDGES, generator=g),
        train_mask=torch.arange(NUM_NODES) % 5 == 0,
        w=torch.rand(NUM_NODES, 1, generator=g),
    )


def uneven(world_size: int) -> Tensor:
    """Nodes at random, rank r with r + 1 times as many as rank 0."""
    g = torch.Generator().manual_seed(1)
    shares = torch.arange(1.0, world_size + 1)
    return torch.multinomial(shares, NUM_NODES, replacement=True, generator=g)


def one_is_empty(world_size: int) -> Tensor:
    """The last rank has no node."""
    return torch.arange(NUM_NODES) % max(world_size - 1, 1)


def one_without_training(world_size: int) -> Tensor:
    """The last rank has nodes, but none to train on, and all that are isolated."""
    parts = torch.arange(NUM_NODES) // 5 % max(world_size - 1, 1)
    parts[torch.arange(NUM_NODES) % 5 > 2] = world_size - 1
    parts[-4:] = world_size - 1
    return parts


def one_has_a_single_node(world_size: int) -> Tensor:
    """The last rank has one node, which has no edge."""
    parts = torch.arange(NUM_NODES) % max(world_size - 1, 1)
    parts[-1] = world_size - 1
    return parts


PARTITIONS = {
    "uneven": uneven,
    "one is empty": one_is_empty,
    "one without training": one_without_training,
}
