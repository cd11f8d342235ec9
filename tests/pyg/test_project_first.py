"""A layer multiplies before it aggregates where that is less work, to the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import GraphConv, SAGEConv

import fastgraph
from fastgraph.graphs.edges import Edges
from fastgraph.layers.aggregation import Aggregation
from fastgraph.layers.narrowing import projects_first
from tests.ab import arguments, assert_same
from tests.graphs import hub_edges, random_edges

# The order of products is decided before a backend is asked for anything.
pytestmark = pytest.mark.repeats

NODES, COUNT, WIDE, NARROW = 200, 3000, 32, 5


def sage(**options: Any) -> SAGEConv:
    torch.manual_seed(0)
    return SAGEConv(WIDE, NARROW, **options)


def features(num_nodes: int = NODES, width: int = WIDE) -> Tensor:
    return torch.randn(num_nodes, width, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTGRAPH_PROJECT_FIRST", "1")


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of what was aggregated."""
    found: list[int] = []
    compute = Aggregation.compute

    def recording(aggregation: Aggregation) -> Tensor:
        found.append(aggregation.x.shape[-1])
        return compute(aggregation)

    monkeypatch.setattr(Aggregation, "compute", recording)
    return found


def width_of(widths: list[int], conv: Any, *call: Any) -> int:
    """How wide is what a call aggregates."""
    widths.clear()
    with fastgraph.enabled(strict=True):
        conv(*call)
    (width,) = widths
    return width


CONVS = {
    "SAGE mean": sage,
    "SAGE sum": lambda: sage(aggr="sum"),
    "SAGE normalised": lambda: sage(normalize=True),
    "SAGE projecting": lambda: sage(project=True),
    "SAGE without bias": lambda: sage(bias=False),
    "SAGE without root": lambda: sage(root_weight=False),
    "SAGE without either": lambda: sage(root_weight=False, bias=False, normalize=True),
    "GraphConv": lambda: GraphConv(WIDE, NARROW),
    "GraphConv mean": lambda: GraphConv(WIDE, NARROW, aggr="mean"),
}


@pytest.mark.parametrize("edges", [random_edges(NODES, NODES, COUNT), hub_edges(NODES, COUNT)])
@pytest.mark.parametrize("name", CONVS)
def test_outputs_and_gradients_are_upstreams(name: str, edges: Tensor, widths: list[int]) -> None:
    conv = CONVS[name]()
    assert width_of(widths, conv, features().requires_grad_(), edges) == NARROW
    assert_same(conv, arguments(features(), edges))


def test_nodes_without_neighbours_get_the_bias(widths: list[int]) -> None:
    edges = random_edges(NODES, NODES // 2, COUNT)
    conv = sage(aggr="mean")
    assert width_of(widths, conv, features().requires_grad_(), edges) == NARROW
    assert_same(conv, arguments(features(), edges))


def test_edge_weights_and_their_gradients(widths: list[int]) -> None:
    conv, edges = GraphConv(WIDE, NARROW), random_edges(NODES, NODES, COUNT)
    weight = torch.rand(COUNT).requires_grad_()
    assert width_of(widths, conv, features().requires_grad_(), edges, weight) == NARROW
    assert_same(conv, arguments(features(), edges, weight))


def test_two_sets_of_nodes(widths: list[int]) -> None:
    torch.manual_seed(0)
    conv = SAGEConv((WIDE, 7), NARROW)
    few = random_edges(NODES // 2, NODES, COUNT)
    x = features(NODES // 2).requires_grad_(), features(NODES, 7)
    assert width_of(widths, conv, x, few) == NARROW
    assert_same(conv, arguments(x, few))
    without = x[0], None
    assert width_of(widths, conv, without, few, (NODES // 2, NODES)) == NARROW
    assert_same(conv, arguments(without, few, (NODES // 2, NODES)))
    # Of many sources, few would be multiplied as destinations.
    many = random_edges(40 * NODES, NODES, COUNT)
    x = features(40 * NODES).requires_grad_(), features(NODES, 7)
    assert width_of(widths, conv, x, many) == WIDE
    assert_same(conv, arguments(x, many))


def test_second_derivatives() -> None:
    conv, edges = sage().double(), random_edges(NODES, NODES, COUNT)

    def gradient() -> Tensor:
        x = features().double().requires_grad_()
        (first,) = torch.autograd.grad(conv(x, edges).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    expected = gradient()
    with fastgraph.enabled(strict=True):
        torch.testing.assert_close(gradient(), expected)


def observed(conv: SAGEConv) -> SAGEConv:
    conv.lin_l.register_forward_pre_hook(lambda *_: None)
    return conv


def parametrised(conv: SAGEConv) -> SAGEConv:
    torch.nn.utils.parametrizations.weight_norm(conv.lin_l)
    return conv


@pytest.mark.parametrize(
    "conv",
    [
        observed(sage()),
        parametrised(sage()),
        sage(aggr="max"),
        SAGEConv(WIDE, WIDE),
        sage().bfloat16(),
    ],
    ids=["hook", "computed weight", "maximum", "as wide", "short dtype"],
)
def test_what_cannot_be_exchanged_is_not(conv: Any, widths: list[int]) -> None:
    x = features().to(conv.lin_r.weight.dtype).requires_grad_()
    assert width_of(widths, conv, x, random_edges(NODES, NODES, COUNT)) == WIDE


def test_never_where_bits_are_to_stay(widths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    call = sage(), features().requires_grad_(), random_edges(NODES, NODES, COUNT)
    torch.use_deterministic_algorithms(True)
    try:
        assert width_of(widths, *call) == WIDE
    finally:
        torch.use_deterministic_algorithms(False)
    with torch.autocast("cpu", torch.bfloat16):
        assert width_of(widths, *call) == WIDE
    monkeypatch.setenv("FASTGRAPH_PROJECT_FIRST", "0")
    assert width_of(widths, *call) == WIDE


def test_by_default_where_the_matrix_gets_no_gradient(
    widths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTGRAPH_PROJECT_FIRST", "")
    conv, x, edges = sage(), features(), random_edges(NODES, NODES, COUNT)
    assert width_of(widths, conv, x, edges) == WIDE
    with torch.no_grad():
        assert width_of(widths, conv, x, edges) == NARROW
    conv.lin_l.weight.requires_grad_(False)
    assert width_of(widths, conv, x.requires_grad_(), edges) == NARROW
    assert_same(conv, arguments(features(), edges))
    with torch.no_grad():  # errors of sums may grow on graphs with hubs
        assert width_of(widths, sage(aggr="sum"), x, edges) == WIDE
        assert width_of(widths, GraphConv(WIDE, NARROW), x, edges) == WIDE


@pytest.mark.parametrize("num_edges", [2000, 40_000])
def test_a_first_layer_counts_what_its_gradients_take(num_edges: int) -> None:
    """Its aggregation has no backward pass, and where features stay, none forward either."""

    def is_first(num_out: int, x: Tensor, is_trained: bool = True) -> bool:
        edges = Edges(random_edges(NODES, NODES, num_edges))
        weight = torch.empty(num_out, 64, requires_grad=is_trained)
        with fastgraph.enabled():
            return projects_first(Aggregation(x, edges, None, "mean", NODES, 0, "split"), weight)

    x, hidden = features(width=64), features(width=64).requires_grad_()
    is_sparse = num_edges == 2000
    assert is_first(40, hidden) and is_first(8, hidden)
    with torch.no_grad():
        assert is_first(40, x)
    assert not is_first(40, x)
    # Two passes of 8 channels, or one of 64; of many edges a checksum of the features.
    assert is_first(8, x) is is_sparse
    assert is_first(8, x, is_trained=False)
