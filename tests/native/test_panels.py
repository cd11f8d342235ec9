"""Features that are gathered panel by panel give the bits that they give at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fastgraph.plugins.backend import FLOATING, accumulator

from .cases import GRAPHS, Sparse, make_graph, normal, transpose

# One line, some that do not divide the widths below, and more than there are.
CHANNELS = (1, 40, 64, 1000)
WIDTHS = (0, 1, 20, 33, 64, 200)


@pytest.fixture
def lib(lib: Any) -> Iterator[Any]:
    yield lib
    lib.force_panels(0)


def assert_same_bits(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        as_bits = torch.int64 if one.dtype == torch.float64 else torch.int32
        as_bits = torch.int16 if one.element_size() == 2 else as_bits
        assert torch.equal(one.view(as_bits), other.view(as_bits))


def filled(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def sums(lib: Any, graph: Sparse, dtype: torch.dtype, width: int, heads: int = 1) -> list[Tensor]:
    """With every kind of coefficients."""
    x = normal(graph.num_cols, heads * width, dtype=dtype)
    row_scale = normal(graph.num_rows, dtype=accumulator(dtype), seed=2)
    col_scale = normal(graph.num_cols, dtype=accumulator(dtype), seed=3)
    weight = normal(graph.num_edges, heads, dtype=dtype, seed=1)
    found = []
    for factors in [(None, None, None), (None, row_scale, col_scale), (weight, row_scale, None)]:
        found.append(filled(graph.num_rows, heads * width, dtype=dtype))
        lib.spmm(*graph.csr, *factors, x, found[-1])
    return found


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("name", [*GRAPHS, "mixed"])
def test_sums_have_the_same_bits(lib: Any, name: str, dtype: torch.dtype) -> None:
    graph = make_graph(lib, name)
    for width in WIDTHS:
        lib.force_panels(-1)
        expected = sums(lib, graph, dtype, width)
        assert not any(bool(t.isnan().any()) for t in expected)
        for channels in CHANNELS:
            lib.force_panels(channels)
            assert_same_bits(sums(lib, graph, dtype, width), expected)


def test_gradients_have_the_same_bits(lib: Any) -> None:
    """Those of sums are sums along the transpose, whose edges are not in the order of entries."""
    graph = transpose(lib, make_graph(lib, "hub"))
    lib.force_panels(-1)
    expected = sums(lib, graph, torch.float32, 100) + sums(lib, graph, torch.float32, 20, heads=3)
    lib.force_panels(32)
    found = sums(lib, graph, torch.float32, 100) + sums(lib, graph, torch.float32, 20, heads=3)
    assert_same_bits(found, expected)


def test_results_do_not_depend_on_threads(lib: Any) -> None:
    graph = make_graph(lib, "hub")
    lib.force_panels(32)
    runs = []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        runs.append(sums(lib, graph, torch.float32, 96))
    for run in runs[1:]:
        assert_same_bits(run, runs[0])


def test_large_results_are_written_past_the_caches(lib: Any) -> None:
    """Their stores need aligned memory, wherever a panel begins."""
    rows, width = 70_000, 64  # more than 16 MiB
    row = torch.arange(rows)
    ptr = torch.arange(rows + 1)
    graph = Sparse(row, row % 10, rows, 10, ptr, (row % 10).int(), None)
    x = normal(10, width, dtype=torch.float32)
    lib.force_panels(1)
    out = filled(rows, width, dtype=torch.float32)
    lib.spmm(*graph.csr, None, None, None, x, out)
    assert torch.equal(out, x[graph.col])


MIB = 2**20


@pytest.mark.parametrize(
    ("nodes", "edges", "channels", "item_bytes", "cache", "expected"),
    [
        (11_758, 1_049_758, 256, 4, 2 * MIB, 64),  # tolokers
        (11_758, 1_049_758, 256, 8, 2 * MIB, 32),
        (11_758, 1_049_758, 256, 4, MIB, 32),
        (11_758, 1_049_758, 256, 4, 0, 0),  # the system does not tell
        (11_758, 1_049_758, 256, 2, 2 * MIB, 0),  # fits a few caches
        (11_758, 200_000, 256, 4, 2 * MIB, 0),  # rows are gathered too seldom
        (25_000, 10_000_000, 256, 4, 2 * MIB, 0),  # panels would be too narrow
        (0, 0, 256, 4, 2 * MIB, 0),
        (100, 10_000, 0, 4, 0, 0),
    ],
)
def test_panels_are_taken_where_they_pay(
    best: Any, nodes: int, edges: int, channels: int, item_bytes: int, cache: int, expected: int
) -> None:
    assert best.panel_channels(nodes, nodes, edges, channels, item_bytes, cache, 0) == expected


@pytest.mark.parametrize(
    ("nodes", "edges", "heads", "channels", "cache", "expected"),
    [
        (11_758, 1_049_758, 8, 32, 2 * MIB, 32),  # tolokers
        (11_758, 1_049_758, 1, 256, 2 * MIB, 64),
        (11_758, 1_049_758, 1, 256, MIB, 64),  # of more caches, if these are small
        (11_758, 1_049_758, 1, 256, MIB // 2, 32),
        (11_758, 1_049_758, 8, 7, 2 * MIB, 7),
        (11_758, 1_049_758, 8, 32, 0, 0),  # the system does not tell
        (11_758, 150_000, 1, 32, 2 * MIB, 0),  # rows are short
        (40_000, 1_000_000, 1, 16, 2 * MIB, 16),
        (40_000, 1_000_000, 3, 16, 2 * MIB, 16),
        (40_000, 1_000_000, 4, 16, 2 * MIB, 0),  # vectors hold four heads
        (40_000, 1_000_000, 40, 16, 2 * MIB, 16),  # more heads than rows are taken with
        (40_000, 1_000_000, 1, 32, 2 * MIB, 0),  # a line would not do
        (0, 0, 8, 32, 2 * MIB, 0),
    ],
)
def test_heads_are_taken_one_by_one_where_that_pays(
    best: Any, nodes: int, edges: int, heads: int, channels: int, cache: int, expected: int
) -> None:
    assert best.panel_channels(nodes, nodes, edges, channels, 4, cache, heads) == expected


def test_sizes_are_checked(best: Any) -> None:
    with pytest.raises(ValueError, match="item_bytes must be in"):
        best.panel_channels(10, 10, 100, 64, 0, MIB, 0)
    with pytest.raises(ValueError, match="cache_bytes"):
        best.panel_channels(10, 10, 100, 64, 4, -1, 0)
    with pytest.raises(ValueError, match="heads"):
        best.panel_channels(10, 10, 100, 64, 4, MIB, -1)
