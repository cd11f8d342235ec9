"""Gradients that nobody asks for are not computed in layers whose messages are traced."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg

from tests.pyg.traced_layers import CHANNELS, EDGES, NODES, Scaled
from tests.wanted import assert_only_wanted_gradients

FEATURES = torch.linspace(-1, 1, 2 * EDGES.shape[1]).view(-1, 2)
ROWS = torch.linspace(-1, 1, CHANNELS * EDGES.shape[1]).view(-1, CHANNELS)

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "ResGatedGraphConv": (lambda: pyg.ResGatedGraphConv(CHANNELS, 3), ()),
    "ResGatedGraphConv, edges": (
        lambda: pyg.ResGatedGraphConv(CHANNELS, 3, edge_dim=2),
        (FEATURES,),
    ),
    "CGConv": (lambda: pyg.CGConv(CHANNELS, 2), (FEATURES,)),
    "GINEConv": (lambda: pyg.GINEConv(nn.Linear(CHANNELS, 3)), (ROWS,)),
    "GENConv": (lambda: pyg.GENConv(CHANNELS, 3, learn_t=True), ()),
    "GENConv, max": (lambda: pyg.GENConv(CHANNELS, CHANNELS, aggr="max"), (ROWS,)),
    "FiLMConv": (lambda: pyg.FiLMConv(CHANNELS, 3), ()),
    "EdgeConv": (lambda: pyg.EdgeConv(nn.Linear(2 * CHANNELS, 3)), ()),
    "LEConv": (lambda: pyg.LEConv(CHANNELS, 3), ()),
    "FAConv": (lambda: pyg.FAConv(CHANNELS), ()),
    "AGNNConv": (lambda: pyg.AGNNConv(), ()),
    "SuperGATConv": (lambda: pyg.SuperGATConv(CHANNELS, 3, heads=2), ()),
    "a user's": (Scaled, ()),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    torch.manual_seed(0)
    make, features = LAYERS[name]
    x = torch.randn(NODES, CHANNELS, requires_grad=True)

    def run(module: nn.Module, x: Tensor) -> Tensor:
        given = (x, EDGES) if name == "FAConv" else (EDGES,)
        out: Tensor = module(x, *given, *features)
        return out

    module = make()
    # A linear map of both ends is two products of nodes, where upstream has one of edges.
    assert_only_wanted_gradients(module, run, x, type(module).__name__, same_products=False)
