from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from fastgraph.backends.reference import num_shares
from fastgraph.plugins.backend import FLOATING, accumulator

from .cases import GRAPHS, WIDTHS, Sparse, compress, features, make_graph, normal

REDUCTIONS = ("amax", "amin")


def extremum(
    lib: Any, graph: Sparse, weight: Tensor | None, reduce: str, x: Tensor, record: str | None
) -> tuple[Tensor, Tensor | None]:
    shape = (graph.num_rows, x.shape[1])
    out = torch.full(shape, 77.0, dtype=x.dtype)
    recorded = torch.full(shape, -77, dtype=torch.int32) if record else None
    ties = recorded if record == "ties" else None
    winner = recorded if record == "winner" else None
    lib.segment_reduce(*graph.csr, weight, reduce == "amax", x, out, ties, winner)
    return out, recorded


def scatter_reference(
    graph: Sparse, weight: Tensor | None, reduce: str, x: Tensor
) -> tuple[Tensor, Tensor]:
    """torch's own reduction into zeros, and the number of values that share its gradient."""
    messages = x[graph.col] if weight is None else x[graph.col] * weight[:, None]
    index = graph.row[:, None].expand_as(messages)
    out = torch.zeros(graph.num_rows, x.shape[1], dtype=x.dtype)
    out = out.scatter_reduce(0, index, messages, reduce, include_self=False)
    ties = torch.zeros(out.shape, dtype=torch.int64)
    ties.scatter_add_(0, index, (messages == out[graph.row]).long())
    ties += (out == 0) & (torch.bincount(graph.row, minlength=graph.num_rows) > 0)[:, None]
    return out, ties


def assert_alone(
    graph: Sparse, weight: Tensor | None, x: Tensor, out: Tensor, ties: Tensor
) -> None:
    """Edges that are said to have a value alone do, and all that do are named, but infinite ones.

    A search starts from infinity, so that it counts those that equal it.
    """
    row, channel = (ties < 0).nonzero(as_tuple=True)
    edge = ~ties[row, channel].long()
    of_edge = x[graph.col[edge], channel]
    if weight is not None:
        of_edge = weight[edge] * of_edge
    assert torch.equal(graph.row[edge], row)
    assert torch.equal(of_edge, out[row, channel])
    assert bool(out[ties == 1].isinf().all())


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("name", [*GRAPHS, "mixed"])
def test_value_and_ties_match_scatter_reduce(
    lib: Any, name: str, dtype: torch.dtype, reduce: str, weighted: bool
) -> None:
    graph = make_graph(lib, name)
    weight = normal(graph.num_edges, dtype=dtype, seed=3) if weighted else None
    for width in WIDTHS:
        x = features(graph.num_cols, width, dtype)
        if width > 3 and graph.num_cols > 3:
            x[1, 2], x[2, 1], x[3, 3] = float("nan"), float("inf"), float("-inf")
        expected, expected_ties = scatter_reference(graph, weight, reduce, x)
        out, ties = extremum(lib, graph, weight, reduce, x, "ties")
        torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
        assert ties is not None
        assert torch.equal(num_shares(ties).long(), expected_ties)
        assert_alone(graph, weight, x, out, ties)
        alone, _ = extremum(lib, graph, weight, reduce, x, None)
        assert torch.equal(alone.nan_to_num(5), out.nan_to_num(5))


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("record", [None, "ties", "winner"])
@pytest.mark.parametrize("dtype", FLOATING)
def test_a_nan_in_any_column_is_noticed(
    lib: Any, dtype: torch.dtype, record: str | None, first: bool
) -> None:
    for width in WIDTHS:
        # Row i aggregates node i, whose column i is NaN, and node `width`, which is larger.
        row = torch.arange(width).repeat(2)
        col = torch.cat([torch.arange(width), torch.full((width,), width)])
        if not first:
            row, col = row.flip(0), col.flip(0)
        graph = compress(lib, row, col, width, width + 1)
        x = torch.zeros(width + 1, width, dtype=dtype)
        x.fill_diagonal_(float("nan"))
        x[width] = 1
        out, _ = extremum(lib, graph, None, "amax", x, record)
        assert torch.equal(out.isnan(), torch.eye(width, dtype=torch.bool)), width
        assert bool((out[~out.isnan()] == 1).all())


def sparse_product_gradient(
    graph: Sparse, weight: Tensor, reduce: str, x: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """Value of torch.sparse.mm with a reduction, and its gradient for x."""
    order = torch.arange(graph.num_edges) if graph.edge_id is None else graph.edge_id.long()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        matrix = torch.sparse_csr_tensor(
            graph.rowptr, graph.index.long(), weight[order], (graph.num_rows, graph.num_cols)
        ).requires_grad_()
    leaf = x.clone().requires_grad_()
    out = torch.sparse.mm(matrix, leaf, reduce)
    out.backward(grad)
    assert leaf.grad is not None
    return out.detach(), leaf.grad


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("name", ["random", "hub", "sorted", "one_edge"])
def test_winners_and_their_gradient_match_sparse_mm(
    lib: Any, name: str, dtype: torch.dtype, reduce: str, weighted: bool
) -> None:
    graph = make_graph(lib, name)
    weight = features(graph.num_edges, 1, dtype, seed=3)[:, 0] if weighted else None
    for width in (1, 7, 33, 128):
        x = features(graph.num_cols, width, dtype)
        if width > 3 and graph.num_cols > 3:
            x[1, 2], x[3, 3] = float("nan"), float("inf")
        # Small whole numbers add up without rounding, whatever the order.
        grad = torch.randint(-2, 3, (graph.num_rows, width)).to(dtype)
        ones = torch.ones(graph.num_edges, dtype=dtype)
        expected, expected_grad = sparse_product_gradient(
            graph, ones if weight is None else weight, reduce, x, grad
        )
        out, winner = extremum(lib, graph, weight, reduce, x, "winner")
        torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
        assert winner is not None
        empty = graph.rowptr.diff() == 0
        assert bool((winner[empty] == -1).all())
        edge = winner[~empty].long()
        assert torch.equal(
            graph.row[edge.clamp(min=0)][edge >= 0],
            torch.arange(graph.num_rows)[~empty][:, None].expand_as(edge)[edge >= 0],
        )

        grad_x = torch.full_like(x, 99.0)
        lib.segment_reduce_backward(*graph.csr[:4], weight, x, out, grad, None, winner, grad_x)
        torch.testing.assert_close(grad_x, expected_grad, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("finite", [True, False])
def test_gradient_over_ties_matches_its_definition(
    lib: Any, name: str, dtype: torch.dtype, reduce: str, weighted: bool, finite: bool
) -> None:
    graph = make_graph(lib, name)
    weight = features(graph.num_edges, 1, dtype, seed=3)[:, 0] if weighted else None
    for width in (0, 1, 7, 33, 64, 256, 300):
        x = features(graph.num_cols, width, dtype)
        grad = normal(graph.num_rows, width, dtype=dtype, seed=5)
        if not finite and width > 3 and graph.num_rows > 3:
            grad[1, 2], grad[2, 0], x[3, 1] = float("nan"), float("inf"), float("nan")
        out, ties = extremum(lib, graph, weight, reduce, x, "ties")
        grad_x = torch.full_like(x, 99.0)
        lib.segment_reduce_backward(*graph.csr[:4], weight, x, out, grad, ties, None, grad_x)

        messages = x[graph.col] if weight is None else x[graph.col] * weight[:, None]
        share = (grad.to(accumulator(dtype)) / num_shares(ties)).to(dtype).double()
        share = (messages == out[graph.row]) * share[graph.row]
        if weight is not None:
            share = share * weight.double()[:, None]
        expected = torch.zeros(x.shape, dtype=torch.float64).index_add_(0, graph.col, share)
        magnitude = torch.zeros(x.shape, dtype=torch.float64).index_add_(0, graph.col, share.abs())
        bound = torch.finfo(dtype).eps * expected.abs() + 1e-5 * magnitude + 1e-7
        assert torch.equal(grad_x.isnan(), expected.isnan())
        regular = expected.isfinite()
        error = (grad_x.double() - expected).abs()
        assert bool((error <= bound)[regular].all())


def test_ties_and_winners_exclude_each_other(best: Any) -> None:
    graph = make_graph(best, "one_edge")
    x, out = torch.zeros(4, 2), torch.zeros(3, 2)
    record = torch.zeros(3, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="expected at most one of ties and winner, got both"):
        best.segment_reduce(*graph.csr, None, True, x, out, record, record)
    gradient = (*graph.csr[:4], None, x, out, out)
    with pytest.raises(ValueError, match="expected one of ties and winner, got both"):
        best.segment_reduce_backward(*gradient, record, record, x.clone())
    with pytest.raises(ValueError, match="expected one of ties and winner, got neither"):
        best.segment_reduce_backward(*gradient, None, None, x.clone())
