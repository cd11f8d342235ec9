"""The CUDA sddmm, executed by the emulator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastgraph.graphs.graph import Graph
from fastgraph.plugins.backend import FLOATING
from tests.native.cases import assert_close, normal
from tests.simt.compared import (
    CASES,
    WIDTHS,
    assert_same,
    assert_same_in_every_order,
    cpu,
    graph_of,
    irregular,
    misaligned,
    simt,
)


def check(graph: Graph, grad: Tensor, x: Tensor, reduce: str) -> None:
    out = simt("sddmm", graph, grad, x, 1, reduce, False)
    expected = cpu("sddmm", graph, grad.double(), x.double(), 1, reduce, False)
    magnitude = cpu("sddmm", graph, grad.double().abs(), x.double().abs(), 1, reduce, False)
    assert_close(out, expected, magnitude)


def inputs(graph: Graph, width: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    grad = normal(graph.num_dst, width, dtype=dtype)
    return grad, normal(graph.num_src, width, dtype=dtype, seed=1)


@pytest.mark.parametrize("reduce", ["sum", "mean", "mean_adjoint"])
@pytest.mark.parametrize("name", CASES)
def test_every_graph(name: str, reduce: str) -> None:
    graph = graph_of(name)
    check(graph, *inputs(graph, 20), reduce)


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_layout(width: int, dtype: torch.dtype) -> None:
    for name, reduce in (("random", "sum"), ("cut", "mean")):
        graph = graph_of(name)
        check(graph, *inputs(graph, width, dtype), reduce)


def test_memory_that_is_not_aligned() -> None:
    graph = graph_of("random")
    grad, x = inputs(graph, 64)
    check(graph, misaligned(grad), x, "sum")
    check(graph, grad, misaligned(x), "sum")


@pytest.mark.parametrize("width", [3, 64])
def test_entries_with_many_empty_rows_between_them(width: int) -> None:
    dst = torch.tensor([0, 700, 700, 701, 2999] + [3000] * 40 + [5000, 5998])
    graph = Graph(torch.stack([dst % 7, dst]), 7, 6000)
    check(graph, *inputs(graph, width), "sum")


@pytest.mark.parametrize("width", [33, 64])
def test_bits_do_not_depend_on_the_order_of_threads(width: int) -> None:
    graph = graph_of("cut")
    assert_same_in_every_order("sddmm", graph, *inputs(graph, width), 1, "sum", False)


@pytest.mark.parametrize("width", [5, 8])
def test_infinities_reach_what_they_reach_on_the_cpu(width: int) -> None:
    graph = graph_of("random")
    grad = irregular(graph.num_dst, width, dtype=torch.float32, seed=1)
    given = (graph, grad, irregular(graph.num_src, width, dtype=torch.float32), 1, "sum", False)
    out, expected = simt("sddmm", *given), cpu("sddmm", *given)
    assert expected.isfinite().any() and expected.isnan().any()
    assert_same(out.where(~out.isfinite(), 0), expected.where(~expected.isfinite(), 0))
