"""Products of each edge in programs, as ``benchmarks/any_message.py`` reports them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch_geometric.nn import EdgeConv

import fastgraph
from tests.cuda.benchmarks import measure

cells, report = measure("message_cells"), measure("message_report")


def test_configurations_are_told_apart_by_products_of_each_edge() -> None:
    assert cells.has_products("EdgeConv")
    assert not cells.has_products("GINEConv")


def test_multiplications_are_those_of_the_matrices_of_each_edge() -> None:
    torch.manual_seed(0)
    layer = EdgeConv(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 7)))
    with fastgraph.enabled(min_edges=0):
        layer(torch.randn(10, 3), torch.randint(10, (2, 60)))
    found = cells.multiplications(layer)
    assert found["forward"] == 5 * 7  # the first matrix is one of nodes
    assert found["backward"] >= 2 * 5 * 7  # of the gradients of its value and of the matrix


def test_what_products_allow_is_upstreams_time_over_that_of_the_products() -> None:
    times = {"plain": {"forward": {"median": 3.0}, "backward": {"median": 5.0}}}
    cell = {"products": True, "times": times, "edges": 1000, "product_gflops": 50.0}
    cell["multiplications"] = {"forward": 10_000, "backward": 40_000}
    assert report.at_most(cell) == pytest.approx(4)  # 0.1 GFLOP take 2 ms
    assert report.at_most({**cell, "products": False}) is None


def test_memory_is_at_most_below_by_what_results_take() -> None:
    x = torch.randn(30, 4)
    assert cells._bytes(([x, x[:10]], [torch.zeros(5), None])) == 4 * (120 + 5)
    cell = {"memory": {"plain": 2**20, "ours": 2**18, "results": 2**17}}
    assert report.times_below(cell) == 4 and report.times_below_at_most(cell) == 8
    assert report.times_below_at_most({"memory": {"plain": 2**20, "ours": 2**18}}) is None
