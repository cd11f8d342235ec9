"""Calls that the sparse backend takes, and its caches; its results are tested with ``spmm``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fastgraph import Graph, ops
from fastgraph.backends import reference, sparse
from fastgraph.graphs.memo import MEMO
from tests import forks
from tests.conftest import selected
from tests.graphs import random_edges

EDGES = random_edges(20, 20, 300).unique(dim=1)  # sorted by source
X = torch.randn(20, 5)


@pytest.fixture(autouse=True)
def backend() -> Iterator[str]:
    MEMO.clear()
    yield from selected("sparse")


def mixed() -> Graph:
    return Graph(EDGES[:, torch.randperm(EDGES.shape[1])], 20, 20)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("reduce", ["sum", "mean", "mean_adjoint"])
def test_columns_are_sorted(reduce: str, transpose: bool) -> None:
    graph, weight = mixed(), torch.rand(EDGES.shape[1])
    assert sparse.fits(graph, X, transpose)
    with torch.sparse.check_sparse_tensor_invariants():
        found = sparse.spmm(graph, X, weight, reduce, transpose)
    torch.testing.assert_close(found, reference.spmm(graph, X, weight, reduce, transpose))


def test_an_edge_that_comes_twice_does_not_fit_nor_does_nothing() -> None:
    twice = torch.cat([EDGES, EDGES[:, 7:8]], dim=1)
    assert not sparse.fits(Graph(twice, 20, 20), X, False)
    assert not sparse.fits(Graph(EDGES[:, :0], 20, 20), X, False)
    assert not sparse.fits(Graph(EDGES, 20, 20), X[:, :0], False)


def test_the_sorted_edges_are_kept_with_the_graph_alone() -> None:
    edges, weight = EDGES.clone(), torch.rand(EDGES.shape[1])
    ops.spmm(X, edges, weight)
    entries, nbytes = len(MEMO), MEMO.nbytes
    assert nbytes >= Graph(edges, 20, 20).nbytes // 2 + 8 * edges.shape[1]
    for _ in range(3):
        weight.mul_(2)
        ops.spmm(X, edges, weight)
        ops.spmm(X, edges, reduce="mean")
    assert (len(MEMO), MEMO.nbytes) == (entries, nbytes)
    del edges
    MEMO.trim()  # the graph, and with it what belongs to it
    MEMO.trim()
    assert len(MEMO) == 0


def test_weights_may_be_edited() -> None:
    weight = torch.rand(EDGES.shape[1])
    before = ops.spmm(X, EDGES, weight)
    weight.mul_(2)
    torch.testing.assert_close(ops.spmm(X, EDGES, weight), 2 * before)


def test_autocast_changes_nothing() -> None:
    x = X.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = ops.spmm(x, EDGES)
        out.sum().backward()
    assert out.dtype == x.grad.dtype == torch.float32
    torch.testing.assert_close(out, ops.spmm(X, EDGES))


def test_torch_does_not_warn(tmp_path: Path) -> None:
    """It would once in a process."""
    script = """
import torch, warnings
warnings.simplefilter("error", UserWarning)
from fastgraph import Graph
from fastgraph.backends import sparse
graph = Graph(torch.tensor([[0, 1], [1, 0]]), 2, 2)
sparse.spmm(graph, torch.ones(2, 3), None, "sum", False)
"""
    done = forks.python("-c", script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("dtype", "own"), [(torch.float32, True), (torch.float64, True), (torch.bfloat16, False)]
)
def test_dtypes(dtype: torch.dtype, own: bool) -> None:
    kernel = sparse.SparseBackend().kernel("spmm", "cuda", dtype)
    assert (kernel is not reference.spmm) is own
    assert sparse.SparseBackend().kernel("spmm", "mps", dtype) is None
