"""Kernels for tensor cores beside the reference, on tiles that the model would not make."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastgraph import Graph
from fastgraph.backends import reference
from fastgraph.backends.tiles import TilesAttention, TilesSpmm
from fastgraph.registry.registry import REGISTRY
from fastgraph.tune.tiles import DTYPES
from tests.graphs import hub_edges

NODES = 200


@pytest.fixture
def kernels(device: torch.device) -> tuple[Any, Any]:
    library = REGISTRY.backends[str(REGISTRY.selected)]._library  # type: ignore[attr-defined]
    return TilesSpmm(library), TilesAttention(library)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_check_before_they_take_part(
    kernels: tuple[Any, Any], dtype: torch.dtype, device: torch.device
) -> None:
    assert [kernel.error(device, dtype) <= 1 for kernel in kernels] == [True, True]


@pytest.mark.repeats  # on the emulator, tests/simt calls them with more graphs and widths
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [32, 64])
def test_results(
    kernels: tuple[Any, Any], width: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Forward and along the transpose, with weights, several heads, and the same bits again."""
    spmm, attention = kernels
    graph = Graph(hub_edges(NODES, 1200).to(device), NODES, NODES)  # windows of the hub are cut

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    x, weight = normal(NODES, 2 * width + 8), normal(graph.num_edges)
    addend = normal(NODES, 2, width)
    query, key, value = (normal(NODES, 2, width) / 4 for _ in range(3))
    options = (None, False, 0.25, 0.0, 0, False)
    for transpose in (False, True):
        found = spmm(graph, x, weight, "sum", transpose)
        exact = reference.spmm(graph, x.double(), weight.double(), "sum", transpose)
        size = reference.spmm(graph, x.double().abs(), weight.double().abs(), "sum", transpose)
        assert_near(found, exact, size)
        assert torch.equal(found, spmm(graph, x, weight, "sum", transpose))
    out, stats, _ = attention(graph, query, key, value, *options, addend=addend)
    wide = (query.double(), key.double(), value.double())
    exact, exact_stats, _ = reference.attention(graph, *wide, *options, addend=addend.double())
    assert_near(out, exact, exact.abs().amax().expand_as(exact))
    torch.testing.assert_close(stats.double(), exact_stats, rtol=1e-4, atol=1e-4)
    again, _, _ = attention(graph, query, key, value, *options, addend=addend)
    assert torch.equal(out, again)


def assert_near(found: Tensor, exact: Tensor, size: Tensor) -> None:
    """Off by roundings of factors, to tf32 or bfloat16, and of the result."""
    rounding = 2.0**-10 if found.dtype == torch.float32 else 2.0**-7
    assert bool(((found.double() - exact).abs() <= rounding * size + 1e-6).all())
