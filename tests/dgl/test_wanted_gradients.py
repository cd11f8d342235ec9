"""Gradients that nobody asks for are not computed, in all layers of DGL with a route."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastgraph
from tests.dgl.graphs import ORDINARY, block, dgl, of_case, routed_classes, without_self_loops
from tests.dgl.test_layers import IN, SUMS
from tests.graphs import Case
from tests.wanted import assert_only_wanted_gradients, penalty, penalty_gradients

import dgl.nn as dglnn  # isort: skip

ATTENTION: dict[str, Callable[[], nn.Module]] = {
    "GATConv": lambda: dglnn.GATConv(IN, 5, 3, allow_zero_in_degree=True),
    "GATConv residual": lambda: dglnn.GATConv(IN, 5, 3, residual=True, allow_zero_in_degree=True),
    "GATv2Conv": lambda: dglnn.GATv2Conv(IN, 5, 3, allow_zero_in_degree=True),
    "GATv2Conv shared": lambda: dglnn.GATv2Conv(
        IN, 5, 3, share_weights=True, allow_zero_in_degree=True
    ),
    "DotGatConv": lambda: dglnn.DotGatConv(IN, 5, 3, allow_zero_in_degree=True),
    "AGNNConv": lambda: dglnn.AGNNConv(allow_zero_in_degree=True),
}
EVERY = {name: make for name, make in SUMS.items() if "mean, widening" not in name} | ATTENTION


@pytest.fixture(autouse=True)
def _all_products_in_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastgraph.layers.linear.LARGE", 0)


def run(module: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = module(of_case(ORDINARY), x)
    return out


def features(dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(4)
    return torch.randn(ORDINARY.num_src, IN, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("name", EVERY)
def test_layers(name: str) -> None:
    torch.manual_seed(0)
    module = EVERY[name]()
    # Its route has a product of two vectors for each node in its backward pass.
    is_other = name == "AGNNConv"
    name = type(module).__name__
    x = features()
    assert_only_wanted_gradients(
        module, run, x, name, same_products=not is_other, more=x.numel() if is_other else 0
    )


@pytest.mark.parametrize("name", EVERY)
def test_layers_on_blocks(name: str) -> None:
    """Their destinations are the first of the sources, whose gradients are one in memory."""
    torch.manual_seed(0)
    module = EVERY[name]()
    mfg = block(
        Case("few destinations", ORDINARY.edge_index[:, ORDINARY.edge_index[1] < 9], 30, 30)
    )
    x = features()[: mfg.num_src_nodes()].detach().requires_grad_()
    is_other = name == "AGNNConv"
    name = type(module).__name__
    assert_only_wanted_gradients(
        module,
        lambda module, x: module(mfg, x),
        x,
        name,
        same_products=not is_other,
        more=x.numel() if is_other else 0,
    )


E = torch.linspace(-1, 1, 4 * ORDINARY.num_edges).view(-1, 4)
TYPES = {"etypes": torch.arange(ORDINARY.num_edges) % 3}
KINDS = {
    "ntype": torch.arange(ORDINARY.num_src) % 2,
    "etype": torch.arange(ORDINARY.num_edges) % 3,
}

POSITIONS = torch.linspace(-1, 1, 3 * ORDINARY.num_src).view(-1, 3).sin()


class _OfPositions(nn.Module):
    """``EGNNConv`` as a function of positions alone, whose gradients are forces."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, graph: Any, positions: Tensor, edge_feat: Tensor) -> Tensor:
        out, moved = self.conv(graph, torch.ones(len(positions), IN), positions, edge_feat)
        return torch.cat([out, moved], 1)


# What upstream multiplies for each edge, in no matrix product, routes do for each node in one.
BY_NODES = {"NNConv": ORDINARY.num_src * IN * 5 * 4, "EdgeGATConv": ORDINARY.num_src * 10 * 4}

OTHERS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "APPNPConv": (lambda: dglnn.APPNPConv(2, 0.1), {}),
    "ChebConv": (lambda: dglnn.ChebConv(IN, 4, 3), {"lambda_max": [2.0]}),
    "GINConv": (lambda: dglnn.GINConv(nn.Linear(IN, 4), "sum"), {}),
    "GINConv max": (lambda: dglnn.GINConv(nn.Linear(IN, 4), "max"), {}),
    "GatedGraphConv": (lambda: dglnn.GatedGraphConv(IN, 8, 2, 1), {}),
    "SGConv": (lambda: dglnn.SGConv(IN, 4, 2, allow_zero_in_degree=True), {}),
    "TAGConv": (lambda: dglnn.TAGConv(IN, 4), {}),
    "HGTConv": (lambda: dglnn.HGTConv(IN, 3, 2, 2, 3, dropout=0.0), KINDS),
    "RelGraphConv": (lambda: dglnn.RelGraphConv(IN, 4, 3), TYPES),
    "RelGraphConv basis": (lambda: dglnn.RelGraphConv(IN, 9, 3, "basis", 2), TYPES),
    "EdgeGATConv": (
        lambda: dglnn.EdgeGATConv(IN, 4, 5, 2, allow_zero_in_degree=True),
        {"edge_feat": E},
    ),
    "EGATConv": (lambda: dglnn.EGATConv(IN, 4, 2, 5, 3), {"efeats": E}),
    "EdgeConv": (lambda: dglnn.EdgeConv(IN, 5, allow_zero_in_degree=True), {}),
    "NNConv": (
        lambda: dglnn.NNConv(
            IN, 5, nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 5 * IN)), "mean"
        ),
        {"efeat": E},
    ),
    "CFConv": (lambda: dglnn.CFConv(IN, 4, 8, 5), {"edge_feats": E}),
    "EGNNConv": (lambda: dglnn.EGNNConv(IN, 8, 5, 4), {"coord_feat": POSITIONS, "edge_feat": E}),
    "EGNNConv positions": (lambda: _OfPositions(dglnn.EGNNConv(IN, 8, 5, 4)), {"edge_feat": E}),
    "GCN2Conv": (
        lambda: dglnn.GCN2Conv(IN, 1, allow_zero_in_degree=True),
        {"feat_0": torch.ones(ORDINARY.num_src, IN)},
    ),
    "GMMConv": (
        lambda: dglnn.GMMConv(IN, 8, 4, 3, allow_zero_in_degree=True),
        {"pseudo": E},
    ),
}
if hasattr(dglnn, "GatedGCNConv"):  # not in DGL 1.1
    OTHERS["GatedGCNConv"] = (lambda: dglnn.GatedGCNConv(IN, 4, 5), {"edge_feat": E})


@pytest.mark.parametrize("name", OTHERS)
def test_other_layers(name: str) -> None:
    torch.manual_seed(0)
    make, more = OTHERS[name]
    graph = of_case(ORDINARY)
    if name.startswith("EGNNConv"):  # DGL's gradients of self-loops are NaN
        graph = without_self_loops(ORDINARY)
    if name == "EGATConv":
        graph = dgl.add_self_loop(graph)
        more = {"efeats": torch.linspace(-1, 1, 4 * graph.num_edges()).view(-1, 4)}

    def run(module: nn.Module, x: Tensor) -> Tensor:
        out = module(graph, x, **more)
        return out[0] if isinstance(out, tuple) else out

    by_nodes = BY_NODES.get(name, 0)
    assert_only_wanted_gradients(make(), run, features(), same_products=False, more=by_nodes)


def test_no_class_is_forgotten() -> None:
    made = [*(make() for make in EVERY.values()), *(make() for make, _ in OTHERS.values())]
    assert routed_classes() <= {type(module) for module in made}


@pytest.mark.parametrize("name", ["GraphConv both", "SAGEConv mean", "SAGEConv pool", *ATTENTION])
def test_gradient_penalties(name: str) -> None:
    torch.manual_seed(0)
    module = EVERY[name]().double()
    x = features(torch.float64)
    with fastgraph.enabled(min_edges=0):
        found = penalty_gradients(module, run, x)
    assert fastgraph.status().row(type(module).__name__).routed > 0
    # Along a direction: DGL's own softmax has no second derivative.
    step = 1e-5
    ahead = [torch.randn_like(p) for p in module.parameters()]
    values = []
    for steps in (1, -2):
        with torch.no_grad():
            for parameter, by in zip(module.parameters(), ahead, strict=True):
                parameter += steps * step * by
        values.append(penalty(module, run, x).detach())
    expected = (values[0] - values[1]) / (2 * step)
    along = sum((g * by).sum() for g, by in zip(found, ahead, strict=True) if g is not None)
    torch.testing.assert_close(along, expected, rtol=1e-5, atol=1e-5)
