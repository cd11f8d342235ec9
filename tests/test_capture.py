"""Memory that a captured CUDA graph needs stays, and calls that it could not replay are refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import GATConv

import fastgraph
from fastgraph import ops
from fastgraph.graphs.edges import graph_of
from fastgraph.graphs.graph import Graph
from fastgraph.graphs.memo import MEMO
from fastgraph.machine import capture
from tests.graphs import random_edges

NODES = 20


@pytest.fixture(autouse=True)
def _nothing_remembered() -> Iterator[None]:
    fastgraph.clear_cache()
    yield
    fastgraph.clear_cache()


@contextmanager
def capturing() -> Iterator[None]:
    """Tensors of the CPU pass for those of a GPU on which a CUDA graph is captured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture, "is_capturing", lambda *tensors: True)
        yield


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(NODES, 4, requires_grad=True), random_edges(NODES, NODES, 60)


def weak_graph(index: Tensor) -> weakref.ref[Graph]:
    return weakref.ref(graph_of(index, None, NODES, NODES))


def test_nothing_on_the_cpu_is_captured() -> None:
    x, index = inputs()
    assert not capture.is_capturing(x, None, index)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_a_step_that_ran_before(reduce: str) -> None:
    x, index = inputs()
    expected = ops.spmm(x, index, reduce=reduce)
    (expected_grad,) = torch.autograd.grad(expected.sum(), x)
    with capturing():
        out = ops.spmm(x, index, reduce=reduce)
        (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(out, expected)
    assert torch.equal(grad, expected_grad)


def test_a_new_graph_is_refused() -> None:
    x, index = inputs()
    with capturing(), pytest.raises(RuntimeError, match="run the same step"):
        ops.spmm(x, index)
    assert len(MEMO) == 0
    ops.spmm(x, index)


def test_a_new_graph_of_inference_tensors_is_refused() -> None:
    with torch.inference_mode():
        x, index = inputs()
        with capturing(), pytest.raises(RuntimeError, match="inference tensors"):
            ops.spmm(x, index)


def test_a_first_backward_pass_is_refused() -> None:
    x, index = inputs()
    x = x.repeat(1, 4)  # of few channels sums over reversed edges need no graph
    ops.spmm(x, index)
    with capturing():
        out = ops.spmm(x, index)
        with pytest.raises(RuntimeError, match="edges by source"):
            out.sum().backward()


def test_a_first_mean_is_refused() -> None:
    x, index = inputs()
    ops.spmm(x, index)
    with capturing(), pytest.raises(RuntimeError, match="degrees"):
        ops.spmm(x, index, reduce="mean")


def test_the_graph_outlives_its_edges_until_everything_is_forgotten() -> None:
    x, index = inputs()
    captured = weak_graph(index)
    with capturing():
        ops.spmm(x, index)
    other = random_edges(NODES, NODES, 30)
    forgotten = weak_graph(other)
    del index, other
    MEMO.trim()
    gc.collect()
    assert captured() is not None
    assert forgotten() is None
    fastgraph.clear_cache()
    assert captured() is None


def test_dropout_is_refused() -> None:
    _, index = inputs()
    x, score = torch.randn(NODES, 2, 3), torch.randn(NODES, 2)
    ops.gat(x, score, score, index)
    with capturing():
        ops.gat(x, score, score, index)
        with pytest.raises(RuntimeError, match="same edges"):
            ops.gat(x, score, score, index, dropout=0.5)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_layer_with_dropout_is_left_to_upstream(dropout: float) -> None:
    x, index = inputs()
    layer = GATConv(4, 3, dropout=dropout)
    with fastgraph.enabled(min_edges=0):
        layer(x, index)
        fastgraph.status().reset()
        with capturing():
            layer(x, index)
        (row,) = fastgraph.status().rows
    assert dict(row.reasons) == ({"attention dropout in a CUDA graph": 1} if dropout else {})
