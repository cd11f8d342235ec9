"""Rows with columns in common are brought together, where that saves reads."""

from __future__ import annotations

import itertools
import platform
from typing import Any

import pytest
import torch

from tests.graphs import mixed_communities

from .cases import Sparse, compress


def communities(lib: Any, num_nodes: int, *, mixed: bool = True, noise: float = 0.1) -> Sparse:
    """Nodes with 30 edges each."""
    row, col = mixed_communities(num_nodes, 30, mixed=mixed, noise=noise)
    return compress(lib, row, col, num_nodes, num_nodes)


def order_rows(lib: Any, graph: Sparse, row_bytes: int = 1024) -> Sparse | None:
    rowptr, index = torch.empty_like(graph.rowptr), torch.empty_like(graph.index)
    edge_id, row_id = torch.empty_like(index), torch.empty(graph.num_rows, dtype=torch.int32)
    if lib.order_rows(*graph.csr[:4], row_bytes, rowptr, index, edge_id, row_id) == 0:
        return None
    return Sparse(
        graph.row, graph.col, graph.num_rows, graph.num_cols, rowptr, index, edge_id, row_id
    )


def test_mixed_communities_come_together(lib: Any) -> None:
    graph = communities(lib, 10_000)
    ordered = order_rows(lib, graph)
    assert ordered is not None and ordered.row_id is not None
    rows = ordered.row_id.long()
    assert torch.equal(rows.sort().values, torch.arange(10_000))
    expected = graph.in_order(rows)
    assert torch.equal(ordered.rowptr, expected.rowptr)
    assert torch.equal(ordered.index, expected.index)
    assert torch.equal(ordered.entry, expected.entry)

    def columns_of_200_rows(matrix: Sparse) -> float:
        parts = itertools.pairwise(matrix.rowptr[::200])
        counts = [matrix.index[begin:end].unique().numel() for begin, end in parts]
        return sum(counts) / len(counts)

    # 200 rows of four communities have 600 edges to elsewhere.
    assert columns_of_200_rows(ordered) < 1000 < 3000 < columns_of_200_rows(graph)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="no stores past the caches")
def test_rows_of_few_entries_are_ordered_if_results_go_past_the_caches(lib: Any) -> None:
    def shuffled_mesh(side: int) -> Sparse:
        square = torch.randperm(side * side).view(side, side)
        row = torch.cat([square[1:].flatten(), square[:, 1:].flatten()])
        col = torch.cat([square[:-1].flatten(), square[:, :-1].flatten()])
        both = torch.cat([row, col]), torch.cat([col, row])
        return compress(lib, *both, side * side, side * side)

    assert order_rows(lib, shuffled_mesh(120)) is None  # 14 MiB
    assert order_rows(lib, shuffled_mesh(140)) is not None  # 19 MiB


def test_communities_that_stand_together_are_left_alone(lib: Any) -> None:
    assert order_rows(lib, communities(lib, 10_000, mixed=False)) is None


def test_what_fits_in_a_few_caches_is_left_alone(lib: Any) -> None:
    assert order_rows(lib, communities(lib, 50)) is None
    graph = communities(lib, 10_000)
    for row_bytes in (-(2**63), 0, 4, 127, 256):
        assert order_rows(lib, graph, row_bytes) is None
    for row_bytes in (512, 2**14, 2**63 - 1):
        assert order_rows(lib, graph, row_bytes) is not None


def test_what_no_order_helps_is_left_alone(lib: Any) -> None:
    assert order_rows(lib, communities(lib, 10_000, noise=1.0)) is None
    empty = torch.empty(0, dtype=torch.int64)
    assert order_rows(lib, compress(lib, empty, empty, 10_000, 10_000)) is None
    diagonal = torch.arange(10_000)
    assert order_rows(lib, compress(lib, diagonal, diagonal.flip(0), 10_000, 10_000)) is None
    hub = torch.zeros(20_000, dtype=torch.int64)
    leaf = torch.arange(20_000)
    assert order_rows(lib, compress(lib, hub, leaf, 20_000, 20_000)) is None
