"""The cache of a first layer's aggregation of constant features; no edit goes unnoticed."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import GINConv, GraphConv, LGConv, SAGEConv, SGConv

import fastgraph
from fastgraph import settings
from fastgraph.graphs import sights
from fastgraph.graphs.memo import AGGREGATION, MEMO
from fastgraph.layers import constant
from fastgraph.layers.aggregation import Aggregation
from tests.graphs import random_edges

# Where the emulator runs, the host finds edits, as it does without.
pytestmark = pytest.mark.repeats

NODES, CHANNELS, COUNT = 300, 64, 5000


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    fastgraph.clear_cache()
    yield
    fastgraph.clear_cache()


def edges(seed: int = 0) -> Tensor:
    return random_edges(NODES, NODES, COUNT, seed)


def features(seed: int = 0) -> Tensor:
    return torch.randn(NODES, CHANNELS, generator=torch.Generator().manual_seed(seed))


def kept() -> list[Any]:
    return [key for key in MEMO._entries if key[0] == AGGREGATION]


def sage(**options: Any) -> SAGEConv:
    torch.manual_seed(0)
    return SAGEConv(CHANNELS, CHANNELS, **options)


LAYERS: dict[str, Callable[[], Any]] = {
    "SAGE mean": sage,
    "SAGE sum": lambda: sage(aggr="sum"),
    "SAGE max": lambda: sage(aggr="max"),
    "SAGE without its own": lambda: sage(root_weight=False),
    "GraphConv": lambda: GraphConv(CHANNELS, CHANNELS),
    "GIN": lambda: GINConv(torch.nn.Sequential(torch.nn.ReLU(inplace=True))),
    "LG": lambda: LGConv(normalize=False),
    "SG": lambda: SGConv(CHANNELS, 7, K=1),
}


@pytest.mark.parametrize("name", LAYERS)
def test_it_is_computed_twice_and_every_step_is_equal(
    name: str, computed: list[Aggregation]
) -> None:
    conv, x, index = LAYERS[name](), features(), edges()
    steps = []
    with fastgraph.enabled(strict=True):
        for _ in range(4):
            conv.zero_grad()
            out = conv(x, index)
            if out.requires_grad:
                out.square().sum().backward()
            steps.append([out.detach().clone(), *(p.grad for p in conv.parameters())])
        # SGConv's weights are those of `gcn_norm`, which are new at the second use, too.
        assert len(computed) == (3 if name == "SG" else 2) and len(kept()) == 1
    for step in steps[1:]:
        assert all(map(torch.equal, step, steps[0]))
    expected = conv(x, index)
    torch.testing.assert_close(steps[3][0], expected, rtol=1e-4, atol=1e-5)


def test_what_is_kept_in_inference_serves_training(computed: list[Aggregation]) -> None:
    conv, x, index = sage(), features(), edges()
    with fastgraph.enabled(strict=True):
        with torch.inference_mode():
            conv(x, index)
            first = conv(x, index).clone()
        out = conv(x, index)
        out.sum().backward()
    assert len(computed) == 2 and torch.equal(out, first)
    assert conv.lin_l.weight.grad is not None


def by_numpy(x: Tensor) -> None:
    np.asarray(x)[3] += 1


def by_data(x: Tensor) -> None:
    x.data[0, 0] = 5


def in_place(x: Tensor) -> None:
    x.mul_(2)


@pytest.mark.parametrize("edit", [by_numpy, by_data, in_place])
@pytest.mark.parametrize("name", ["SAGE mean", "GIN", "GraphConv"])
def test_edits_of_features_are_noticed(name: str, edit: Callable[[Tensor], None]) -> None:
    conv, x, index = LAYERS[name](), features(), edges()
    with fastgraph.enabled(strict=True), torch.no_grad():
        for _ in range(3):
            conv(x, index)
        for _ in range(5):
            edit(x)
            # A module that was never called, on tensors that were never seen.
            expected = copy.deepcopy(conv)(x.clone(), index.clone())
            assert torch.equal(conv(x, index), expected)


def test_edits_of_edges_and_weights_are_noticed() -> None:
    conv, x, index = GraphConv(CHANNELS, CHANNELS), features(), edges()
    weight = torch.rand(COUNT)
    with fastgraph.enabled(strict=True), torch.no_grad():
        for edited in (index, weight):
            for _ in range(3):
                conv(x, index, weight)
            edited.data[..., :100] = edited.data[..., 100:200]
            expected = conv(x.clone(), index.clone(), weight.clone())
            assert torch.equal(conv(x, index, weight), expected)


def test_each_graph_and_each_reduction_has_its_own(computed: list[Aggregation]) -> None:
    x, graphs = features(), [edges(0), edges(1)]
    convs = [sage(), sage(aggr="sum")]
    with fastgraph.enabled(strict=True), torch.no_grad():
        for _ in range(4):
            found = [conv(x, index) for conv in convs for index in graphs]
        assert len(computed) == 8 and len(kept()) == 4
    for out, (conv, index) in zip(found, ((c, i) for c in convs for i in graphs), strict=True):
        torch.testing.assert_close(out, conv(x, index), rtol=1e-4, atol=1e-5)


def test_dtypes_are_apart(computed: list[Aggregation]) -> None:
    x, index = features(), edges()
    conv = sage()
    with fastgraph.enabled(strict=True), torch.no_grad():
        for _ in range(3):
            conv(x, index)
        twice = copy.deepcopy(conv).double()
        out = twice(x.double(), index)
    assert out.dtype == torch.float64 and len(computed) == 3


@pytest.mark.parametrize("name", ["SAGE mean", "SAGE max", "GraphConv", "GIN", "LG", "SG"])
def test_views_that_differ_in_sign_are_apart(name: str) -> None:
    imaginary = torch.complex(features(0), features(1))
    views, conv, index = (imaginary.imag, imaginary.conj().imag), LAYERS[name](), edges()
    assert views[0].data_ptr() == views[1].data_ptr() and views[1].is_neg()
    with fastgraph.enabled(strict=True), torch.no_grad():
        found = [conv(x, index) for x in views for _ in range(3)]
    for out, x in zip(found, (x for x in views for _ in range(3)), strict=True):
        torch.testing.assert_close(out, conv(x, index), rtol=1e-4, atol=1e-5)


def test_autocast_is_left_alone(computed: list[Aggregation]) -> None:
    conv, x, index = sage(), features(), edges()
    with fastgraph.enabled(strict=True), torch.autocast("cpu", torch.bfloat16):
        for _ in range(4):
            conv(x, index)
        assert len(computed) == 4 and not kept()


def test_fresh_features_are_never_kept(computed: list[Aggregation]) -> None:
    """As dropout makes them, often in the memory of the last ones."""
    conv, x, index = sage(), features(), edges()
    with fastgraph.enabled(strict=True):
        for _ in range(20):
            conv(F.dropout(x, 0.5), index)
            gc.collect()
        assert len(computed) == 20 and not kept()


def test_mini_batches_are_never_kept(computed: list[Aggregation]) -> None:
    conv = sage()
    with fastgraph.enabled(strict=True):
        for seed in range(20):
            conv(features(seed), edges(seed))
        assert len(computed) == 20 and not kept()
    assert len(constant._SIGHTS._seen) <= sights.MOST


def test_content_that_changes_at_every_step_is_kept_at_most_every_other_time(
    computed: list[Aggregation],
) -> None:
    conv, x, index = sage(), features(), edges()
    with fastgraph.enabled(strict=True), torch.no_grad():
        for step in range(9):
            x.data.fill_(step)
            torch.testing.assert_close(conv(x, index), conv(x.clone(), index))
    assert len(computed) == 18


def test_features_with_a_gradient_are_never_kept(computed: list[Aggregation]) -> None:
    conv, x, index = sage(), features().requires_grad_(), edges()
    with fastgraph.enabled(strict=True):
        for _ in range(3):
            conv(x, index).sum().backward()
        assert len(computed) == 3 and not kept()


def test_weights_with_a_gradient_are_never_kept(computed: list[Aggregation]) -> None:
    conv, x, index = GraphConv(CHANNELS, CHANNELS), features(), edges()
    weight = torch.rand(COUNT, requires_grad=True)
    with fastgraph.enabled(strict=True):
        for _ in range(3):
            conv(x, index, weight).sum().backward()
        assert len(computed) == 3 and not kept()


def test_inference_tensors_are_never_kept(computed: list[Aggregation]) -> None:
    conv, index = sage(), edges()
    with fastgraph.enabled(strict=True), torch.inference_mode():
        x = features()
        for _ in range(3):
            conv(x, index)
        assert len(computed) == 3 and not kept()


def test_what_a_caller_gets_is_its_own() -> None:
    conv, x, index = LGConv(normalize=False), features(), edges()
    with fastgraph.enabled(strict=True), torch.no_grad():
        first = conv(x, index).clone()
        for _ in range(4):
            out = conv(x, index)
            assert torch.equal(out, first)
            out.zero_()


def test_what_a_hook_of_the_product_gets_is_its_own() -> None:
    conv, x, index = sage(), features(), edges()
    conv.lin_l.register_forward_pre_hook(lambda _, given: (given[0].mul_(2),))
    with fastgraph.enabled(strict=True), torch.no_grad():
        first = conv(x, index).clone()
        for _ in range(4):
            assert torch.equal(conv(x, index), first)


def test_it_is_bounded_and_can_be_freed(computed: list[Aggregation]) -> None:
    conv, x, index = sage(), features(), edges()

    def train(steps: int) -> None:
        for _ in range(steps):
            conv(x, index)
        gc.collect()

    with fastgraph.enabled(strict=True, cache_bytes=x.nbytes):
        train(4)
        assert len(computed) == 4 and not kept() and MEMO.nbytes <= x.nbytes
    with fastgraph.enabled(strict=True):
        train(2)
        assert len(kept()) == 1 and MEMO.nbytes >= x.nbytes
        fastgraph.clear_cache()
        assert not kept()
        train(2)
        assert len(kept()) == 1
    assert not kept()
    try:
        fastgraph.enable()
        train(2)
        assert len(kept()) == 1
    finally:
        fastgraph.disable()
    assert not kept()


def test_it_goes_with_its_features() -> None:
    conv, x, index = sage(), features(), edges()
    with fastgraph.enabled(strict=True):
        for _ in range(3):
            conv(x, index)
        assert len(kept()) == 1
        del x
        gc.collect()
        MEMO.trim()
        assert not kept()


def test_small_and_sparse_graphs_are_left_alone(computed: list[Aggregation]) -> None:
    conv, x = sage(), features()
    sparse = random_edges(NODES, NODES, 2 * NODES - 1)
    small = edges()[:, : (1 << 18) // CHANNELS - 1]
    with fastgraph.enabled(strict=True):
        for index in (sparse, small):
            for _ in range(3):
                conv(x, index)
        assert len(computed) == 6 and not kept()


def test_without_a_check_of_content_nothing_is_kept(
    computed: list[Aggregation], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTGRAPH_CHECK_CACHE", "0")
    conv, x, index = sage(), features(), edges()
    with fastgraph.enabled(strict=True):
        assert not settings.current().check_cache
        for _ in range(3):
            conv(x, index)
        assert len(computed) == 3 and not kept()
