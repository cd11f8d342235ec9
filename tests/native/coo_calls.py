"""Valid calls of the native functions for edges that are not grouped, and checks of results."""

from __future__ import annotations

from typing import Any

import torch

from fastgraph.plugins.backend import accumulator
from tests.native.drawing import Draw, Library, Prepared, assert_equal


def check_edges(lib: Library, draw: Draw) -> Prepared:
    row, col, num_rows, num_cols = draw.edges()
    dtype = draw.index_dtype()
    call = {
        "source": draw.indices(col, dtype),
        "destination": draw.indices(row, dtype),
        "num_sources": num_cols,
        "num_destinations": num_rows,
    }
    return call, lambda _: None


def spmm_coo(lib: Library, draw: Draw) -> Prepared:
    row, col, num_rows, num_cols = draw.edges()
    index_dtype, dtype = draw.index_dtype(), draw.element()
    width, transpose, scale = draw.one_of(1, 2, 3, 4, 7, 8), draw.flag(), accumulator(dtype)
    weight = draw.maybe(draw.features(dtype, row.numel()))
    inverse_degree = draw.maybe(torch.full((num_rows,), 77.0, dtype=scale))
    col_scale = draw.maybe(draw.powers(scale, num_cols))
    x = draw.features(dtype, num_cols, width)
    special = draw.with_specials(x)
    out = torch.full((num_rows, width), 77.0, dtype=dtype)
    ends = draw.indices(col, index_dtype), draw.indices(row, index_dtype)
    call = {
        "source": ends[int(transpose)],
        "destination": ends[int(not transpose)],
        "transpose": transpose,
        "is_checked": False,
        "weight": weight,
        "inverse_degree": inverse_degree,
        "col_scale": col_scale,
        "x": x,
        "out": out,
    }

    def check(_: Any) -> None:
        messages = x.double()[col]
        for factor in (weight, None if col_scale is None else col_scale[col]):
            if factor is not None:
                messages *= factor.double()[:, None]
        total = torch.zeros(num_rows, width, dtype=torch.float64).index_add_(0, row, messages)
        if inverse_degree is not None:
            degree = torch.bincount(row, minlength=num_rows).clamp(min=1).to(scale)
            assert torch.equal(inverse_degree, 1 / degree)
            total *= inverse_degree.double()[:, None]
        if not special:
            assert_equal(out, total)

    return call, check


def segment_reduce_coo(lib: Library, draw: Draw) -> Prepared:
    row, col, num_rows, num_cols = draw.edges()
    index_dtype, dtype = draw.index_dtype(), draw.element()
    width, transpose, is_max = draw.one_of(1, 2), draw.flag(), draw.flag()
    weight = draw.maybe(draw.features(dtype, row.numel()))
    x = draw.features(dtype, num_cols, width)
    special = draw.with_specials(x)
    out = torch.full((num_rows, width), 77.0, dtype=dtype)
    ties = draw.maybe(torch.full(out.shape, -77, dtype=torch.int32))
    ends = draw.indices(col, index_dtype), draw.indices(row, index_dtype)
    call = {
        "source": ends[int(transpose)],
        "destination": ends[int(not transpose)],
        "transpose": transpose,
        "is_checked": False,
        "weight": weight,
        "is_max": is_max,
        "x": x,
        "out": out,
        "ties": ties,
    }

    def check(_: Any) -> None:
        if special:
            return
        messages = x[col] if weight is None else x[col] * weight[:, None]
        places = row[:, None].expand(messages.shape)
        reduce = "amax" if is_max else "amin"
        expected = torch.zeros(out.shape, dtype=dtype)
        expected.scatter_reduce_(0, places, messages, reduce, include_self=False)
        assert torch.equal(out, expected)
        if ties is not None:
            attained = (messages == expected[row]).int()
            counts = torch.zeros(out.shape, dtype=torch.int32).scatter_add_(0, places, attained)
            assert torch.equal(ties, counts + ((counts > 0) & (expected == 0)))

    return call, check


COO_CALLS = (check_edges, spmm_coo, segment_reduce_coo)
