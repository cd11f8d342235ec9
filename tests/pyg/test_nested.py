"""Nested tensors, which have no shape: what PyG computes of them, or its error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric import utils

import fastgraph
from tests.graphs import random_edges

# What a route asks of its arguments is the same for every backend.
pytestmark = pytest.mark.repeats

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "SAGEConv": lambda: pyg.SAGEConv(8, 8),
    "SAGEConv max": lambda: pyg.SAGEConv(8, 8, aggr="max"),
    "GCNConv": lambda: pyg.GCNConv(8, 8),
    "GraphConv": lambda: pyg.GraphConv(8, 8),
    "SGConv": lambda: pyg.SGConv(8, 8),
    "GATConv": lambda: pyg.GATConv(8, 8),
    "GATv2Conv": lambda: pyg.GATv2Conv(8, 8),
    "TransformerConv": lambda: pyg.TransformerConv(8, 8),
    "EdgeConv": lambda: pyg.EdgeConv(nn.Linear(16, 8)),
    "CGConv": lambda: pyg.CGConv(8),
    "ResGatedGraphConv": lambda: pyg.ResGatedGraphConv(8, 8),
    "PNAConv": lambda: pyg.PNAConv(8, 8, ["mean"], ["identity"], torch.ones(10)),
    "scatter": lambda: utils.scatter,  # type: ignore[dict-item,return-value]
    "softmax": lambda: utils.softmax,  # type: ignore[dict-item,return-value]
}


def _nested(first: Tensor, second: Tensor) -> Tensor:
    return torch.nested.nested_tensor([first, second])


def _given(place: str, num_edges: int) -> tuple[Any, ...]:
    edges, x = random_edges(12, 12, num_edges), torch.randn(12, 8)
    part = num_edges // 2
    features = _nested(torch.randn(3, 8), torch.randn(9, 8))
    return {
        "x": (features, edges),
        "sources": ((features, x), edges),
        "destinations": ((x, features), edges),
        "edge_index": (x, _nested(edges[0], edges[1])),
        "weights": (x, edges, _nested(torch.rand(part), torch.rand(part))),
        "values of edges": (x, edges, _nested(torch.rand(part, 8), torch.rand(part, 8))),
    }[place]


def _ending(call: Any, given: tuple[Any, ...]) -> Tensor | tuple[str, str]:
    try:
        out: Tensor = call(*given)
    except Exception as error:
        return type(error).__name__, str(error)
    return out


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("num_edges", "min_edges"), [(60, 0), (20_000, None)], ids=["few edges", "many edges"]
)
@pytest.mark.parametrize(
    "place", ["x", "sources", "destinations", "edge_index", "weights", "values of edges"]
)
@pytest.mark.parametrize("name", LAYERS)
def test_they_end_as_upstream(name: str, place: str, num_edges: int, min_edges: int | None) -> None:
    torch.manual_seed(0)
    call, given = LAYERS[name](), _given(place, num_edges)
    expected = _ending(call, given)
    with fastgraph.enabled(min_edges=min_edges):
        found = _ending(call, given)
    if isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected)
    else:
        assert found == expected
