"""PyG's product of a sparse matrix with features, called by itself, against upstream in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric import EdgeIndex, utils

import fastgraph
from fastgraph.routing.switch import SWITCH
from tests.graphs import random_edges

pytestmark = pytest.mark.filterwarnings(
    "ignore::fastgraph.FallbackWarning", "ignore:Converting sparse tensor", "ignore:Sparse"
)

spmm = utils.spmm  # as programs import it before fastgraph is enabled

SOURCES, ROWS, CHANNELS = 9, 7, 5


@pytest.fixture(autouse=True)
def _enabled() -> Iterator[None]:
    with fastgraph.enabled(min_edges=0):
        fastgraph.status().reset()
        yield


def matrix(dtype: torch.dtype = torch.float64) -> Tensor:
    """A matrix with an empty row and an empty column."""
    source, row = random_edges(SOURCES - 1, ROWS - 1, 30)
    values = torch.linspace(-1, 1, 30, dtype=dtype)
    entries = torch.sparse_coo_tensor(torch.stack([row, source]), values, (ROWS, SOURCES))
    return entries.coalesce().to_sparse_csr()


def features(dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SOURCES, CHANNELS, dtype=dtype, generator=generator)


def counts() -> dict[str, tuple[int, int]]:
    return {row.layer: (row.routed, row.fell_back) for row in fastgraph.status().rows}


def result(call: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    out = call(x)
    (grad,) = torch.autograd.grad((out * out.detach().cos()).sum(), x)
    return out, grad


@pytest.mark.parametrize("reduce", ["sum", "add", "mean", "max", "min"])
def test_products(reduce: str) -> None:
    adj, x = matrix(), features()
    found = result(lambda x: spmm(adj, x, reduce), x)
    with SWITCH.upstream():
        expected = result(lambda x: utils.spmm(adj, x, reduce), x)
    torch.testing.assert_close(found, expected)
    assert counts() == {"spmm": (1, 0)}


def test_second_derivatives() -> None:
    adj, x = matrix(), features().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: utils.spmm(adj, x, "mean").pow(2), x)


CALLS: dict[str, Callable[[], Any]] = {
    "coo": lambda: utils.spmm(matrix().to_sparse_coo(), features()),
    "csc": lambda: utils.spmm(matrix().to_sparse_csc(), features()),
    "dense": lambda: utils.spmm(matrix().to_dense(), features()),
    "EdgeIndex": lambda: utils.spmm(
        EdgeIndex(
            matrix().to_sparse_coo().indices(), sparse_size=(ROWS, SOURCES), sort_order="row"
        ),
        features(),
    ),
    "other dtypes": lambda: utils.spmm(matrix(torch.float32), features()),
    "no reduction": lambda: utils.spmm(matrix(), features(), "mul"),
    "other shapes": lambda: utils.spmm(matrix(), features()[:-1]),
    "a vector": lambda: utils.spmm(matrix(), features()[:, 0]),
}


@pytest.mark.parametrize("name", CALLS)
def test_no_operator(name: str) -> None:
    found = outcome(CALLS[name])
    with SWITCH.upstream():
        expected = outcome(CALLS[name])
    if isinstance(expected, Tensor):
        assert torch.equal(found, expected)
    else:
        assert found == expected
    assert counts() == {}


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return type(error), str(error)


def test_matrices_that_require_gradients() -> None:
    adj = matrix().requires_grad_()
    utils.spmm(adj, features()).sum().backward()
    assert adj.grad is not None
    reason = "the sparse adjacency matrix requires a gradient"
    assert fastgraph.status().row("spmm").reasons == {reason: 1}


def test_small_products_are_left_to_upstream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTGRAPH_MIN_EDGES")
    with fastgraph.enabled():
        utils.spmm(matrix(), features())
    assert counts() == {"spmm": (0, 1)}
