"""Graphs of PyG in any form give the same local nodes."""

from __future__ import annotations

import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.testing import MyFeatureStore, MyGraphStore

from fastgraph.pyg.token_graph import token_graph
from fastgraph.tokens import local_nodes
from fastgraph.tokens.graph_files import graph_of_edges

EDGES = torch.randint(0, 40, (2, 90), generator=torch.Generator().manual_seed(0))


def stores(layouts: list[str]) -> tuple[MyFeatureStore, MyGraphStore]:
    lists = graph_of_edges(EDGES, 44)
    store = MyGraphStore()
    for layout in layouts:
        index = {
            "csc": (lists.into.neighbors, lists.into.ptr),
            "csr": (lists.out.ptr, lists.out.neighbors),
            "coo": tuple(EDGES),
        }[layout]
        store.put_edge_index(
            index, edge_type=("a", "to", "a"), layout=layout, size=(44, 44), is_sorted=False
        )
    return MyFeatureStore(), store


@pytest.mark.parametrize("direction", ["in", "out", "both"])
def test_data_and_stores(direction: str) -> None:
    expected = local_nodes(EDGES, 8, num_nodes=44, direction=direction)
    layouts = {"in": ["csc"], "out": ["csr"], "both": ["csc", "csr"]}[direction]
    for graph in (
        Data(edge_index=EDGES, num_nodes=44),
        stores(layouts),
        stores(layouts)[1],
        stores(["coo"]),
    ):
        assert torch.equal(local_nodes(token_graph(graph), 8, direction=direction), expected)


def test_what_is_no_graph_of_one_type() -> None:
    with pytest.raises(TypeError, match="data must be"):
        token_graph(EDGES)
    with pytest.raises(ValueError, match="one type of edges"):
        token_graph(Data(x=torch.ones(3, 1)))
    data = HeteroData()
    data["a", "to", "a"].edge_index = EDGES
    data["a", "from", "a"].edge_index = EDGES
    with pytest.raises(ValueError, match="one type of edges"):
        token_graph(data)
