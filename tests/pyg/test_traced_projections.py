"""Messages with linear maps of few features of edges, which are products in the program."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

import fastgraph
from fastgraph.edge_programs.trace import trace
from fastgraph.edge_programs.traced import Argument, Traced
from tests.graphs import Case, all_cases, quantised, random_edges
from tests.pyg.traced_layers import second_derivative

pytestmark = [
    pytest.mark.filterwarnings("ignore::fastgraph.FallbackWarning"),
    pytest.mark.usefixtures("nothing_known"),
]

NODES, C, FEATURES = 14, 16, 3
EDGES = random_edges(NODES, NODES, 60)
DEGREES = torch.bincount(EDGES[1], minlength=NODES)


class Encoding(MessagePassing):
    """A user's layer: an MLP of the edge's features alone, whose first map has few results."""

    def __init__(self) -> None:
        super().__init__(aggr="max")
        self.nn = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, C))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, edge_attr=edge_attr)

    def message(self, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        return x_j * self.nn(edge_attr)


def pna() -> nn.Module:
    aggregators, scalers = ["mean", "max", "std"], ["identity", "amplification"]
    options = {"edge_dim": FEATURES, "deg": torch.bincount(DEGREES)}
    return pyg.PNAConv(C, C, aggregators, scalers, **options)


LAYERS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "GINEConv": (lambda: pyg.GINEConv(nn.Linear(C, C), edge_dim=FEATURES), 1),
    "ResGatedGraphConv": (lambda: pyg.ResGatedGraphConv(C, C, edge_dim=FEATURES), 3),
    "CGConv": (lambda: pyg.CGConv(C, FEATURES), 2),
    "GENConv": (lambda: pyg.GENConv(C, C, edge_dim=FEATURES), 1),
    "PNAConv": (pna, 1),  # of two maps that follow each other
    "own": (Encoding, 1),  # the first has too few results to gain
}
"""Layers, and the products that their programs have."""


@pytest.mark.parametrize("on_gpu", [False, True])
def test_on_gpus_features_are_mapped_before_the_program(on_gpu: bool) -> None:
    arguments = {
        "x_j": Argument("gathered", (C,)),
        "edge_attr": Argument("edge", (FEATURES,)),
    }
    traced = trace(Encoding().message, arguments, on_gpu=on_gpu)
    assert isinstance(traced, Traced)
    found = [made.operation for made in traced.program.instructions]
    assert ("product_t" in found) == (not on_gpu)


def agree(layer: nn.Module, x: Tensor, edges: Tensor, features: Tensor) -> None:
    """Output, all gradients and one of second order are upstream's, by a program."""
    leaves = [tensor.clone().requires_grad_() for tensor in (x, features)]
    inputs = [*leaves, *layer.parameters()]

    def call() -> Tensor:
        out: Tensor = layer(leaves[0], edges, leaves[1])
        return out

    def results() -> list[Tensor]:
        out = call()
        grads = torch.autograd.grad(
            (out * out).sum(), inputs, allow_unused=True, materialize_grads=True
        )
        return [out.detach(), *grads, second_derivative(lambda: call().sin().sum(), leaves[1])]

    expected = results()
    fastgraph.status().reset()
    with fastgraph.enabled(min_edges=0):
        found = results()
    row = fastgraph.status().row(type(layer).__name__)
    assert (row.programs > 0, dict(row.reasons)) == (True, {})
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    torch.manual_seed(0)
    make, products = LAYERS[name]
    layer = make().double()
    agree(layer, torch.randn(NODES, C).double(), EDGES, torch.randn(60, FEATURES).double())
    shown = fastgraph.explain(layer)
    assert shown.count(" = product_t ") == products
    assert f"edge {C}\n" not in shown


class Odd(MessagePassing):
    """A linear map, after another or not, of which one has no matrix or a bias of another shape."""

    def __init__(self, *shapes: tuple[tuple[int, ...], tuple[int, ...] | None], aggr: str) -> None:
        super().__init__(aggr=aggr)
        self.weights = nn.ParameterList(torch.randn(shape) for shape, _ in shapes)
        self.biases = nn.ParameterList(torch.randn(b) for _, b in shapes if b is not None)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, edge_attr=edge_attr)

    def maps(self, values: Tensor) -> Tensor:
        for k, weight in enumerate(self.weights):
            bias = self.biases[k] if k < len(self.biases) else None
            values = nn.functional.linear(values, weight, bias)
            values = values.unsqueeze(-1) if weight.dim() == 1 else values
        return values

    def message(self, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        return x_j * self.maps(edge_attr)


class OddMatrix(Odd):
    """The same, where the result is a matrix of each edge."""

    def message(self, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        return torch.bmm(x_j.unsqueeze(1), self.maps(edge_attr).view(-1, C, 2)).squeeze(1)


ONE, ROW, NUMBER = (1,), (1, C), ()
ODD: dict[str, tuple[tuple[tuple[int, ...], tuple[int, ...] | None], ...]] = {
    "one bias": (((C, FEATURES), ONE),),
    "a number as bias": (((C, FEATURES), NUMBER),),
    "a row as bias": (((C, FEATURES), ROW),),
    "one bias, then a map": (((5, FEATURES), ONE), ((C, 5), ROW)),
    "a map, then one bias": (((5, FEATURES), (5,)), ((C, 5), ONE)),
    "a vector, then a map": (((FEATURES,), None), ((C, 1), None)),
}
"""The shapes of the weights and biases of maps that follow each other."""


@pytest.mark.parametrize("aggr", ["sum", "max"])
@pytest.mark.parametrize("name", ODD)
def test_maps_that_no_module_has(name: str, aggr: str) -> None:
    torch.manual_seed(0)
    layer = Odd(*ODD[name], aggr=aggr).double()
    agree(layer, torch.randn(NODES, C).double(), EDGES, torch.randn(60, FEATURES).double())


@pytest.mark.parametrize("bias", [(2 * C,), (1, 2 * C)], ids=str)
def test_matrices_of_edges_with_a_bias(bias: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer = OddMatrix(((2 * C, FEATURES), bias), aggr="sum").double()
    agree(layer, torch.randn(NODES, C).double(), EDGES, torch.randn(60, FEATURES).double())


@pytest.mark.parametrize("bias", [ONE, NUMBER], ids=str)
def test_one_bias_of_matrices_of_edges_stays_with_upstream(bias: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer = OddMatrix(((2 * C, FEATURES), bias), aggr="sum")
    x, features = torch.randn(NODES, C), torch.randn(60, FEATURES)
    expected = layer(x, EDGES, features)
    fastgraph.status().reset()
    with fastgraph.enabled(min_edges=0):
        torch.testing.assert_close(layer(x, EDGES, features), expected)
    assert "a matrix of each edge" in str(fastgraph.status().row("OddMatrix").reasons)


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_graphs(case: Case) -> None:
    """Empty rows, hubs and duplicates; ties, as numbers and matrices have few values."""
    torch.manual_seed(0)
    layer = pyg.GINEConv(nn.Linear(C, C), edge_dim=FEATURES).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(quantised(*parameter.shape, seed=3))
    x = quantised(max(case.num_src, case.num_dst), C, seed=1)
    agree(layer, x, case.edge_index.long(), quantised(case.num_edges, FEATURES, seed=2))


def shown(channels: int, features: int, dtype: torch.dtype = torch.float32) -> str:
    layer = pyg.GINEConv(nn.Linear(channels, channels), edge_dim=features).to(dtype)
    x, e = torch.randn(NODES, channels, dtype=dtype), torch.randn(60, features, dtype=dtype)
    with fastgraph.enabled(min_edges=0):
        layer(x, EDGES, e)
    return fastgraph.explain(layer)


def test_products_that_gain_nothing_are_computed_before_the_program() -> None:
    assert "product_t" in shown(64, 32)
    assert "product_t" not in shown(64, 33)  # as much to compute as to read
    assert "product_t" not in shown(16, 9)
    assert "product_t" not in shown(8, 2)
    assert "product_t" not in shown(64, 4, torch.bfloat16)  # is computed in float32


def test_one_value_of_an_edge_is_multiplied_channel_by_channel() -> None:
    assert "edge_attr = edge 1\n" in shown(64, 1)
    assert "product" not in shown(64, 1)
