"""Messages with a matrix of each edge that is a linear map of the edge's own values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

import fastgraph
from tests.ab import Arguments, arguments
from tests.graphs import quantised, random_edges, square_cases
from tests.outcomes import differences
from tests.pyg.traced_layers import CHANNELS, EDGES, NODES, refused, second_derivative, x64

pytestmark = [
    pytest.mark.filterwarnings("ignore::fastgraph.FallbackWarning"),
    pytest.mark.usefixtures("nothing_known"),
]

FEATURES, OUT = 3, 5


def network(*, bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 2), nn.Tanh(), nn.Linear(2, CHANNELS * OUT, bias=bias))


def conv(aggr: Any = "add", *, bias: bool = True, **options: Any) -> nn.Module:
    return pyg.NNConv(CHANNELS, OUT, network(bias=bias), aggr=aggr, **options).double()


class OfBoth(MessagePassing):
    """A layer that multiplies what both ends have in common with a matrix of each edge."""

    def __init__(self) -> None:
        super().__init__(aggr="mean")
        self.nn = nn.Linear(FEATURES, CHANNELS * OUT)

    def forward(self, x: Any, edge_index: Tensor, e: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, e=e)

    def message(self, x_i: Tensor, x_j: Tensor, e: Tensor) -> Tensor:
        matrix = self.nn(e).unflatten(-1, (CHANNELS, OUT))
        return torch.bmm((x_i * x_j).unsqueeze(1), matrix).view(-1, OUT)


def calls() -> dict[str, Arguments]:
    return {
        case.name: arguments(
            quantised(case.num_src, CHANNELS),
            case.edge_index,
            quantised(case.num_edges, FEATURES, seed=1),
        )
        for case in square_cases()
        if case.edge_index.dtype is torch.int64
    }


LAYERS = {
    "sums": conv,
    "means": lambda: conv("mean"),
    "both": lambda: conv(["sum", "mean"], root_weight=False, bias=False),
    "no bias": lambda: conv(bias=False),
    "products of both ends": lambda: OfBoth().double(),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_upstreams(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    if name == "both":  # two aggregations side by side, which no map of upstream's follows
        monkeypatch.setattr(pyg.NNConv, "forward", _propagated)
    assert differences(LAYERS[name](), calls()) == {}
    (row,) = fastgraph.status().rows
    few = [reason for reason in row.reasons if "more memory" not in reason]
    assert not few and row.programs > 3


def _propagated(self: Any, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
    return self.propagate(edge_index, x=(x, x), edge_attr=edge_attr, size=None)


def test_two_kinds_of_nodes() -> None:
    edges = random_edges(9, 14, 60)
    call = arguments((quantised(9, CHANNELS), quantised(14, 2)), edges, x64(60, FEATURES))
    layer = pyg.NNConv((CHANNELS, 2), OUT, network()).double()
    assert differences(layer, {"pair": call}) == {}
    assert fastgraph.status().rows[0].programs == 1


def test_second_derivatives() -> None:
    layer, x, e = conv(), x64().requires_grad_(), x64(EDGES.shape[1], FEATURES)
    expected = second_derivative(lambda: layer(x, EDGES, e).square().sum(), x)
    with fastgraph.enabled(min_edges=0):
        found = second_derivative(lambda: layer(x, EDGES, e).square().sum(), x)
    torch.testing.assert_close(found, expected)
    assert fastgraph.status().rows[0].programs == 1


MATRICES = "its message is no edge program: it has a product with a matrix of each edge"


@pytest.mark.parametrize("aggr", ["max", "std", ["sum", "min"]])
def test_other_reductions_are_left_to_upstream(aggr: Any) -> None:
    layer = pyg.NNConv(CHANNELS, OUT, network(), aggr=aggr, root_weight=False, bias=False)
    assert refused(layer.double(), x64(), EDGES, x64(EDGES.shape[1], FEATURES)) == MATRICES


def test_what_follows_such_a_product_is_left_to_upstream() -> None:
    class Following(OfBoth):
        def message(self, x_i: Tensor, x_j: Tensor, e: Tensor) -> Tensor:
            return OfBoth.message(self, x_i, x_j, e).relu()

    assert refused(Following().double(), x64(), EDGES, x64(EDGES.shape[1], FEATURES)) == MATRICES


def test_few_edges_of_many_nodes_are_left_to_upstream() -> None:
    """Sums of nodes by hidden value would be larger than the matrices of their edges."""
    edges = random_edges(NODES, NODES, 6)
    layer = pyg.NNConv(CHANNELS, OUT, nn.Linear(30, CHANNELS * OUT)).double()
    assert refused(layer, x64(), edges, x64(6, 30)) == (
        "its sums of nodes would take more memory than its matrices of edges"
    )
