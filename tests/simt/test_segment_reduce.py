"""The CUDA segment_reduce, executed by the emulator: the values and records of the CPU kernels."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from fastgraph.backends.reference import num_shares
from fastgraph.graphs.graph import Graph
from fastgraph.plugins.backend import FLOATING, accumulator
from tests.native.cases import features, normal, unit_roundoff
from tests.simt.compared import (
    CASES,
    LOOP,
    WIDER_THAN_A_GRID,
    WIDTHS,
    assert_same,
    assert_same_in_every_order,
    cpu,
    graph_of,
    irregular,
    misaligned,
    simt,
)

TIES = ("split", "winner", "none")
# Both directions of "cut": rows that are cut into pieces in the forward pass, or in the backward.
LAYOUT_CASES = (("random", False), ("cut", False), ("cut", True))


def check(
    graph: Graph,
    x: Tensor,
    weight: Tensor | None,
    reduce: str,
    transpose: bool = False,
    ties: str = "split",
    grad: Tensor | None = None,
) -> None:
    given = (graph, x, weight, reduce, transpose, ties)
    out, record = simt("segment_reduce", *given)
    expected, expected_record = cpu("segment_reduce", *given)
    assert_same(out, expected)
    if ties == "split":
        assert torch.equal(num_shares(record), num_shares(expected_record))
    else:
        assert torch.equal(record, expected_record)
    if ties == "none":
        return
    if grad is None:
        grad = normal(*out.shape, dtype=x.dtype, seed=3)
    given = (graph, grad, x, weight, out, record, transpose, ties)
    grad_x = simt("segment_reduce_backward", *given)
    expected = cpu("segment_reduce_backward", *given[:5], expected_record, *given[6:])
    if not transpose:
        assert_same(grad_x, expected)
    else:  # pieces of long rows are added up in another order
        rtol, atol = 2 * unit_roundoff(x.dtype), 200 * unit_roundoff(accumulator(x.dtype))
        torch.testing.assert_close(grad_x, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("name", CASES)
def test_every_graph(name: str, reduce: str) -> None:
    graph = graph_of(name)
    x = features(graph.num_src, 20, torch.float32)
    weight = features(graph.num_edges, 1, torch.float32, seed=2)[:, 0]
    for ties in TIES:
        check(graph, x, None, reduce, ties=ties)
    check(graph, x, weight, reduce)


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_layout(width: int, dtype: torch.dtype) -> None:
    for name, transpose in LAYOUT_CASES:
        graph = graph_of(name)
        x = features(graph.num_dst if transpose else graph.num_src, width, dtype)
        weight = normal(graph.num_edges, dtype=dtype, seed=2)
        check(graph, x, weight, "max", transpose, "split")
        check(graph, x, None, "min", transpose, "split")
        check(graph, x, weight, "min", transpose, "winner")
        check(graph, x, None, "max", transpose, "winner")


@pytest.mark.parametrize("ties", ["split", "winner"])
def test_memory_that_is_not_aligned(ties: str) -> None:
    graph = graph_of("cut")
    x = features(graph.num_src, 64, torch.float32)
    weight = normal(graph.num_edges, dtype=torch.float32, seed=2)
    check(graph, misaligned(x), weight, "max", ties=ties)
    check(graph, x, misaligned(weight), "max", ties=ties)
    out, record = cpu("segment_reduce", graph, x, weight, "max", False, ties)
    saved = (normal(*out.shape, dtype=torch.float32, seed=3), x, weight, out, record)
    expected = cpu("segment_reduce_backward", graph, *saved, False, ties)
    for position, tensor in enumerate(saved):
        given = (*saved[:position], misaligned(tensor), *saved[position + 1 :])
        assert_same(simt("segment_reduce_backward", graph, *given, False, ties), expected)


@pytest.mark.parametrize("dtype", FLOATING)
def test_messages_tie_after_their_rounding(dtype: torch.dtype) -> None:
    graph = graph_of("duplicates")
    x = 1 + torch.arange(3.0).view(3, 1).expand(3, 8) * torch.finfo(dtype).eps
    weight = torch.full((graph.num_edges,), 0.3)
    check(graph, x.to(dtype).contiguous(), weight.to(dtype), "max")


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("reduce", ["max", "min"])
def test_infinities_and_nan(reduce: str, ties: str) -> None:
    for name, width in itertools.product(("random", "isolated", "cut"), (5, 8)):
        graph = graph_of(name)
        x = irregular(graph.num_src, width, dtype=torch.float32)
        weight = irregular(graph.num_edges, dtype=torch.float32, seed=2)
        grad = irregular(graph.num_dst, width, dtype=torch.float32, seed=3)
        check(graph, x, None, reduce, ties=ties, grad=grad)
        check(graph, x, weight, reduce, ties=ties, grad=grad)
        # Rows whose largest value is the one that a search starts from.
        check(graph, torch.full_like(x, -float("inf")), None, reduce, ties=ties)


@pytest.mark.parametrize("ties", ["split", "winner"])
@pytest.mark.parametrize("width", [33, 64])
def test_bits_do_not_depend_on_the_order_of_threads(width: int, ties: str) -> None:
    graph = graph_of("cut")
    x = features(graph.num_dst, width, torch.float32)
    weight = normal(graph.num_edges, dtype=torch.float32)
    given = (graph, x, weight, "max", True, ties)
    assert_same_in_every_order("segment_reduce", *given)
    out, record = simt("segment_reduce", *given)
    grad = normal(*out.shape, dtype=torch.float32, seed=3)
    given = (graph, grad, x, weight, out, record, True, ties)
    assert_same_in_every_order("segment_reduce_backward", *given)


def test_wider_than_a_grid() -> None:
    check(LOOP, normal(1, WIDER_THAN_A_GRID, dtype=torch.float32), None, "max")
