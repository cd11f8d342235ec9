"""How full tiles would be, and whether that is enough, is known before any are made."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fastgraph import Graph
from fastgraph.graphs.tiles import blocks_of, tiles_of
from fastgraph.tune.gpus import SHEETS, sheet_of
from fastgraph.tune.tiles import (
    Fill,
    Product,
    by_rows,
    by_tiles,
    predict_fill,
    why_not_attention,
    why_not_tiles,
    width_of_attention,
)
from tests.graphs import hub_edges, random_edges

NODES = 40_000  # 2,500 windows, of which 1,024 are drawn


def cliques(num_nodes: int, size: int) -> Tensor:
    """Every node has edges from all of its ``size`` neighbours in the order of numbers."""
    node = torch.arange(num_nodes).repeat_interleave(size)
    return torch.stack([node // size * size + torch.arange(size).repeat(num_nodes), node])


def fill_of(edge_index: Tensor, num_nodes: int, seed: int = 0) -> Fill:
    return predict_fill(Graph(edge_index, num_nodes, num_nodes).by_destination, seed=seed)


def test_cliques_fill_their_blocks() -> None:
    fill = fill_of(cliques(NODES, 16), NODES)
    assert fill.edges == pytest.approx(128)
    assert fill.columns == pytest.approx(1 / 16)
    assert 40 < fill.low < 128 == fill.high and fill.windows < 1025


def test_random_edges_do_not() -> None:
    fill = fill_of(random_edges(NODES, NODES, 20 * NODES), NODES)
    assert 7 < fill.low < fill.edges < 8.1 < fill.high < 9
    assert fill.columns > 0.99


def test_small_graphs_are_looked_at_as_a_whole() -> None:
    graph = Graph(hub_edges(5000, 40_000), 5000, 5000)
    fill = predict_fill(graph.by_destination)
    tiles = tiles_of(graph.by_destination, 5000)
    assert fill.low == fill.high == pytest.approx(tiles.fill)
    packed = int((tiles.col >= 0).sum())
    assert fill.columns == fill.most_columns == pytest.approx(packed / graph.num_edges)
    assert fill_of(torch.zeros(2, 0, dtype=torch.int64), 3) == Fill(0, 0, 0, 0, 0, 0)
    assert fill_of(torch.zeros(2, 0, dtype=torch.int64), 0) == Fill(0, 0, 0, 0, 0, 0)


def test_the_bound_holds_where_windows_differ() -> None:
    """Cliques, a random graph and a hub side by side."""
    others = random_edges(NODES, NODES // 2, 4 * NODES) + torch.tensor([[0], [NODES // 2]])
    hub = torch.stack([torch.arange(NODES), torch.full((NODES,), NODES - 1)])
    graph = Graph(torch.cat([cliques(NODES // 2, 16), others, hub], 1), NODES, NODES)
    true = tiles_of(graph.by_destination, NODES).fill
    found = [predict_fill(graph.by_destination, seed=seed) for seed in range(20)]
    assert all(fill.low <= true <= fill.high for fill in found)
    assert all(abs(fill.edges / true - 1) < 0.15 for fill in found)
    assert len({fill.edges for fill in found}) == 20
    assert predict_fill(graph.by_destination, seed=3) == found[3]


@pytest.mark.parametrize("name", ["cora", "tolokers", "wing", "wordnet", "debian"])
def test_real_graphs(name: str) -> None:
    if not os.environ.get("FASTGRAPH_DATA"):
        pytest.skip("FASTGRAPH_DATA is not set")
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    from measure.graphs import load

    data = load(name)
    graph = Graph(data.edge_index, data.num_nodes, data.num_nodes)
    windows = torch.arange(-(-data.num_nodes // 16), dtype=torch.int32)
    true = graph.num_edges / int(blocks_of(graph.by_destination, windows).sum())
    fill = predict_fill(graph.by_destination)
    assert fill.low * (1 - 1e-12) <= true <= fill.high * (1 + 1e-12)
    assert fill.edges == pytest.approx(true, rel=0.1)
    product = Product(data.num_nodes, data.num_nodes, graph.num_edges, 256, torch.bfloat16, False)
    fitting = [sheet.name for sheet in SHEETS if why_not_tiles(product, fill, sheet) is None]
    assert fitting == (["H200", "A100"] if name == "debian" else [])


def product(dtype: torch.dtype = torch.bfloat16, width: int = 128) -> Product:
    return Product(NODES, NODES, 16 * NODES, width, dtype, False)


FULL = Fill(128, 100, 128, 1 / 16, 1 / 12, 1024)
SPARSE = Fill(8, 7.5, 8.5, 1.0, 1.0, 1024)


def test_tiles_are_for_graphs_that_fill_them() -> None:
    for sheet in SHEETS:
        assert why_not_tiles(product(), FULL, sheet) is None
        why_not = why_not_tiles(product(), SPARSE, sheet)
        assert (
            why_not is not None
            and f"8.0 edges to a block of 128 are too few: on {sheet.name}" in why_not
        )


def test_float32_is_not_for_tensor_cores() -> None:
    why_not = why_not_tiles(product(torch.float32), FULL, SHEETS[0])
    assert why_not is not None and "allow_tf32 does not allow" in why_not


@pytest.mark.usefixtures("tf32_allowed")
def test_tiles_are_for_what_tensor_cores_add_up() -> None:
    sheet = SHEETS[0]
    why_not = why_not_tiles(product(torch.float64), FULL, sheet)
    assert why_not is not None and "torch.float64" in why_not
    assert why_not_tiles(product(torch.float32), FULL, sheet) is None


def test_times_by_hand() -> None:
    h200 = sheet_of("NVIDIA H200")
    assert h200 is not None
    edges, row = 16 * NODES, 256
    # All rows fit the second cache, from which each edge reads one and 4 bytes.
    rows = by_rows(product(), h200)
    assert rows == pytest.approx(edges * (row + 4) / 6500e6)
    beside = edges / 100 * 56
    assert by_tiles(product(), FULL, h200) == pytest.approx(
        max(
            (edges / 12 * row + beside) / 6500e6,
            (2 * NODES * row + beside) / 4300e6,
            edges / 100 * 2 * 128 * 128 / 989e9,
        )
    )
    weighted = product()._replace(has_weights=True)
    assert by_rows(weighted, h200) == pytest.approx(edges * (row + 4 + 36) / 6500e6)
    assert math.isfinite(by_tiles(weighted, SPARSE, h200))


def test_attention_is_a_sum_of_keys_and_values() -> None:
    key = torch.empty(5, 2, 64)
    assert width_of_attention(key) == 256
    assert why_not_attention(key, False, 0.0, False) is None
    for arguments, message in (
        ((key, True, 0.0, False), "edges must have no features"),
        ((key, False, 0.5, False), "drops no edges"),
        ((key, False, 0.0, True), "gives no weights"),
        ((key.double(), False, 0.0, False), "at most 256 bytes on tiles, got 512"),
    ):
        why_not = why_not_attention(*arguments)
        assert why_not is not None and message in why_not
