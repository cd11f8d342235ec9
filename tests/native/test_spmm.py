from __future__ import annotations

from typing import Any

import pytest
import torch

from fastgraph.plugins.backend import FLOATING, accumulator

from .cases import (
    GRAPHS,
    WIDTHS,
    assert_close,
    make_graph,
    normal,
    spmm_reference,
    transpose,
)


@pytest.mark.parametrize("factors", ["none", "weight", "scales", "all"])
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("name", [*GRAPHS, "mixed"])
def test_spmm_matches_float64(lib: Any, name: str, dtype: torch.dtype, factors: str) -> None:
    graph = make_graph(lib, name)
    weight = normal(graph.num_edges, dtype=dtype, seed=1)
    row_scale = normal(graph.num_rows, dtype=accumulator(dtype), seed=2)
    col_scale = normal(graph.num_cols, dtype=accumulator(dtype), seed=3)
    used = (
        weight if factors in ("weight", "all") else None,
        row_scale if factors in ("scales", "all") else None,
        col_scale if factors in ("scales", "all") else None,
    )
    for width in WIDTHS:
        x = normal(graph.num_cols, width, dtype=dtype)
        out = torch.full((graph.num_rows, width), float("nan"), dtype=dtype)
        lib.spmm(*graph.csr, *used, x, out)
        magnitude = spmm_reference(graph, x.abs(), *(u if u is None else u.abs() for u in used))
        assert_close(out, spmm_reference(graph, x, *used), magnitude)


@pytest.mark.parametrize("dtype", FLOATING)
def test_spmm_over_the_transpose(lib: Any, dtype: torch.dtype) -> None:
    graph = make_graph(lib, "hub")
    flipped = transpose(lib, graph)
    weight = normal(graph.num_edges, dtype=dtype, seed=1)
    x = normal(graph.num_rows, 48, dtype=dtype)
    out = torch.empty(graph.num_cols, 48, dtype=dtype)
    lib.spmm(*flipped.csr, weight, None, None, x, out)
    magnitude = spmm_reference(flipped, x.abs(), weight.abs())
    assert_close(out, spmm_reference(flipped, x, weight), magnitude)


@pytest.mark.parametrize("dtype", FLOATING)
def test_spmm_propagates_nan_and_infinity(lib: Any, dtype: torch.dtype) -> None:
    graph = make_graph(lib, "random")
    x = normal(graph.num_cols, 20, dtype=dtype)
    x[3, 4], x[5, 6], x[7, 8] = float("nan"), float("inf"), float("-inf")
    out = torch.empty(graph.num_rows, 20, dtype=dtype)
    lib.spmm(*graph.csr, None, None, None, x, out)
    expected = spmm_reference(graph, x)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.isinf(), expected.isinf())


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("name", [*GRAPHS, "mixed"])
def test_sddmm_matches_float64(lib: Any, name: str, dtype: torch.dtype) -> None:
    graph = make_graph(lib, name)
    row_scale = normal(graph.num_rows, dtype=accumulator(dtype), seed=2)
    for width in WIDTHS:
        x = normal(graph.num_cols, width, dtype=dtype)
        grad = normal(graph.num_rows, width, dtype=dtype, seed=4)
        for scale in (None, row_scale):
            out = torch.full((graph.num_edges,), float("nan"), dtype=dtype)
            lib.sddmm(*graph.csr, scale, grad, x, out)
            products = grad.double()[graph.row] * x.double()[graph.col]
            if scale is not None:
                products = products * scale.double()[graph.row, None]
            assert_close(out, products.sum(1), products.abs().sum(1))


HEADS = ((1, 20), (2, 3), (3, 8), (4, 16), (4, 64), (8, 32), (5, 33), (40, 1))


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("name", [*GRAPHS, "mixed"])
def test_heads_match_float64(lib: Any, name: str, dtype: torch.dtype) -> None:
    graph = make_graph(lib, name)
    row_scale = normal(graph.num_rows, dtype=accumulator(dtype), seed=2)
    col_scale = normal(graph.num_cols, dtype=accumulator(dtype), seed=3)
    for heads, channels in HEADS:
        width = heads * channels
        weight = normal(graph.num_edges, heads, dtype=dtype, seed=1)
        x = normal(graph.num_cols, width, dtype=dtype)
        grad = normal(graph.num_rows, width, dtype=dtype, seed=4)
        out = torch.full((graph.num_rows, width), float("nan"), dtype=dtype)
        for scales in ((None, None), (row_scale, col_scale)):
            used = (weight, *scales)
            lib.spmm(*graph.csr, *used, x, out)
            magnitude = spmm_reference(graph, x.abs(), *(u if u is None else u.abs() for u in used))
            assert_close(out, spmm_reference(graph, x, *used), magnitude)
        product = torch.full((graph.num_edges, heads), float("nan"), dtype=dtype)
        lib.sddmm(*graph.csr, row_scale, grad, x, product)
        terms = grad.double()[graph.row] * x.double()[graph.col]
        terms = (terms * row_scale.double()[graph.row, None]).view(graph.num_edges, heads, channels)
        assert_close(product, terms.sum(2), terms.abs().sum(2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 5, 8, 16])
def test_every_half_value_converts_as_in_torch(lib: Any, dtype: torch.dtype, width: int) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    x = every[:, None].expand(-1, width).contiguous()
    rows = torch.arange(2**16)
    rowptr, col = torch.arange(2**16 + 1), rows.int()
    out = torch.empty_like(x)
    lib.spmm(rowptr, col, None, 1, None, None, None, None, x, out)
    assert torch.equal(out.isnan(), x.isnan())
    same = ~x.isnan()
    # An empty sum is +0, so -0 + 0 is +0.
    assert torch.equal((out + 0.0)[same], (x + 0.0)[same])

    scale = torch.tensor([1.0, 0.999, 1.001, 3.0, 1e-3, 0.5])
    for factor in scale:
        row_scale = factor.expand(2**16).contiguous()
        lib.spmm(rowptr, col, None, 1, None, None, row_scale, None, x, out)
        expected = (x.float() * factor).to(dtype)
        assert torch.equal(out[same] + 0.0, expected[same] + 0.0)
