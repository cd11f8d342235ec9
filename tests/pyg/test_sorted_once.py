"""Samples are grouped by destination once for all layers, and by source once where gradients need
it: native sorts are counted, batch by batch, over an epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch_geometric.loader import DataLoader, NeighborLoader
from torch_geometric.nn import GAT, PNA, GraphSAGE, to_hetero

import fastgraph
from fastgraph.backends.building import NativeBuilder
from tests.pyg.mini_batches import WITHOUT_SAMPLER, graph, hetero

pytestmark = [WITHOUT_SAMPLER, pytest.mark.repeats]

BY_DESTINATION = ("build_csr", "build_csr_with_loops", "check_csr")
LAYERS = 3
WIDTH = 16
"""Sums of fewer channels may go without sorted edges."""
SIZES: dict[str, int] = {
    "in_channels": WIDTH,
    "hidden_channels": WIDTH,
    "num_layers": LAYERS,
    "out_channels": WIDTH,
}
PNA_OPTIONS: dict[str, Any] = {
    "aggregators": ["mean", "max", "std"],
    "scalers": ["identity", "amplification"],
    "deg": torch.arange(8),
}

MODELS: dict[str, Callable[[], nn.Module]] = {
    "SAGE mean": lambda: GraphSAGE(**SIZES),
    "SAGE max": lambda: GraphSAGE(**SIZES, aggr="max"),
    "GAT": lambda: GAT(**SIZES, heads=2),
    "GAT without loops": lambda: GAT(**SIZES, heads=2, add_self_loops=False),
    "GATv2": lambda: GAT(**SIZES, heads=2, v2=True),
    "PNA": lambda: PNA(**SIZES, **PNA_OPTIONS),
}
NEEDS_NO_SOURCES = ("SAGE max",)
"""Models whose gradients go back along the edges that were taken."""


@pytest.fixture
def sorts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many times each kind of sort has run."""
    counts: Counter[str] = Counter()

    def counted(name: str) -> Callable[..., Any]:
        original = getattr(NativeBuilder, name)

        def build(self: NativeBuilder, *args: Any) -> Any:
            counts["by source" if name == "transpose_csr" else "by destination"] += 1
            return original(self, *args)

        return build

    for name in (*BY_DESTINATION, "transpose_csr"):
        monkeypatch.setattr(NativeBuilder, name, counted(name))
    return counts


def sample(data: Any, **options: Any) -> NeighborLoader:
    return NeighborLoader(data, [4, 3, 2], batch_size=16, **options)


def step(model: nn.Module, batch: Any, trims: bool, trains: bool) -> None:
    counts = {}
    if trims:
        counts = {
            "num_sampled_nodes_per_hop": batch.num_sampled_nodes,
            "num_sampled_edges_per_hop": batch.num_sampled_edges,
        }
    with torch.set_grad_enabled(trains):
        out = model(batch.x, batch.edge_index, **counts)
    if trains:
        out.sum().backward()


@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("trims", [False, True], ids=["whole", "trimmed"])
@pytest.mark.parametrize("name", MODELS)
def test_each_layer_of_a_sample(name: str, trims: bool, trains: bool, sorts: Counter[str]) -> None:
    """A trimmed sample has other edges in each layer, which is one sort of those of each."""
    data = graph()
    data.x = torch.randn(60, WIDTH)
    with fastgraph.enabled():
        model = MODELS[name]()
        for batch in sample(data):
            sorts.clear()
            step(model, batch, trims, trains)
            graphs = LAYERS if trims else 1
            assert sorts["by destination"] == graphs
            needs_sources = trains and name not in NEEDS_NO_SOURCES
            assert sorts["by source"] <= (graphs if needs_sources else 0)
            assert all(row.fell_back == 0 for row in fastgraph.status().rows)


@pytest.mark.parametrize("kind", ["SAGE", "GAT"])
def test_each_type_of_edges(kind: str, sorts: Counter[str]) -> None:
    data = hetero()
    for name in data.node_types:
        data[name].x = torch.randn(len(data[name].x), WIDTH)
    model = GraphSAGE(**SIZES) if kind == "SAGE" else GAT(**SIZES, heads=2, add_self_loops=False)
    with fastgraph.enabled():
        model = to_hetero(model, data.metadata())
        for batch in sample(data, input_nodes="paper"):
            sorts.clear()
            out = model(batch.x_dict, batch.edge_index_dict)["paper"]
            out.sum().backward()
            assert sorts["by destination"] <= len(data.edge_types)
            assert sorts["by source"] <= len(data.edge_types)


def test_each_batch_of_small_graphs(sorts: Counter[str]) -> None:
    graphs = [graph().subgraph(torch.arange(20)) for _ in range(4)]
    for one in graphs:
        one.x = torch.randn(20, WIDTH)
    with fastgraph.enabled():
        model = GraphSAGE(**SIZES)
        for batch in DataLoader(graphs, batch_size=2):
            sorts.clear()
            step(model, batch, trims=False, trains=True)
            assert sorts == {"by destination": 1, "by source": 1}
