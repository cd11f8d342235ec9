"""The matrices of the sparse backend; what it computes is tested with ``spmm``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fastgraph import ops
from fastgraph.backends import sparse
from fastgraph.memo import MEMO
from tests.conftest import selected
from tests.graphs import random_edges

EDGES = random_edges(20, 20, 100)
X = torch.randn(20, 5)


@pytest.fixture(autouse=True)
def backend() -> Iterator[str]:
    MEMO.clear()
    yield from selected("sparse")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The values of all matrices that were made."""
    values: list[Tensor] = []
    upstream = sparse._matrix

    def matrix(*given: Any) -> Any:
        result = upstream(*given)
        values.append(result.matrix.values())
        return result

    monkeypatch.setattr(sparse, "_matrix", matrix)
    return values


def test_a_matrix_is_made_once_for_a_graph_and_its_weights(made: list[Tensor]) -> None:
    weight = torch.rand(100)
    for _ in range(3):
        ops.spmm(X, EDGES, weight)
        ops.spmm(X, EDGES)
        ops.spmm(X, EDGES, reduce="mean")
        ops.spmm(X, EDGES, reduce="mean", transpose=True)
    assert len(made) == 4


def test_edited_weights_make_another_one(made: list[Tensor]) -> None:
    weight = torch.rand(100)
    before = ops.spmm(X, EDGES, weight)
    weight.mul_(2)
    torch.testing.assert_close(ops.spmm(X, EDGES, weight), 2 * before)
    assert len(made) == 2


def test_learned_weights_are_not_remembered() -> None:
    weight = torch.rand(100, requires_grad=True)
    ops.spmm(X, EDGES, weight)
    entries = len(MEMO)
    for _ in range(3):
        ops.spmm(X, EDGES, weight).sum().backward()
        with torch.no_grad():
            weight -= weight.grad
    assert len(MEMO) == entries


def test_a_matrix_is_freed_with_its_weights() -> None:
    ops.spmm(X, EDGES)
    entries, nbytes = len(MEMO), MEMO.nbytes
    weight = torch.rand(100)
    ops.spmm(X, EDGES, weight)
    assert MEMO.nbytes > nbytes
    del weight
    MEMO.trim()
    assert (len(MEMO), MEMO.nbytes) == (entries, nbytes)


@pytest.mark.parametrize(
    ("dtype", "own"), [(torch.float32, True), (torch.float64, True), (torch.bfloat16, False)]
)
def test_dtypes(dtype: torch.dtype, own: bool) -> None:
    kernel = sparse.SparseBackend().kernel("spmm", "cuda", dtype)
    assert (kernel is sparse.spmm) is own
    assert sparse.SparseBackend().kernel("spmm", "mps", dtype) is None
