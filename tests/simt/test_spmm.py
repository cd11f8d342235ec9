"""The CUDA spmm, executed by the emulator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastgraph.graphs.graph import Graph
from fastgraph.plugins.backend import FLOATING
from tests.native.cases import assert_close, normal
from tests.simt.compared import (
    CASES,
    LOOP,
    WIDER_THAN_A_GRID,
    WIDTHS,
    assert_same,
    assert_same_in_every_order,
    cpu,
    graph_of,
    irregular,
    misaligned,
    simt,
)


def check(graph: Graph, x: Tensor, weight: Tensor | None, reduce: str) -> None:
    out = simt("spmm", graph, x, weight, reduce, False)
    wide = [None if t is None else t.double() for t in (x, weight)]
    magnitudes = [None if t is None else t.abs() for t in wide]
    expected = cpu("spmm", graph, *wide, reduce, False)
    assert_close(out, expected, cpu("spmm", graph, *magnitudes, reduce, False))


@pytest.mark.parametrize("name", CASES)
def test_every_graph(name: str) -> None:
    graph = graph_of(name)
    x = normal(graph.num_src, 20, dtype=torch.float32)
    check(graph, x, None, "sum")
    check(graph, x, normal(graph.num_edges, dtype=torch.float32, seed=1), "mean")


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_layout(width: int, dtype: torch.dtype) -> None:
    for name, reduce in (("random", "mean_adjoint"), ("cut", "sum")):
        graph = graph_of(name)
        x = normal(graph.num_src, width, dtype=dtype)
        check(graph, x, normal(graph.num_edges, dtype=dtype, seed=1), reduce)


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_that_are_not_cut_are_added_up_as_on_the_cpu(width: int, dtype: torch.dtype) -> None:
    graph = graph_of("random")
    given = (graph, normal(graph.num_src, width, dtype=dtype), None, "sum", False)
    assert_same(simt("spmm", *given), cpu("spmm", *given))


@pytest.mark.parametrize("name", ["random", "cut"])
def test_memory_that_is_not_aligned(name: str) -> None:
    graph = graph_of(name)
    x = normal(graph.num_src, 64, dtype=torch.float32)
    weight = normal(graph.num_edges, dtype=torch.float32, seed=1)
    check(graph, misaligned(x), weight, "sum")
    check(graph, x, misaligned(weight), "sum")


@pytest.mark.parametrize("width", [33, 64])
def test_bits_do_not_depend_on_the_order_of_threads(width: int) -> None:
    graph = graph_of("hub")
    x = normal(graph.num_src, width, dtype=torch.float32)
    weight = normal(graph.num_edges, dtype=torch.float32, seed=1)
    assert_same_in_every_order("spmm", graph, x, weight, "sum", False)


@pytest.mark.parametrize("width", [5, 8])
@pytest.mark.parametrize("name", ["random", "isolated", "cut"])
def test_infinities_reach_what_they_reach_on_the_cpu(name: str, width: int) -> None:
    graph = graph_of(name)
    x = irregular(graph.num_src, width, dtype=torch.float32)
    weights = irregular(graph.num_edges, dtype=torch.float32, seed=1)
    for weight in (None, weights):
        given = (graph, x, weight, "sum", False)
        out, expected = simt("spmm", *given), cpu("spmm", *given)
        assert_same(out.where(~out.isfinite(), 0), expected.where(~expected.isfinite(), 0))


def test_infinite_weights_meet_no_zeros_that_are_not_there() -> None:
    graph = graph_of("random")
    given = (graph, torch.ones(12, 4), torch.full((graph.num_edges,), float("inf")), "sum", False)
    assert not simt("spmm", *given).isnan().any()


def test_wider_than_a_grid() -> None:
    given = (LOOP, normal(1, WIDER_THAN_A_GRID, dtype=torch.float32), None, "sum", False)
    assert_same(simt("spmm", *given), cpu("spmm", *given))


def test_rows_whose_addresses_would_overflow_are_refused() -> None:
    graph = Graph(torch.zeros(2, 0, dtype=torch.int64), 0, 0)
    with pytest.raises(ValueError, match="must have rows of at most 2147483647 bytes"):
        simt("spmm", graph, torch.empty(0, 2**29), None, "sum", False)
