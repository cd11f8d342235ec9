"""The weights that GATv2Conv, GATConv and TransformerConv return."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv

import fastgraph
from tests.graphs import random_edges

NODES = 24


@pytest.mark.parametrize("cls", [GATv2Conv, GATConv])
@pytest.mark.parametrize("add_self_loops", [False, True])
@pytest.mark.parametrize("edge_dim", [None, 3])
@pytest.mark.parametrize("order", ["sorted", "unsorted"])
def test_one_seed_drops_the_same_edges(
    cls: Any, add_self_loops: bool, edge_dim: int | None, order: str
) -> None:
    index = random_edges(NODES, NODES, 150)
    if order == "sorted":
        index = index[:, index[1].argsort(stable=True)]
    options = {"heads": 2, "dropout": 0.5, "edge_dim": edge_dim, "bias": False}
    layer = cls(5, 4, add_self_loops=add_self_loops, **options).double()
    x = torch.randn(NODES, 5, dtype=torch.float64, requires_grad=True)
    attr = None if edge_dim is None else torch.randn(150, edge_dim, dtype=torch.float64)
    with fastgraph.enabled(min_edges=0):
        torch.manual_seed(0)
        alone = layer(x, index, attr)
        torch.manual_seed(0)
        out, (edges, alpha) = layer(x, index, attr, return_attention_weights=True)
    assert torch.equal(out, alone)
    (both,) = torch.autograd.grad(out.square().sum(), x, retain_graph=True)
    assert torch.allclose(both, *torch.autograd.grad(alone.square().sum(), x))
    # They are those of the edges beside them, and have a gradient.
    source = layer.lin if cls is GATConv else layer.lin_l
    messages = source(x).view(NODES, 2, 4)[edges[0]] * alpha.unsqueeze(-1)
    summed = torch.zeros(NODES, 2, 4, dtype=torch.float64).index_add(0, edges[1], messages)
    assert torch.allclose(summed.flatten(1), out)
    assert (alpha == 0).any()
    (of_weights,) = torch.autograd.grad((alpha * torch.arange(len(alpha)).view(-1, 1)).sum(), x)
    assert of_weights.abs().max() > 0


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
