from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from .cases import GRAPHS, compress, make_graph, transpose


def assert_is_stable_sort(
    graph_rowptr: Tensor, index: Tensor, edge_id: Tensor, row: Tensor, col: Tensor, rows: int
) -> None:
    order = torch.argsort(row, stable=True)
    assert torch.equal(edge_id.long(), order)
    assert torch.equal(index.long(), col[order].long())
    counts = torch.bincount(row.long(), minlength=rows)
    assert torch.equal(
        graph_rowptr, torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("rows", "edges"), [(1, 10), (50, 3000), (40_000, 70_000), (9, 70_000)])
def test_build_sorts_stably(lib: Any, dtype: torch.dtype, rows: int, edges: int) -> None:
    row, col = torch.randint(0, rows, (edges,)), torch.randint(0, 33, (edges,))
    row[-1] = 0
    row[0] = rows - 1
    graph = compress(lib, row.to(dtype), col.to(dtype), rows, 33)
    edge_id = torch.arange(edges) if graph.edge_id is None else graph.edge_id
    assert (graph.edge_id is None) == (rows == 1)
    assert_is_stable_sort(graph.rowptr, graph.index, edge_id, row, col, rows)


@pytest.mark.parametrize("edges", [1, 2, 16_384, 16_385, 60_000])
def test_build_recognises_sorted_rows(lib: Any, edges: int) -> None:
    row = torch.randint(3, 500, (edges,)).sort().values
    col = torch.randint(0, 500, (edges,))
    graph = compress(lib, row, col, 600, 500)
    assert graph.edge_id is None
    assert_is_stable_sort(graph.rowptr, graph.index, torch.arange(edges), row, col, 600)


@pytest.mark.parametrize("position", [1, 511, 16_384, 39_999])
def test_build_notices_one_descent(lib: Any, position: int) -> None:
    row = torch.arange(40_000) // 7 + 1
    row[position] = 0
    col = torch.arange(40_000) % 90
    graph = compress(lib, row, col, 6000, 90)
    assert graph.edge_id is not None
    assert_is_stable_sort(graph.rowptr, graph.index, graph.edge_id, row, col, 6000)


def test_build_takes_strided_and_expanded_rows(lib: Any) -> None:
    pairs = torch.randint(0, 20, (500, 3))
    row, col = pairs[:, 0], pairs[:, 2]
    graph = compress(lib, row, col, 20, 20)
    assert graph.edge_id is not None
    assert_is_stable_sort(graph.rowptr, graph.index, graph.edge_id, row, col, 20)
    star = torch.tensor([4]).expand(500)
    graph = compress(lib, star, col, 20, 20)
    assert graph.edge_id is None
    assert torch.equal(graph.rowptr.diff().nonzero().flatten(), torch.tensor([4]))


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("bad", [-1, 10, 17, 2**40, -(2**62)])
@pytest.mark.parametrize("which", [0, 1])
def test_build_names_an_index_out_of_range(lib: Any, which: int, bad: int, in_order: bool) -> None:
    edge_index = torch.randint(0, 10, (2, 3000))
    edge_index[1] = edge_index[1].sort(descending=not in_order).values
    edge_index[which, 2900 if bad >= 0 else 1] = bad
    message = rf"edge_index holds index {bad} in row {which}, expected 0 <= index < 10"
    with pytest.raises(IndexError, match=message):
        compress(lib, edge_index[1], edge_index[0], 10, 10)


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize(("rows", "edges"), [(50, 3000), (40_000, 170_000)])
def test_build_replaces_loops(
    lib: Any, rows: int, edges: int, threads: int, restore_threads: None
) -> None:
    torch.set_num_threads(threads)
    row, col = torch.randint(0, rows, (2, edges))
    row[:: edges // 20] = col[:: edges // 20]
    kept, loops = row != col, torch.arange(rows)
    rowptr = torch.empty(rows + 1, dtype=torch.int64)
    index, edge_id = torch.empty(2, edges + rows, dtype=torch.int32)
    num_kept = lib.build_csr_with_loops(row, col, rows, rows, rows, rowptr, index, edge_id)
    assert num_kept == int(kept.sum()) < edges
    row, col = torch.cat([row[kept], loops]), torch.cat([col[kept], loops])
    size = num_kept + rows
    assert_is_stable_sort(rowptr, index[:size], edge_id[:size], row, col, rows)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_check_copies_a_valid_matrix(lib: Any, dtype: torch.dtype) -> None:
    ptr = torch.tensor([0, 2, 2, 5], dtype=dtype)
    index = torch.tensor([3, 0, 1, 1, 2], dtype=dtype)
    rowptr, col = torch.empty(4, dtype=torch.int64), torch.empty(5, dtype=torch.int32)
    lib.check_csr(ptr, index, 3, 4, rowptr, col)
    assert torch.equal(rowptr, ptr.long())
    assert torch.equal(col, index.int())


@pytest.mark.parametrize(
    ("ptr", "index", "error", "message"),
    [
        ([1, 2, 3], [0, 0, 0], ValueError, "ptr must start with 0, got 1"),
        ([0, 2, 4], [0, 0, 0], ValueError, r"ptr must end with 3 \(the size of index\), got 4"),
        ([0, 4, 3], [0, 0, 0], ValueError, "ptr must not decrease, got 3 at position 2"),
        ([0, -1, 3], [0, 0, 0], ValueError, "ptr must not decrease, got -1 at position 1"),
        ([0, 1, 3], [0, 5, 0], IndexError, "index holds 5 at position 1, expected 0 <= index < 5"),
        ([0, 1, 3], [0, 0, -2], IndexError, "index holds -2 at position 2"),
        ([0, 1], [0], ValueError, r"ptr must have shape \[3\], got \[2\]"),
    ],
)
def test_check_names_the_defect(
    lib: Any, ptr: list[int], index: list[int], error: type[Exception], message: str
) -> None:
    rowptr, col = torch.empty(3, dtype=torch.int64), torch.empty(len(index), dtype=torch.int32)
    with pytest.raises(error, match=message):
        lib.check_csr(torch.tensor(ptr), torch.tensor(index), 2, 5, rowptr, col)


@pytest.mark.parametrize("name", GRAPHS)
def test_transpose_keeps_the_order_of_rows(lib: Any, name: str) -> None:
    graph = make_graph(lib, name)
    flipped = transpose(lib, graph)
    entries = torch.arange(graph.num_edges) if graph.edge_id is None else graph.edge_id.long()
    row_of_entry = graph.row[entries]
    order = torch.argsort(graph.index.long(), stable=True)
    assert torch.equal(flipped.index.long(), row_of_entry[order])
    assert flipped.edge_id is not None
    assert torch.equal(flipped.edge_id.long(), entries[order])
    counts = torch.bincount(graph.col, minlength=graph.num_cols)
    assert torch.equal(flipped.rowptr.diff(), counts)


def test_sizes_beyond_32_bits_are_refused(lib: Any) -> None:
    index = torch.zeros(1, dtype=torch.int64)
    rowptr, col = torch.empty(2, dtype=torch.int64), torch.empty(1, dtype=torch.int32)
    for rows, cols, name in [(2**31, 1, "num_rows"), (1, 2**31, "num_cols"), (-1, 1, "num_rows")]:
        with pytest.raises(ValueError, match=rf"{name} must be in \[0, 2\^31\), got"):
            lib.build_csr(index, index, rows, cols, rowptr, col, col)
