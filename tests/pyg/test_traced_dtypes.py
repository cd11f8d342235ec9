"""Edge programs in half types, of several dtypes and under autocast: as exact as upstream."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.aggr import PowerMeanAggregation
from torch_geometric.utils import softmax

import fastgraph
from tests.graphs import hub_edges, random_edges

pytestmark = [
    pytest.mark.filterwarnings("ignore::fastgraph.FallbackWarning"),
    pytest.mark.usefixtures("nothing_known"),
]

ROWS, WIDTH, FEATURES = 60, 16, 4
GRAPH = torch.cat([random_edges(ROWS, ROWS - 5, 700), hub_edges(ROWS, 250)], dim=1)
"""With a hub, duplicates and rows of no edges."""

HALVES = [torch.bfloat16, torch.float16]


class Own(MessagePassing):
    """A user's layer, whose message gets its parameters and a weight of each edge."""

    def __init__(self, message: Callable[..., Tensor], aggr: Any = "sum") -> None:
        super().__init__(aggr=aggr)
        self.own = message
        self.lin = nn.Linear(2 * WIDTH, WIDTH)
        self.att = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, edge_index: Tensor, weight: Any = None) -> Tensor:
        return self.propagate(edge_index, x=x, weight=weight)

    def message(self, x_i: Tensor, x_j: Tensor, weight: Any, index: Tensor) -> Tensor:
        return self.own(self, x_i, x_j, weight, index)


def gated(self: Any, x_i: Tensor, x_j: Tensor, weight: Any, index: Tensor) -> Tensor:
    return torch.sigmoid(self.lin(torch.cat([x_i, x_j], dim=-1))) * F.leaky_relu(x_j, 0.2)


def weighted(self: Any, x_i: Tensor, x_j: Tensor, weight: Any, index: Tensor) -> Tensor:
    return (x_i - x_j).tanh() * weight


def attending(self: Any, x_i: Tensor, x_j: Tensor, weight: Any, index: Tensor) -> Tensor:
    return softmax(((x_i + x_j) * self.att).sum(-1, keepdim=True), index) * x_j


def attending_in_float32(self: Any, x_i: Tensor, x_j: Tensor, weight: Any, index: Tensor) -> Tensor:
    scores = (x_i * x_j).sum(-1, keepdim=True).float() / 4
    return softmax(scores, index).to(x_j.dtype) * x_j


def of_two_layers(self: Any, x_i: Tensor, x_j: Tensor, weight: Any, index: Tensor) -> Tensor:
    return F.relu(self.lin(torch.cat([x_i, x_j - x_i], dim=-1)))


def masked(self: Any, x_i: Tensor, x_j: Tensor, weight: Any, index: Tensor) -> Tensor:
    return (x_i > x_j).to(x_j.dtype) * x_j.float() * self.att


PNA = {
    "aggregators": ["mean", "min", "max", "std"],
    "scalers": ["identity", "amplification"],
    "deg": torch.bincount(torch.bincount(GRAPH[1], minlength=ROWS)),
}

Features = tuple[int, ...]

# By name: the layer, and the shape of its features of edges if it has some.
LAYERS: dict[str, tuple[Callable[[], nn.Module], Features | None]] = {
    "gated": (lambda: Own(gated), None),
    "gated max": (lambda: Own(gated, "max"), None),
    "gated mean, max and std": (lambda: Own(gated, ["mean", "max", "std"]), None),
    "weighted": (lambda: Own(weighted), (1,)),
    "attending": (lambda: Own(attending), None),
    "attending in float32": (lambda: Own(attending_in_float32), None),
    "a layer of both": (lambda: Own(of_two_layers, "min"), None),
    "masked": (lambda: Own(masked), None),
    "ResGatedGraphConv": (lambda: pyg.ResGatedGraphConv(WIDTH, WIDTH), None),
    "GINEConv": (lambda: pyg.GINEConv(nn.Linear(WIDTH, 8), edge_dim=FEATURES), (FEATURES,)),
    "CGConv": (lambda: pyg.CGConv(WIDTH, FEATURES), (FEATURES,)),
    "FiLMConv": (lambda: pyg.FiLMConv(WIDTH, 8), None),
    "GENConv of a power": (
        lambda: pyg.GENConv(WIDTH, WIDTH, PowerMeanAggregation(learn=True, channels=WIDTH)),
        None,
    ),
    "GENConv of a softmax": (
        lambda: pyg.GENConv(WIDTH, WIDTH, aggr="softmax", t=0.1, learn_t=True, norm="layer"),
        None,
    ),
    "GENConv max": (lambda: pyg.GENConv(WIDTH, WIDTH, aggr="max", norm="layer"), None),
    "PNAConv": (lambda: pyg.PNAConv(WIDTH, WIDTH, edge_dim=FEATURES, **PNA), (FEATURES,)),
    "AGNNConv": (pyg.AGNNConv, None),
}


def results(
    layer: nn.Module, x: Tensor, edge_attr: Tensor | None, autocast: torch.dtype | None = None
) -> list[Tensor]:
    """The output and the gradients of features and parameters, of a copy of a layer."""
    layer = copy.deepcopy(layer)
    given = [t.clone().requires_grad_() for t in (x, edge_attr) if t is not None]
    context = torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext()
    with context:
        out = layer(given[0], GRAPH, *given[1:])
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    leaves = [*given, *layer.parameters()]
    found = torch.autograd.grad(out, leaves, cotangent.bfloat16().to(out.dtype), allow_unused=True)
    return [out.detach(), *(torch.zeros(()) if g is None else g for g in found)]


def as_exact_as_upstream(
    layer: nn.Module,
    x: Tensor,
    edge_attr: Tensor | None = None,
    autocast: torch.dtype | None = None,
) -> None:
    """A layer is routed, its results have upstream's dtypes, and errors no larger than upstream's.

    Errors are those of float64, relative to the size of all values. Of single values the largest
    tell of a maximum, or a number near a bound, on which side of another rounding puts it.
    """
    upstream = results(layer, x, edge_attr, autocast)
    x_64, edge_attr_64 = x.double(), None if edge_attr is None else edge_attr.double()
    exact = results(copy.deepcopy(layer).double(), x_64, edge_attr_64)
    fastgraph.status().reset()
    with fastgraph.enabled(min_edges=0):
        ours = results(layer, x, edge_attr, autocast)
    row = fastgraph.status().row(type(layer).__name__)
    assert (row.routed, dict(row.reasons)) == (1, {})
    eps = torch.finfo(autocast or x.dtype).eps
    for number, (own, theirs, truth) in enumerate(zip(ours, upstream, exact, strict=True)):
        assert own.dtype is theirs.dtype and own.shape == theirs.shape, number
        error, allowed = ((t.double() - truth).norm() for t in (own, theirs))
        assert error <= 2 * allowed + eps / 2 * truth.norm(), (number, error, allowed)


def made(name: str, dtype: torch.dtype) -> tuple[nn.Module, Tensor, Tensor | None]:
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    edge_attr = None if shape is None else torch.randn(GRAPH.shape[1], *shape).to(dtype)
    return make().to(dtype), torch.randn(ROWS, WIDTH).to(dtype), edge_attr


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_a_half_type(name: str, dtype: torch.dtype) -> None:
    as_exact_as_upstream(*made(name, dtype))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_under_autocast(name: str, dtype: torch.dtype) -> None:
    as_exact_as_upstream(*made(name, torch.float32), autocast=dtype)
