"""Maxima and minima of one or two channels over edges that nobody groups."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import SAGEConv, SimpleConv

import fastgraph
from fastgraph import ops
from fastgraph.graphs.memo import MEMO
from fastgraph.ops import coo
from fastgraph.ops.coo import UngroupedEdges
from fastgraph.ops.segment_reduce import SEGMENT_REDUCE
from fastgraph.plugins.backend import FLOATING
from fastgraph.registry.registry import REGISTRY

NUM_SRC, NUM_DST, NUM_EDGES = 90, 70, 3000
INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


@pytest.fixture(autouse=True)
def _nothing_is_cached() -> None:
    MEMO.clear()


def edges() -> Tensor:
    """With a hub at either end and isolated nodes."""
    index = torch.stack([torch.randint(NUM_SRC - 5, (NUM_EDGES,)), torch.randint(60, (NUM_EDGES,))])
    index[1, :2000] = 3
    index[0, 1500:] = index[0, 1500:].where(torch.rand(NUM_EDGES - 1500) < 0.5, 5)
    return index


def features(dtype: torch.dtype, channels: int) -> Tensor:
    """Few values, of which many tie, zeros of both signs, infinities and NaN among them."""
    x = torch.randint(-3, 4, (NUM_SRC, channels)).to(dtype)
    x[6], x[7], x[8], x[9] = -0.0, float("inf"), float("-inf"), float("nan")
    return x


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    """All alike, NaN too, whose bits say nothing."""
    for x in (found, expected):
        x[x.isnan()] = float("nan")
    integers = INTEGERS[found.element_size()]
    assert torch.equal(found.view(integers), expected.view(integers))


def ungrouped(x: Tensor, index: Tensor, *args: Tensor | None, **options: object) -> Tensor:
    return UngroupedEdges(index).while_computing(
        lambda: ops.segment_reduce(x, index, *args, num_out=NUM_DST, **options)
    )


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduce", ["max", "min"])
def test_each_bit_is_that_of_grouped_edges(
    dtype: torch.dtype, channels: int, weighted: bool, reduce: str
) -> None:
    x = features(dtype, channels).requires_grad_()
    grad = torch.randn(NUM_DST, channels).to(dtype)
    for index in (edges(), edges().int(), edges()[:, ::2], edges()[:, :0]):
        weight = torch.randint(-2, 3, index.shape[1:]).to(dtype) if weighted else None
        out = ungrouped(x, index, weight, reduce=reduce)
        assert len(MEMO) == 0
        grouped = ops.segment_reduce(x, index, weight, num_out=NUM_DST, reduce=reduce)
        found, expected = (torch.autograd.grad(o, x, grad)[0] for o in (out, grouped))
        assert_same_bits(out.detach(), grouped.detach())
        assert_same_bits(found, expected)
        MEMO.clear()


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_shares_are_counted_as_along_grouped_edges(reduce: str) -> None:
    x, index = features(torch.float32, 2), edges()
    arguments = (x, index, None, None, NUM_DST, reduce, False, "split")
    _, record = UngroupedEdges(index).while_computing(SEGMENT_REDUCE, *arguments)
    assert len(MEMO) == 0
    _, grouped = SEGMENT_REDUCE(*arguments)
    assert torch.equal(record, grouped.where(grouped >= 0, 1))


def test_reversed_edges() -> None:
    x, index = features(torch.float32, 2), edges().flip(0)
    out = ungrouped(x, index, transpose=True)
    assert len(MEMO) == 0
    assert_same_bits(out, ops.segment_reduce(x, index, num_out=NUM_DST, transpose=True))


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_gradients_of_all_orders(reduce: str) -> None:
    index = edges()[:, 1990:2020]
    x = torch.randn(NUM_SRC, 2, dtype=torch.float64, requires_grad=True)

    def compute(x: Tensor) -> Tensor:
        return ungrouped(x, index, reduce=reduce)

    assert torch.autograd.gradcheck(compute, x)
    assert torch.autograd.gradgradcheck(compute, x)


def test_features_may_be_edited_before_the_gradient() -> None:
    index, leaf = edges(), torch.randn(NUM_SRC, 1, requires_grad=True)
    x = leaf * 1
    out = ungrouped(x, index)
    grouped = ops.segment_reduce(leaf, index, num_out=NUM_DST)
    x.mul_(-1)
    found, expected = (torch.autograd.grad(o.sum(), leaf)[0] for o in (out, grouped))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("reduce", ["max", "min"])
def test_a_layer_groups_edges_that_it_uses_often(channels: int, reduce: str) -> None:
    index, x, outs = edges(), torch.randn(NUM_SRC, channels), []
    with fastgraph.enabled(min_edges=0):
        for known in (*[0] * coo._SIGHTS.uses, 1, 1):
            outs.append(SimpleConv(reduce)((x, None), index, size=(NUM_SRC, NUM_DST)))
            assert len(MEMO) == (known if channels == 1 else 1)
            assert torch.equal(outs[0], outs[-1])
    assert torch.equal(outs[0], SimpleConv(reduce)((x, None), index, size=(NUM_SRC, NUM_DST)))


def test_edges_are_grouped_when_the_gradient_of_features_is_asked_for() -> None:
    index = edges()[:, edges().shape[1] // 2 :]
    x = torch.randn(NUM_SRC, 1, requires_grad=True)
    conv = SAGEConv(1, 3, aggr="max")
    expected = torch.autograd.grad(conv(x, index).square().sum(), [x, *conv.parameters()])
    with fastgraph.enabled(min_edges=0):
        loss = conv(x, index).square().sum()
        parameters = torch.autograd.grad(loss, [*conv.parameters()], retain_graph=True)
        assert len(MEMO) == 0
        (grad,) = torch.autograd.grad(loss, x)
        assert len(MEMO) == 1
    torch.testing.assert_close([grad, *parameters], list(expected))


def test_an_index_out_of_range_is_upstreams_error() -> None:
    index, x = edges(), torch.randn(NUM_SRC, 1)
    index[0, 100] = NUM_SRC
    with pytest.raises(IndexError) as expected:
        SimpleConv("max")(x, index)
    with fastgraph.enabled(min_edges=0), pytest.raises(IndexError) as found:
        SimpleConv("max")(x, index)
    assert str(expected.value).split("\n")[0] in str(found.value)


def test_other_backends_do_without() -> None:
    arguments = "segment_reduce_coo", "segment_reduce", torch.float32
    assert REGISTRY.companion(*arguments) is not None
    with fastgraph.enabled(backend="reference", min_edges=0):
        assert REGISTRY.companion(*arguments) is None
        SimpleConv("max")(torch.ones(NUM_SRC, 1), edges())
    assert len(MEMO) == 1
