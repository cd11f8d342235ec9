"""The CUDA spmm, executed by the emulator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.native.cases import Sparse, assert_close, normal, spmm_reference
from tests.simt.cases import graphs
from tests.simt.library import DTYPES, Emulator, Rows

WIDTHS = (0, 1, 7, 33, 64, 130, 200)
GRAPHS = graphs()


def check(
    emulator: Emulator, name: str, x: Tensor, weight: Tensor | None = None, scaled: bool = False
) -> None:
    rows, edges = GRAPHS[name]
    row_scale = normal(rows.num_rows, dtype=torch.float32, seed=4) if scaled else None
    col_scale = normal(rows.num_cols, dtype=torch.float32, seed=5) if scaled else None
    out = emulator.spmm(rows, x, weight, row_scale, col_scale)
    graph = sparse(rows, edges)
    expected = spmm_reference(graph, x, weight, row_scale, col_scale)
    factors = [None if f is None else f.abs() for f in (weight, row_scale, col_scale)]
    assert_close(out, expected, spmm_reference(graph, x.abs(), *factors))


def sparse(rows: Rows, edges: Tensor) -> Sparse:
    src, dst = edges.long()
    return Sparse(dst, src, rows.num_rows, rows.num_cols, rows.ptr, rows.col, rows.edge_id)


@pytest.mark.parametrize("name", GRAPHS)
def test_every_graph(emulator: Emulator, name: str) -> None:
    rows, edges = GRAPHS[name]
    x = normal(rows.num_cols, 20, dtype=torch.float32)
    check(emulator, name, x)
    check(emulator, name, x, normal(edges.shape[1], dtype=torch.float32, seed=1), scaled=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_width(emulator: Emulator, width: int, dtype: torch.dtype) -> None:
    for name in ("random", "cut"):
        rows, edges = GRAPHS[name]
        weight = normal(edges.shape[1], dtype=dtype, seed=1)
        check(emulator, name, normal(rows.num_cols, width, dtype=dtype), weight)


@pytest.mark.parametrize("width", [33, 64])
def test_bits_do_not_depend_on_the_order_of_threads(emulator: Emulator, width: int) -> None:
    rows, edges = GRAPHS["hub"]
    x = normal(rows.num_cols, width, dtype=torch.float32)
    weight = normal(edges.shape[1], dtype=torch.float32, seed=1)
    first, *others = [emulator.spmm(rows, x, weight, seed=seed) for seed in range(4)]
    for other in others:
        assert torch.equal(first, other)


def test_infinite_features_of_strangers_do_not_leak(emulator: Emulator) -> None:
    rows, edges = GRAPHS["random"]
    x = normal(rows.num_cols, 5, dtype=torch.float32)
    x[edges[0, 0]] = float("inf")
    out = emulator.spmm(rows, x)
    expected = spmm_reference(sparse(rows, edges), x)
    assert torch.equal(out.isinf(), expected.isinf())
    assert not out.isnan().any()


def test_infinite_weights_meet_no_zeros_that_are_not_there(emulator: Emulator) -> None:
    rows, edges = GRAPHS["random"]
    x, weight = torch.ones(rows.num_cols, 4), torch.full((edges.shape[1],), float("inf"))
    expected = spmm_reference(sparse(rows, edges), x, weight)
    assert torch.equal(emulator.spmm(rows, x, weight).double(), expected)
