"""Tiles hold every edge once, and files of them are read again or refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastgraph import Graph
from fastgraph.graphs.tiles import packed_columns, tiles_of
from tests.graphs import hub_edges, random_edges

# Rows 0, 1, 15, 16 and 50 of 60, with an edge three times, self-loops, and column 9 in two windows.
EDGES = torch.tensor(
    [
        [9, 9, 9, 1, 15, 2, 3, 4, 5, 6, 7, 8, 9, 30, 0],
        [0, 0, 0, 1, 15, 1, 1, 1, 1, 1, 1, 1, 16, 16, 50],
    ]
)


def test_tiles_by_hand() -> None:
    graph = Graph(EDGES, 40, 60)
    tiles = tiles_of(graph.by_destination, graph.num_src)
    assert tiles.ptr.tolist() == [0, 2, 3, 3, 4]
    # Window 0 has column 9 three times, since one of its rows has it three times.
    assert tiles.col.tolist() == [
        *(1, 2, 3, 4, 5, 6, 7, 8),
        *(9, 9, 9, 15, -1, -1, -1, -1),
        *(9, 30, -1, -1, -1, -1, -1, -1),
        *(0, -1, -1, -1, -1, -1, -1, -1),
    ]
    assert tiles.first.tolist() == [0, 8, 12, 14, 15]
    assert tiles.bits[0].tolist() == [0xFF00, 0]
    assert tiles.bits[1].tolist() == [0b111, 0b1000 << 56]  # rows 0 and 15
    assert tiles.edge_id.tolist() == [3, 5, 6, 7, 8, 9, 10, 11, 0, 1, 2, 4, 12, 13, 14]
    assert tiles.fill == 15 / 4


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("edge_index", [random_edges(300, 330, 9000), hub_edges(100, 40_000)])
def test_every_edge_has_a_slot_of_its_own(edge_index: Tensor, threads: int) -> None:
    graph = Graph(edge_index, 300, 330)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        tiles = tiles_of(graph.by_source, graph.num_dst)
    finally:
        torch.set_num_threads(before)
    row, column = tiles.slots()
    edge = tiles.edge_id.long()
    assert torch.equal(edge.sort().values, torch.arange(edge_index.shape[1]))
    assert torch.equal(row, edge_index[0][edge])
    assert torch.equal(tiles.col[column].long(), edge_index[1][edge])
    assert tiles.nbytes == sum(t.nbytes for t in tiles[:5])
    again = tiles_of(graph.by_source, graph.num_dst)
    assert all(torch.equal(a, b) for a, b in zip(tiles[:5], again[:5], strict=True))


@pytest.mark.parametrize(("num_src", "num_dst"), [(0, 0), (3, 0), (0, 40), (4, 40)])
def test_graphs_without_edges(num_src: int, num_dst: int) -> None:
    graph = Graph(torch.empty(2, 0, dtype=torch.int64), num_src, num_dst)
    tiles = tiles_of(graph.by_destination, num_src)
    assert tiles.num_blocks == 0 and tiles.fill == 0 and tiles.first.tolist() == [0]


def test_what_cannot_be_made_into_tiles() -> None:
    rows = Graph(EDGES, 40, 60).by_destination
    with pytest.raises(ValueError, match="rows must be in ascending order"):
        tiles_of(rows._replace(order=torch.arange(60, dtype=torch.int32)), 40)
    with pytest.raises(IndexError, match="windows holds 4 at position 1, expected 0 <= window < 4"):
        packed_columns(rows, torch.tensor([0, 4], dtype=torch.int32))
    with pytest.raises(TypeError, match="windows must be int32, got int64"):
        packed_columns(rows, torch.tensor([0]))
