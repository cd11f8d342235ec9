"""Training reaches upstream's losses, step by step, and its accuracy."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.datasets import HeterophilousGraphDataset, Planetoid
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GAT, GCN, GraphSAGE, MessagePassing, TransformerConv
from torch_geometric.nn.models.basic_gnn import BasicGNN
from torch_geometric.utils import stochastic_blockmodel_graph

import fastgraph
from tests.emulated import repeats_but


class Transformer(BasicGNN):
    """The model of PyG's other layers for ``TransformerConv``."""

    supports_edge_weight = False
    supports_edge_attr = True

    def init_conv(self, in_channels: int, out_channels: int, **kwargs: Any) -> MessagePassing:
        return TransformerConv(in_channels, out_channels // 4, heads=4, **kwargs)


MODELS: dict[str, Callable[..., BasicGNN]] = {
    "GCN": GCN,
    "SAGE-max": lambda *args, **kwargs: GraphSAGE(*args, aggr="max", **kwargs),
    "SAGE-mean": GraphSAGE,
    "GAT": lambda *args, **kwargs: GAT(*args, heads=4, **kwargs),
    "GATv2": lambda *args, **kwargs: GAT(*args, v2=True, heads=4, **kwargs),
    "Transformer": Transformer,
}


def real_graph(name: str, tmp_path: Path) -> Data:
    """A graph below ``FASTGRAPH_DATA``, copied because PyG writes beside what it reads."""
    root = os.environ.get("FASTGRAPH_DATA")
    if not root:
        pytest.skip("FASTGRAPH_DATA is not set")
    folder = "Planetoid" if name == "Cora" else "HeterophilousGraphDataset"
    raw = "Cora" if name == "Cora" else "tolokers"
    shutil.copytree(Path(root) / folder / raw, tmp_path / raw)
    if name == "Cora":
        return Planetoid(str(tmp_path), name)[0]
    data = HeterophilousGraphDataset(str(tmp_path), name)[0]
    data.train_mask, data.test_mask = data.train_mask[:, 0], data.test_mask[:, 0]
    return data


def made_graph() -> Data:
    """Three communities, with features that hint at them."""
    torch.manual_seed(0)
    inside, outside = 0.1, 0.01
    probabilities = torch.full((3, 3), outside).fill_diagonal_(inside)
    edge_index = stochastic_blockmodel_graph([150, 150, 150], probabilities)
    y = torch.arange(3).repeat_interleave(150)
    x = torch.randn(450, 16) + F.one_hot(y, 16)
    train_mask = torch.rand(450) < 0.3
    return Data(x=x, edge_index=edge_index, y=y, train_mask=train_mask, test_mask=~train_mask)


def train(make: Callable[..., BasicGNN], data: Data, epochs: int, dropout: float) -> list[float]:
    """Losses of all steps, then the test accuracy."""
    torch.manual_seed(1)
    classes = int(data.y.max()) + 1
    model = make(data.num_features, 32, 2, classes, jk="last", dropout=dropout)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(epochs):
        model.train()
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    model.eval()
    with torch.no_grad():
        correct = model(data.x, data.edge_index).argmax(-1) == data.y
    return [*losses, float(correct[data.test_mask].float().mean())]


def assert_equal_training(make: Callable[..., BasicGNN], data: Data, epochs: int) -> None:
    plain = train(make, data, epochs, dropout=0.0)
    with fastgraph.enabled():
        routed = train(make, data, epochs, dropout=0.0)
    assert all(row.fell_back == 0 for row in fastgraph.status().rows)
    # Rounding differences grow from step to step in float32.
    torch.testing.assert_close(routed[:-1], plain[:-1], rtol=2e-3, atol=2e-4)
    assert abs(routed[-1] - plain[-1]) < 0.01


# On the emulator attention takes minutes; its single steps are tested layer by layer.
SHORT = ("GCN", "SAGE-max")


@pytest.mark.parametrize("name", repeats_but(SHORT, MODELS))
def test_losses_step_by_step(name: str) -> None:
    assert_equal_training(MODELS[name], made_graph(), epochs=20)


# A layer of upstream takes seconds for the million edges of Tolokers.
@pytest.mark.parametrize(
    ("name", "graph"),
    [
        pytest.param(
            *given,
            marks=()
            if given[1] == "Cora" or given[0] in ("SAGE-max", "GATv2")
            else pytest.mark.exhaustive,
        )
        for given in itertools.product(MODELS, ["Cora", "Tolokers"])
    ],
)
def test_losses_step_by_step_on_real_graphs(name: str, graph: str, tmp_path: Path) -> None:
    data = real_graph(graph, tmp_path)
    assert_equal_training(MODELS[name], data, epochs=30 if graph == "Cora" else 2)


@pytest.mark.parametrize("name", ["GCN", "GAT", "GATv2"])
def test_accuracy_with_dropout(name: str, tmp_path: Path) -> None:
    data = real_graph("Cora", tmp_path)
    data.x = F.normalize(data.x, p=1.0)
    plain = train(MODELS[name], data, 100, dropout=0.5)
    with fastgraph.enabled():
        routed = train(MODELS[name], data, 100, dropout=0.5)
    assert min(routed[-1], plain[-1]) > 0.75
    # GAT's attention drops other edges than upstream's, as another seed would.
    assert abs(routed[-1] - plain[-1]) < (0.02 if name == "GCN" else 0.04)


def test_batches_of_small_graphs_from_forked_workers() -> None:
    torch.manual_seed(0)
    graphs = [
        Data(x=torch.randn(8, 16), edge_index=torch.randint(8, (2, 20)), y=torch.zeros(8).long())
        for _ in range(32)
    ]
    loader = DataLoader(graphs, batch_size=8, num_workers=2)
    model = GraphSAGE(16, 32, 2, 3, aggr="max")

    def losses() -> list[Tensor]:
        return [F.cross_entropy(model(b.x, b.edge_index), b.y) for b in loader]

    plain = losses()
    with fastgraph.enabled():
        routed = losses()
    assert fastgraph.status().rows[0].fell_back == 0
    torch.testing.assert_close(routed, plain)
