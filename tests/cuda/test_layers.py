"""Routed layers on a GPU against upstream's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch_geometric import EdgeIndex

import fastgraph
from tests.ab import arguments, assert_same
from tests.graphs import square_cases
from tests.pyg.test_attention_layers import LAYERS as ATTENTION
from tests.pyg.test_attention_layers import features
from tests.pyg.test_layers import CHANNELS, NODES, simple_edges
from tests.pyg.test_layers import LAYERS as OTHERS

LAYERS: dict[str, Any] = OTHERS | ATTENTION
EDGES = simple_edges()


@pytest.mark.parametrize("kind", ["edge_index", "EdgeIndex"])
@pytest.mark.parametrize("name", LAYERS)
def test_values_and_gradients(name: str, kind: str, device: torch.device) -> None:
    edges = EDGES.to(device)
    graph = EdgeIndex(edges, sparse_size=(NODES, NODES)) if kind == "EdgeIndex" else edges
    module = LAYERS[name]().to(device)
    assert_same(module, arguments(features(NODES, CHANNELS).to(device), graph))


@pytest.mark.parametrize("case", [c for c in square_cases() if c.name != "int32"], ids=str)
@pytest.mark.parametrize("name", ["GCN", "GATv2", "GAT", "Transformer"])
def test_awkward_graphs(name: str, case: Any, device: torch.device) -> None:
    x = features(case.num_src, CHANNELS).to(device)
    assert_same(LAYERS[name]().to(device), arguments(x, case.edge_index.to(device)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["GCN", "GATv2", "GAT", "Transformer"])
def test_autocast_gives_the_dtypes_of_upstream(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    x, edges = features(NODES, CHANNELS).to(device), EDGES.to(device)
    with torch.autocast(device.type, dtype=dtype):
        # Under autocast the truth is rounded too, so only its scale can be compared.
        assert_same(LAYERS[name]().to(device), arguments(x, edges), factor=4)


@pytest.mark.parametrize("name", ["GCN", "GATv2", "GAT", "Transformer"])
def test_compiles(name: str, gpu: torch.device) -> None:
    module = LAYERS[name]().to(gpu)
    x, edges = features(NODES, CHANNELS).to(gpu), EDGES.to(gpu)
    expected = module(x, edges)
    with fastgraph.enabled(min_edges=0):
        compiled = torch.compile(copy.deepcopy(module), fullgraph=True)
        out = compiled(x, edges)
        out.square().sum().backward()
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
