"""The cache of a first layer's aggregation of constant features, in DGL; no edit goes unnoticed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fastgraph
from fastgraph.graphs.memo import AGGREGATION, MEMO
from fastgraph.layers.aggregation import Aggregation
from tests.dgl.graphs import dgl
from tests.graphs import random_edges

import dgl.nn as dglnn  # isort: skip

NODES, CHANNELS, COUNT = 300, 64, 5000


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    fastgraph.clear_cache()
    yield
    fastgraph.clear_cache()


def graph(seed: int = 0) -> Any:
    return dgl.add_self_loop(dgl.graph(tuple(random_edges(NODES, NODES, COUNT, seed))))


def features() -> Tensor:
    return torch.randn(NODES, CHANNELS, generator=torch.Generator().manual_seed(0))


def kept() -> list[Any]:
    return [key for key in MEMO._entries if key[0] == AGGREGATION]


class Weighted(nn.Module):
    """Sums of messages with the weights of edges, as a program writes them."""

    def forward(self, g: Any, x: Tensor) -> Tensor:
        with g.local_scope():
            g.ndata["x"] = x
            g.update_all(dgl.function.u_mul_e("x", "w", "m"), dgl.function.sum("m", "y"))
            return g.ndata["y"]


LAYERS: dict[str, Callable[[], Any]] = {
    "GraphConv": lambda: dglnn.GraphConv(CHANNELS, CHANNELS),
    "GraphConv right": lambda: dglnn.GraphConv(CHANNELS, CHANNELS, norm="right"),
    "GraphConv without weight": lambda: dglnn.GraphConv(CHANNELS, CHANNELS, weight=False),
    "SAGEConv mean": lambda: dglnn.SAGEConv(CHANNELS, CHANNELS, "mean"),
    "SAGEConv gcn": lambda: dglnn.SAGEConv(CHANNELS, CHANNELS, "gcn"),
    "GINConv": lambda: dglnn.GINConv(nn.Linear(CHANNELS, 3), "sum"),
    "weighted sums": Weighted,
}


def made(name: str) -> tuple[Any, Any, Tensor]:
    torch.manual_seed(0)
    g = graph()
    g.edata["w"] = torch.rand(g.num_edges(), 1)
    return LAYERS[name](), g, features()


@pytest.mark.parametrize("name", LAYERS)
def test_it_is_computed_twice_and_every_step_is_equal(
    name: str, computed: list[Aggregation]
) -> None:
    conv, g, x = made(name)
    steps = []
    with fastgraph.enabled(strict=True):
        for _ in range(4):
            conv.zero_grad()
            out = conv(g, x)
            if out.requires_grad:
                out.square().sum().backward()
            steps.append([out.detach().clone(), *(p.grad for p in conv.parameters())])
        assert len(computed) == 2 and len(kept()) == 1
    for step in steps[1:]:
        assert all(map(torch.equal, step, steps[0]))
    torch.testing.assert_close(steps[3][0], conv(g, x).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["GraphConv without weight", "GINConv", "weighted sums"])
def test_what_a_caller_gets_is_its_own(name: str) -> None:
    conv, g, x = made(name)
    with fastgraph.enabled(strict=True), torch.no_grad():
        first = conv(g, x).clone()
        for _ in range(4):
            out = conv(g, x)
            assert torch.equal(out, first)
            out.zero_()


def test_what_a_hook_of_the_product_gets_is_its_own() -> None:
    conv, g, x = made("SAGEConv mean")
    conv.fc_neigh.register_forward_pre_hook(lambda _, given: (given[0].mul_(2),))
    with fastgraph.enabled(strict=True), torch.no_grad():
        first = conv(g, x).clone()
        for _ in range(4):
            assert torch.equal(conv(g, x), first)


def by_numpy(g: Any, x: Tensor) -> None:
    np.asarray(x)[3] += 1


def in_place(g: Any, x: Tensor) -> None:
    x.mul_(2)


def of_edges(g: Any, x: Tensor) -> None:
    g.add_edges(torch.tensor([0, 1]), torch.tensor([2, 3]), {"w": torch.ones(2, 1)})


@pytest.mark.parametrize("edit", [by_numpy, in_place, of_edges])
@pytest.mark.parametrize("name", LAYERS)
def test_edits_are_noticed(name: str, edit: Callable[[Any, Tensor], None]) -> None:
    conv, g, x = made(name)
    with fastgraph.enabled(strict=True), torch.no_grad():
        for _ in range(3):
            conv(g, x)
        for _ in range(3):
            edit(g, x)
            # A module that was never called, on tensors that were never seen.
            new = dgl.graph(g.edges(), num_nodes=NODES)
            new.edata["w"] = g.edata["w"].clone()
            torch.testing.assert_close(
                conv(g, x), copy.deepcopy(conv)(new, x.clone()), rtol=1e-5, atol=1e-5
            )


@pytest.mark.parametrize("name", LAYERS)
def test_features_with_a_gradient_and_new_graphs_are_never_kept(
    name: str, computed: list[Aggregation]
) -> None:
    conv, g, x = made(name)
    with fastgraph.enabled(strict=True):
        for _ in range(3):
            conv(g, x.clone().requires_grad_()).sum().backward()
        assert not computed and not kept()
        for seed in range(3):
            new = graph(seed)
            new.edata["w"] = torch.rand(new.num_edges(), 1)
            conv(new, x)
        assert len(computed) == 3 and not kept()


def test_learned_weights_are_never_kept(computed: list[Aggregation]) -> None:
    conv, g, x = made("weighted sums")
    g.edata["w"].requires_grad_()
    with fastgraph.enabled(strict=True):
        for _ in range(3):
            conv(g, x).sum().backward()
        assert not computed and not kept()


def test_narrowing_layers_multiply_first_and_keep_nothing(computed: list[Aggregation]) -> None:
    """As DGL does, which is less work than what would be kept."""
    g, x = graph(), features()
    convs = dglnn.GraphConv(CHANNELS, 7), dglnn.SAGEConv(CHANNELS, 7, "mean")
    with fastgraph.enabled(strict=True):
        for conv in convs:
            for _ in range(3):
                conv(g, x).sum().backward()
        assert not computed and not kept()


def test_it_is_bounded_by_bytes(computed: list[Aggregation]) -> None:
    conv, g, x = made("SAGEConv mean")
    with fastgraph.enabled(strict=True, cache_bytes=x.nbytes):
        for _ in range(4):
            conv(g, x)
        assert len(computed) == 4 and not kept()
