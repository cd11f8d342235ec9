"""Graphs with their nodes in another order."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.nn import GATv2Conv, TransformerConv

import fastgraph
from fastgraph.reordering import ORDERS
from tests.dist.test_partition import SIZES, communities

# Of values about one, whose sums are taken in another order.
TOLERANCE = 1e-12


def graph(num_nodes: int = sum(SIZES)) -> Data:
    edges = communities()
    torch.manual_seed(0)
    return Data(
        x=torch.randn(num_nodes, 5, dtype=torch.float64),
        y=torch.arange(num_nodes),
        train_mask=torch.arange(num_nodes) % 3 == 0,
        edge_index=edges,
        edge_attr=torch.randn(edges.shape[1], 2, dtype=torch.float64),
        edge_label_index=torch.randint(0, num_nodes, (2, 7), dtype=torch.int32),
        edge_label=torch.arange(7),
        name="of a test",
    )


def mean_span(edges: Tensor) -> float:
    """How far apart the ends of an edge are."""
    return float((edges[0] - edges[1]).abs().double().mean())


@pytest.fixture(params=[*ORDERS, "given"])
def order(request: pytest.FixtureRequest) -> Any:
    if request.param == "cluster":
        pytest.importorskip("pymetis")
    return torch.randperm(sum(SIZES)) if request.param == "given" else request.param


def test_layers_give_the_same_rows_in_another_order(order: Any) -> None:
    data = graph()
    found, permutation, inverse = fastgraph.reorder(data, order)
    assert torch.equal(permutation[inverse], torch.arange(len(data.x)))
    for layer in (
        GATv2Conv(5, 4, heads=2, edge_dim=2).double(),
        TransformerConv(5, 4, heads=2, edge_dim=2).double(),
    ):
        expected = layer(data.x, data.edge_index, data.edge_attr)
        with fastgraph.enabled():
            out = layer(found.x, found.edge_index, found.edge_attr)
        assert float((out[inverse] - expected).detach().abs().max()) < TOLERANCE


def test_what_belongs_to_nodes_moves_with_them(order: Any) -> None:
    data = graph()
    found, permutation, inverse = fastgraph.reorder(data, order)
    for key in ("x", "y", "train_mask"):
        assert torch.equal(found[key], data[key][permutation]), key
    for key in ("edge_index", "edge_label_index"):
        assert found[key].dtype == data[key].dtype
        assert torch.equal(found.y[found[key].long()], data.y[data[key].long()]), key
        assert torch.equal(inverse[data[key].long()], found[key].long()), key
    for key in ("edge_attr", "edge_label"):
        assert torch.equal(found[key], data[key]), key
    assert found.name == data.name
    assert torch.equal(graph().edge_index, data.edge_index)


def test_as_many_pairs_as_nodes() -> None:
    """PyG takes them for something of nodes, by their number."""
    data = graph()
    data.edge_label_index = torch.randint(0, len(data.x), (2, len(data.x)))
    data.face = torch.randint(0, len(data.x), (3, len(data.x)))
    found, _, inverse = fastgraph.reorder(data, torch.randperm(len(data.x)))
    assert torch.equal(found.edge_label_index, inverse[data.edge_label_index])
    assert torch.equal(found.face, inverse[data.face])


def test_lists_and_arrays_of_nodes() -> None:
    data = Data(edge_index=torch.tensor([[0, 1], [1, 3]]), x=torch.arange(4.0).view(4, 1))
    data.names, data.pair, data.table = list("abcd"), ["e", "f"], np.arange(8).reshape(4, 2)
    data.kinds = tuple("ghij")
    found = fastgraph.reorder(data, torch.tensor([2, 0, 3, 1])).data
    assert found.names == list("cadb") and found.kinds == tuple("igjh") and found.pair == data.pair
    assert found.table.tolist() == [[4, 5], [0, 1], [6, 7], [2, 3]]


def test_a_graph_keeps_its_number_of_nodes() -> None:
    """PyG guesses it from edges where nothing else has it, and their largest number moves."""
    data = Data(edge_index=torch.tensor([[0, 9], [9, 0]]))
    found = fastgraph.reorder(data, torch.arange(10).roll(5)).data
    assert found.edge_index.tolist() == [[5, 4], [4, 5]]
    assert data.num_nodes == found.num_nodes == 10


def test_clusters_stand_together() -> None:
    pytest.importorskip("pymetis")
    size, number = 30, torch.randperm(4 * 30)
    within = torch.cat([torch.randint(i * size, (i + 1) * size, (2, 300)) for i in range(4)], 1)
    edges = number[torch.cat([within, torch.arange(3) * size + torch.tensor([[0], [size]])], 1)]
    data = Data(edge_index=edges, num_nodes=4 * size)
    found = fastgraph.reorder(data, num_clusters=4).data
    cluster = found.edge_index // size
    assert int((cluster[0] != cluster[1]).sum()) == 3
    assert mean_span(found.edge_index) < 0.5 * mean_span(edges)


def test_a_path_is_found_by_reverse_cuthill_mckee() -> None:
    number = torch.randperm(50)
    edges = torch.stack([number[:-1], number[1:]])
    found = fastgraph.reorder(Data(edge_index=edges, num_nodes=50), "rcm")
    assert mean_span(found.data.edge_index) == 1


def test_most_neighbours_come_first() -> None:
    data = graph()
    found = fastgraph.reorder(data, "degree").data
    degree = torch.bincount(found.edge_index.flatten(), minlength=len(data.x))
    assert bool((degree.diff() <= 0).all())


@pytest.mark.parametrize("order", ORDERS)
def test_a_graph_without_edges(order: str) -> None:
    data = Data(x=torch.randn(4, 1), edge_index=torch.empty(2, 0, dtype=torch.int64))
    assert sorted(fastgraph.reorder(data, order).permutation.tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": "random"}, "order must be one of ['cluster', 'rcm', 'degree'] or a permutation"),
        ({"order": torch.arange(3)}, "order must be a permutation of 120 nodes, int64 [120], got"),
        ({"order": torch.zeros(120).long()}, "order must be a permutation of 120 nodes"),
        ({"order": "rcm", "num_clusters": 2}, "got 2 with 'rcm'"),
        ({"num_clusters": 0}, "num_clusters: expected an integer of at least 1 or None, got 0"),
        ({"num_clusters": "2"}, "num_clusters: expected an integer of at least 1 or None, got '2'"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        fastgraph.reorder(graph(), **options)


def test_bad_graphs() -> None:
    with pytest.raises(TypeError, match="must be a Data of PyG, got HeteroData"):
        fastgraph.reorder(HeteroData())
    with pytest.raises(TypeError, match="data must be one graph, got a batch"):
        fastgraph.reorder(Batch.from_data_list([graph(), graph()]))
    with pytest.raises(ValueError, match=re.escape("edge_index must be [2, E]")):
        fastgraph.reorder(Data(x=torch.ones(3, 1)))
    data = graph()
    data.edge_label_index[0, 0] = 120
    with pytest.raises(ValueError, match="edge_label_index must name nodes from 0 to 119"):
        fastgraph.reorder(data)
    data = graph()
    data.adj_t = torch.eye(120).to_sparse_csr()
    with pytest.raises(TypeError, match="adj_t is a sparse matrix"):
        fastgraph.reorder(data)
