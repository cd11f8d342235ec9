"""The weights that GATv2Conv, GATConv and TransformerConv return."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv

import fastgraph
from tests.graphs import random_edges

NODES = 24


@pytest.mark.parametrize("cls", [GATv2Conv, GATConv, TransformerConv])
@pytest.mark.parametrize("edges", [NODES, 90, 600])
@pytest.mark.parametrize("edge_dim", [None, 3])
def test_no_weight_is_above_one(cls: Any, edges: int, edge_dim: int | None) -> None:
    # Rows of one entry, of few and of many have their scores added up in different orders.
    torch.manual_seed(edges)
    each = torch.arange(NODES)
    index = torch.stack([each, each]) if edges == NODES else random_edges(NODES, NODES, edges)
    attr = None if edge_dim is None else torch.randn(index.size(1), edge_dim)
    for width in (1, 7, 32, 100):
        layer = cls(width, width, heads=2, edge_dim=edge_dim)
        x = 10 * torch.randn(NODES, width)
        with fastgraph.enabled(min_edges=0), torch.no_grad():
            _, (_, alpha) = layer(x, index, attr, return_attention_weights=True)
        assert alpha.min() >= 0
        assert alpha.max() <= 1
