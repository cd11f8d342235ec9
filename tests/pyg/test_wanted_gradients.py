"""Gradients that nobody asks for are not computed, in all layers of PyG with a route."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv

import fastgraph
from fastgraph.layers.edge_projection import is_folded_by_operator
from tests.graphs import random_edges
from tests.pyg.test_layers import CHANNELS, LAYERS, NODES, simple_edges
from tests.pyg.test_usual import CONVS, calling
from tests.wanted import assert_only_wanted_gradients, penalty_gradients

EDGES = simple_edges()
GRAPH = random_edges(25, 25, 300)
EDGE_ATTR = torch.linspace(-1, 1, 3 * EDGES.shape[1]).view(-1, 3)

ATTENTION: dict[str, Callable[[], nn.Module]] = {
    "GAT": lambda: GATConv(CHANNELS, 4, heads=2),
    "GAT-edges": lambda: GATConv(CHANNELS, 4, heads=2, edge_dim=3),
    "GATv2": lambda: GATv2Conv(CHANNELS, 4, heads=2),
    "GATv2-shared": lambda: GATv2Conv(CHANNELS, 4, heads=2, share_weights=True),
    "GATv2-edges": lambda: GATv2Conv(CHANNELS, 4, heads=2, edge_dim=3),
    "Transformer": lambda: TransformerConv(CHANNELS, 4, heads=2),
    "Transformer-edges": lambda: TransformerConv(CHANNELS, 4, heads=2, edge_dim=3),
}
EVERY = LAYERS | ATTENTION


@pytest.fixture(autouse=True)
def _all_products_in_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastgraph.layers.linear.LARGE", 0)


def run(module: nn.Module, x: Tensor) -> Tensor:
    has_edges = getattr(module, "edge_dim", None) is not None
    out: Tensor = module(x, EDGES, EDGE_ATTR.to(x.dtype)) if has_edges else module(x, EDGES)
    return out


def features(dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(4)
    return torch.randn(NODES, CHANNELS, dtype=dtype, requires_grad=True)


def multiplied_besides(module: nn.Module, x: Tensor) -> int:
    """How much TransformerConv's folding multiplies for nodes, once in each of two operands, where
    no operator does it; upstream has no gradient of features by way of those of edges."""
    with fastgraph.enabled():
        if is_folded_by_operator(x):
            return 0
    convs = [conv for conv in module.modules() if isinstance(conv, TransformerConv)]
    weights = [conv.lin_edge.weight for conv in convs if conv.lin_edge is not None]
    return 2 * len(x) * sum(weight.numel() for weight in weights)


@pytest.mark.parametrize("name", EVERY)
def test_layers(name: str) -> None:
    torch.manual_seed(0)
    module = EVERY[name]()
    # Its route multiplies queries by the weight of edges, where upstream projects all edges.
    is_other = name == "Transformer-edges"
    name, x = type(module).__name__, features()
    more = multiplied_besides(module, x)
    assert_only_wanted_gradients(module, run, x, name, same_products=not is_other, more=more)


@pytest.mark.parametrize("name", ["GCN", "SAGE-mean", "SAGE-max", *ATTENTION])
def test_gradient_penalties(name: str) -> None:
    torch.manual_seed(0)
    module = EVERY[name]().double()
    x = features(torch.float64)
    expected = penalty_gradients(module, run, x)
    with fastgraph.enabled(min_edges=0):
        found = penalty_gradients(module, run, x)
    assert fastgraph.status().row(type(module).__name__).routed > 0
    torch.testing.assert_close(found, expected)


# The aggregations that are made of `MultiheadAttentionBlock`, which has a route, too.
SETS = ("SetTransformerAggregation", "GraphMultisetTransformer")


@pytest.mark.parametrize("name", [*(name for name in CONVS if name != "WLConv"), *SETS])
def test_usual_configurations(name: str) -> None:
    module, (_, leaves) = calling(name, GRAPH)
    others = {key: leaf.detach() for key, leaf in leaves.items() if key != "x"}

    def called(module: nn.Module, x: Tensor) -> Tensor:
        out = module(torch.int64, x=x, **others)
        out = next(iter(out.values())) if isinstance(out, dict) else out
        return out[0] if isinstance(out, tuple) else out

    x = leaves["x"].detach().requires_grad_()
    with fastgraph.enabled(min_edges=0):
        called(module, x)
    if not any(row.routed for row in fastgraph.status().rows):
        pytest.skip("it has no route")
    more = multiplied_besides(module, x)
    assert_only_wanted_gradients(module, called, x, same_products=False, more=more, rtol=1e-12)
