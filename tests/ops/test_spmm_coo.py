"""Sums of few channels over edges that nobody groups."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import GraphConv, LGConv, SimpleConv

import fastgraph
from fastgraph import ops
from fastgraph.graphs.memo import MEMO
from fastgraph.ops import coo
from fastgraph.ops.coo import UngroupedEdges, check_edges
from fastgraph.plugins.backend import FLOATING
from fastgraph.registry.registry import REGISTRY

NUM_SRC, NUM_DST, NUM_EDGES = 90, 70, 14_000


@pytest.fixture(autouse=True)
def _nothing_is_cached() -> None:
    MEMO.clear()


def edges(dtype: torch.dtype = torch.int64) -> Tensor:
    """With a hub at either end that has several pieces, isolated nodes and runs of one node."""
    index = torch.stack([torch.randint(NUM_SRC - 5, (NUM_EDGES,)), torch.randint(60, (NUM_EDGES,))])
    index[1, :9000] = 3
    index[0, 4000:] = index[0, 4000:].where(torch.rand(NUM_EDGES - 4000) < 0.2, 5)
    return index.to(dtype)


def ungrouped(x: Tensor, index: Tensor, *args: Tensor | None, **options: object) -> Tensor:
    return UngroupedEdges(index).while_computing(
        lambda: ops.spmm(x, index, *args, num_out=NUM_DST, **options)
    )


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("channels", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_each_bit_is_that_of_grouped_edges(dtype: torch.dtype, channels: int, reduce: str) -> None:
    x = torch.randn(NUM_SRC, channels).to(dtype)
    for index in (edges(), edges(torch.int32), edges()[:, ::2]):
        out = ungrouped(x, index, reduce=reduce)
        assert len(MEMO) == 0
        assert torch.equal(out, ops.spmm(x, index, num_out=NUM_DST, reduce=reduce))
        assert len(MEMO) == 1
        MEMO.clear()


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("channels", [3, 4, 7, 8])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_each_bit_of_weighted_sums_is_that_of_grouped_edges(
    dtype: torch.dtype, channels: int, reduce: str
) -> None:
    x, index = torch.randn(NUM_SRC, channels).to(dtype), edges()
    weight = torch.randn(NUM_EDGES).to(dtype)
    out = ungrouped(x, index, weight, reduce=reduce)
    assert len(MEMO) == 0
    assert torch.equal(out, ops.spmm(x, index, weight, num_out=NUM_DST, reduce=reduce))
    assert len(MEMO) == 1


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_weighted_sums_group_nothing(dtype: torch.dtype, reduce: str) -> None:
    x, weight = torch.randn(NUM_SRC, 2).to(dtype), torch.randn(NUM_EDGES).to(dtype)
    index = edges()
    out = ops.spmm(x, index, weight, num_out=NUM_DST, reduce=reduce)
    assert len(MEMO) == 0
    wide = ops.spmm(x.repeat(1, 2), index, weight, num_out=NUM_DST, reduce=reduce)
    assert torch.equal(out, wide[:, :2])
    strided = torch.stack([weight, weight], dim=1)[:, 0]
    assert torch.equal(out, ops.spmm(x, index, strided, num_out=NUM_DST, reduce=reduce))


@pytest.mark.parametrize("channels", [2, 5])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_gradients_of_all_orders(channels: int, weighted: bool, reduce: str) -> None:
    index = edges()[:, 8990:9030]
    x = torch.randn(NUM_SRC, channels, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(40, dtype=torch.float64, requires_grad=True) if weighted else None

    def compute(x: Tensor, weight: Tensor | None = None) -> Tensor:
        return ungrouped(x, index, weight, reduce=reduce)

    inputs = (x,) if weight is None else (x, weight)
    assert torch.autograd.gradcheck(compute, inputs)
    assert torch.autograd.gradgradcheck(compute, inputs)


def test_gradients_do_not_depend_on_the_cache() -> None:
    """The backward pass goes in the order of edges, whether they are grouped by then or not."""
    index = edges()
    gradients = []
    for _ in range(2):
        x = torch.randn(NUM_SRC, 1, generator=torch.Generator().manual_seed(0)).requires_grad_()
        out = ungrouped(x, index)
        out.backward(torch.ones_like(out) / 3)
        gradients.append(x.grad)
        ops.spmm(torch.randn(NUM_SRC, 8), index, num_out=NUM_DST)
        assert len(MEMO) == 1
    assert torch.equal(gradients[0], gradients[1])


def test_degrees_are_counted_once_for_both_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    index, counted = edges(), []

    def count(*args: object, **options: object) -> Tensor:
        counted.append(args)
        return bincount(*args, **options)

    bincount = torch.bincount
    monkeypatch.setattr(torch, "bincount", count)
    x = torch.randn(NUM_SRC, 1, requires_grad=True)
    for _ in range(2):  # a forward pass counts as it adds up: edges may have changed unnoticed
        out = ungrouped(x, index, reduce="mean")
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert not counted
    index.numpy()[:] = edges().numpy()
    other = ungrouped(x, index, reduce="mean")
    wide = ops.spmm(x.repeat(1, 4), index.clone(), num_out=NUM_DST, reduce="mean")
    assert torch.equal(other, wide[:, :1])
    (expected,) = torch.autograd.grad(wide[:, :1].sum(), x)
    assert torch.allclose(torch.autograd.grad(other.sum(), x)[0], expected, atol=1e-4)
    assert not torch.allclose(grad, expected, atol=1e-4)


def test_a_layer_groups_edges_that_it_uses_often() -> None:
    index, x = edges()[:, :2000], torch.randn(NUM_SRC, 1)
    outs = []
    with fastgraph.enabled(min_edges=0):
        for known in (*[0] * coo._SIGHTS.uses, 1, 1):
            outs.append(SimpleConv()((x, None), index, size=(NUM_SRC, NUM_DST)))
            assert len(MEMO) == known
            assert torch.equal(outs[0], outs[-1])


@pytest.mark.parametrize("num_edges", [2000, 20_000])
@pytest.mark.parametrize("weighted", [False, True])
def test_edges_are_grouped_when_the_gradient_of_features_is_asked_for(
    num_edges: int, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    index = torch.randint(NUM_SRC, (2, num_edges))
    x = torch.randn(NUM_SRC, 8, requires_grad=True)
    given = (torch.rand(num_edges),) if weighted else ()
    layer, scale = GraphConv(8, 3), torch.randn(NUM_SRC, 3)
    expected = torch.autograd.grad((layer(x, index, *given) * scale).sum(), [*layer.parameters()])
    with fastgraph.enabled(min_edges=0):
        loss = (layer(x, index, *given) * scale).sum()
        found = torch.autograd.grad(loss, [*layer.parameters()], retain_graph=True)
        assert len(MEMO) == 0
        (grad,) = torch.autograd.grad(loss, x)
        assert len(MEMO) == (num_edges > coo._MOST_REVERSED_EDGES)
        ops.spmm(torch.randn(NUM_SRC, 16), index)
        assert len(MEMO) == 1
        grouped = (layer(x, index, *given) * scale).sum()
    torch.testing.assert_close(found, expected)
    assert torch.equal(loss, grouped)
    assert torch.equal(grad, torch.autograd.grad(grouped, x)[0])


@pytest.mark.parametrize("threads", [1, 2])
def test_edges_for_all_threads_are_grouped_at_once(threads: int) -> None:
    num_edges = 100_000
    index, x = torch.randint(NUM_SRC, (2, num_edges)), torch.randn(NUM_SRC, 8)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with fastgraph.enabled(min_edges=0):
            SimpleConv()(x, index)
    finally:
        torch.set_num_threads(before)
    assert len(MEMO) == threads - 1


def test_an_edit_that_nobody_counts_before_a_forward_pass_on_grouped_edges() -> None:
    """The degrees of ungrouped edges are known from before the edit."""
    index, x = edges()[:, :2000], torch.randn(NUM_SRC, 1, dtype=torch.float64, requires_grad=True)
    size = NUM_SRC, NUM_DST
    with fastgraph.enabled(min_edges=0):
        for _ in range(coo._SIGHTS.uses + 1):
            SimpleConv("mean")((x, None), index, size=size)
        index.data.copy_(edges()[:, 2000:4000])
        out = SimpleConv("mean")((x, None), index, size=size)
    expected = SimpleConv("mean")((x, None), index.clone(), size=size)
    torch.testing.assert_close(out, expected)
    weight = torch.randn(NUM_DST, 1, dtype=torch.float64)
    found = (torch.autograd.grad((o * weight).sum(), x)[0] for o in (out, expected))
    torch.testing.assert_close(*found)


def test_what_follows_does_not_depend_on_the_cache() -> None:
    """Rows behind the last one with edges are multiplied, or not, at all calls alike."""
    num_nodes = 20_000
    index = torch.stack([torch.randint(num_nodes, (400_000,)), torch.randint(5, (400_000,))])
    conv = GraphConv(1, 128)
    with torch.no_grad():
        conv.lin_rel.weight[0] = float("inf")
    with fastgraph.enabled():
        outs = [conv(torch.ones(num_nodes, 1), index) for _ in range(2)]
    assert outs[0].isnan().sum() == num_nodes - 5  # 0 times infinity, as in PyG
    assert torch.equal(outs[0].nan_to_num(), outs[1].nan_to_num())


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_without_edges_are_not_multiplied_where_all_edges_are_grouped(threads: int) -> None:
    num_nodes, num_edges = 10_000, 140_000
    index = torch.stack([torch.randint(num_nodes, (num_edges,)), torch.randint(5, (num_edges,))])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    conv = GraphConv(8, 128)
    with torch.no_grad():
        conv.lin_rel.weight[0] = float("inf")
    try:
        with fastgraph.enabled():
            outs = [conv(torch.ones(num_nodes, 8), index) for _ in range(2)]
    finally:
        torch.set_num_threads(before)
    assert not outs[0].isnan().any()  # 0 times infinity, as of PyG, were it computed
    assert torch.equal(outs[0], outs[1])


def test_other_backends_do_without() -> None:
    assert REGISTRY.companion("spmm_coo", "spmm", torch.float32) is not None
    with fastgraph.enabled(backend="reference"):
        assert REGISTRY.companion("spmm_coo", "spmm", torch.float32) is None
        out = SimpleConv()(torch.ones(50, 1), torch.randint(50, (2, 60_000)))
    assert out.sum() == 60_000


def test_a_layer_with_weights_never_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTGRAPH_MIN_EDGES", raising=False)
    index, x = torch.randint(50, (2, 2000)), torch.randn(50, 1, requires_grad=True)
    weight, layer = torch.rand(2000), LGConv(normalize=False)
    expected = layer(x, index, weight)
    (expected_grad,) = torch.autograd.grad(expected.sum(), x)
    with fastgraph.enabled():
        out = layer(x, index, weight)
        (grad,) = torch.autograd.grad(out.sum(), x)
    assert len(MEMO) == 0
    assert torch.equal(out, expected)
    torch.testing.assert_close(grad, expected_grad)


@pytest.mark.parametrize(("row", "value"), [(0, NUM_SRC), (0, -1), (1, NUM_DST), (1, 2**40)])
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_an_index_out_of_range(row: int, value: int, transpose: bool, reduce: str) -> None:
    index = edges()
    index[row, 77] = value
    limit = (NUM_SRC, NUM_DST)[row]
    message = rf"edge_index holds index {value} in row {row}, expected 0 <= index < {limit}"
    with pytest.raises(IndexError, match=message):
        check_edges(index, NUM_SRC, NUM_DST)
    num_in, num_out = (NUM_DST, NUM_SRC) if transpose else (NUM_SRC, NUM_DST)
    options = {"num_out": num_out, "reduce": reduce, "transpose": transpose}
    weight = torch.ones(NUM_EDGES)
    with pytest.raises(IndexError, match=message):
        ops.spmm(torch.ones(num_in, 1), index, weight, **options)
    with fastgraph.enabled(), pytest.raises((IndexError, RuntimeError, ValueError)) as error:
        SimpleConv()((torch.ones(NUM_SRC, 1), None), index, size=(NUM_SRC, NUM_DST))
    assert "expected 0 <=" not in str(error.value)  # upstream's own


@pytest.mark.parametrize(("num_src", "num_dst"), [(0, 0), (0, 3), (3, 0), (3, 4)])
def test_no_edges(num_src: int, num_dst: int) -> None:
    index, weight = torch.empty(2, 0, dtype=torch.int64), torch.empty(0)
    for reduce in ("sum", "mean"):
        out = ops.spmm(torch.ones(num_src, 1), index, weight, num_out=num_dst, reduce=reduce)
        assert torch.equal(out, torch.zeros(num_dst, 1))
