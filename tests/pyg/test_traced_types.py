"""Messages that take types of edges: products with the matrices and rows of types."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

import fastgraph
from fastgraph.edge_programs.relations import pairs_of
from tests.ab import Arguments, arguments
from tests.graphs import all_cases, quantised, random_edges
from tests.outcomes import difference, differences, outcome
from tests.pyg.traced_layers import CHANNELS, EDGES, NODES, refused, second_derivative, x64

pytestmark = [
    pytest.mark.filterwarnings("ignore::fastgraph.FallbackWarning"),
    pytest.mark.usefixtures("nothing_known"),
]

RELATIONS = 5


class OfTypes(MessagePassing):
    """A layer of matrices and rows, which is never made itself: PyG would keep its `propagate`."""

    def __init__(self, aggr: str = "max", **options: Any) -> None:
        super().__init__(aggr=aggr, **options)
        self.weight = nn.Parameter(torch.randn(RELATIONS, CHANNELS, 3))
        self.rows = nn.Embedding(RELATIONS, 3)

    def forward(self, x: Any, edge_index: Tensor, kinds: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, kinds=kinds)


class Typed(OfTypes):
    """A user's layer, of matrices and rows that types choose."""

    def message(self, x_i: Tensor, x_j: Tensor, kinds: Tensor) -> Tensor:
        own = torch.matmul(x_i[:, None], self.weight[kinds]).squeeze(1)
        other = torch.bmm(x_j[:, None], self.weight.index_select(0, kinds)).squeeze(1)
        return own.tanh() * other + x_j[:, :1] * self.rows(kinds) + x_i[:, 1:]


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "FastRGCN": lambda: pyg.FastRGCNConv(CHANNELS, 3, RELATIONS),
    "FastRGCN, sums": lambda: pyg.FastRGCNConv(CHANNELS, 3, RELATIONS, aggr="add"),
    "FastRGCN, bases": lambda: pyg.FastRGCNConv(CHANNELS, 3, RELATIONS, num_bases=2),
    "RGAT": lambda: pyg.RGATConv(CHANNELS, 3, RELATIONS, heads=2),
    "RGAT, bases": lambda: pyg.RGATConv(CHANNELS, 3, RELATIONS, num_bases=2, concat=False),
    "RGAT, products": lambda: pyg.RGATConv(
        CHANNELS, 3, RELATIONS, heads=2, dim=2, attention_mode="multiplicative-self-attention"
    ),
    "a user's": Typed,
}


def kinds_of(edges: Tensor, seed: int = 0, count: int = RELATIONS) -> Tensor:
    """Types of edges, of which one has none."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(count - 1, edges.shape[1:], generator=generator)


def calls() -> dict[str, Arguments]:
    """Graphs with hubs, duplicates, nodes and rows without edges, and without any edges."""
    return {
        case.name: arguments(
            quantised(case.num_src, CHANNELS), case.edge_index, kinds_of(case.edge_index)
        )
        for case in all_cases()
        if case.num_src == case.num_dst and case.edge_index.dtype is torch.int64
    }


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_upstreams(name: str, flow: str) -> None:
    torch.manual_seed(0)
    layer: Any = LAYERS[name]().double()
    layer.flow = flow
    assert differences(layer, calls()) == {}
    (row,) = fastgraph.status().rows
    assert row.programs == len(calls()), row


def test_two_kinds_of_nodes() -> None:
    edges = random_edges(9, 14, 60)
    x = quantised(9, CHANNELS), quantised(14, CHANNELS, seed=1)
    for layer in (Typed(), pyg.FastRGCNConv((CHANNELS, CHANNELS), 3, RELATIONS)):
        assert differences(layer.double(), {"pair": arguments(x, edges, kinds_of(edges))}) == {}
    assert [row.programs for row in fastgraph.status().rows] == [1, 1]


def test_edges_of_32_bits() -> None:
    for make in LAYERS.values():
        layer, kinds = make().double(), kinds_of(EDGES)
        right = outcome(layer, arguments(x := x64(), EDGES, kinds))
        with fastgraph.enabled(min_edges=0):
            ours = outcome(layer, arguments(x, EDGES.int(), kinds))
        assert difference(right, ours) is None


@pytest.mark.parametrize("name", ["FastRGCN", "RGAT"])
def test_second_derivatives(name: str) -> None:
    layer, x = LAYERS[name]().double(), x64().requires_grad_()
    expected = second_derivative(lambda: layer(x, EDGES, kinds_of(EDGES)).square().sum(), x)
    with fastgraph.enabled(min_edges=0):
        found = second_derivative(lambda: layer(x, EDGES, kinds_of(EDGES)).square().sum(), x)
    torch.testing.assert_close(found, expected)
    assert sum(row.programs for row in fastgraph.status().rows) == 1


@pytest.mark.parametrize("gives", [True, False])
def test_attention_weights(gives: bool) -> None:
    layer = pyg.RGATConv(CHANNELS, 3, RELATIONS, heads=2).double()
    call = arguments(x64(), EDGES, kinds_of(EDGES), return_attention_weights=gives)
    assert differences(layer, {"weights": call}) == {}
    assert fastgraph.status().rows[0].programs == 1


def test_types_that_are_edited_in_place() -> None:
    layer, x, kinds = pyg.FastRGCNConv(CHANNELS, 3, RELATIONS).double(), x64(), kinds_of(EDGES)
    with fastgraph.enabled(min_edges=0):
        layer(x, EDGES, kinds)
        kinds.add_(1)
        found = layer(x, EDGES, kinds)
    torch.testing.assert_close(found, layer(x, EDGES, kinds))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("wrong", [-1, RELATIONS])
def test_types_that_are_none(name: str, wrong: int) -> None:
    """Upstream's error, or its result: an index of -1 is the last of some."""
    layer, kinds = LAYERS[name]().double(), kinds_of(EDGES)
    kinds[3] = wrong
    call = arguments(x64(), EDGES, kinds)
    upstream = outcome(layer, call)
    with fastgraph.enabled(min_edges=0):
        ours = outcome(layer, call)
    assert ours[:2] == upstream[:2] and difference(upstream, ours) is None
    assert fastgraph.status().rows[0].routed == 0


class OfRows(OfTypes):
    """A user's layer that computes nothing for pairs of nodes and types."""

    def message(self, x_j: Tensor, kinds: Tensor) -> Tensor:
        return x_j[:, 1:] * self.weight[kinds][:, 0]


@pytest.mark.parametrize("wrong", [-1, RELATIONS])
def test_rows_of_types_that_are_none(wrong: int) -> None:
    layer, kinds = OfRows("sum").double(), kinds_of(EDGES)
    call = arguments(x64(), EDGES, kinds)
    with fastgraph.enabled(min_edges=0):
        layer(*call[0])
        assert fastgraph.status().rows[0].routed == 1
        kinds[3] = wrong
        ours = outcome(layer, call)
    upstream = outcome(layer, call)
    assert ours[:2] == upstream[:2] and difference(upstream, ours) is None
    assert fastgraph.status().rows[0].routed == 1


def of_computed_types(self: Any, x_j: Tensor, kinds: Tensor) -> Tensor:
    return x_j * self.rows(kinds * 1)[:, :1]


def padded(self: Any, x_j: Tensor, kinds: Tensor) -> Tensor:
    return x_j * nn.functional.embedding(kinds, self.rows.weight, padding_idx=0)[:, :1]


REFUSED = {
    of_computed_types: "it computes with torch.int64",
    padded: "it computes with torch.int64",
}


@pytest.mark.parametrize("function", REFUSED, ids=lambda function: function.__name__)
def test_other_uses_of_types(function: Any) -> None:
    message = types.FunctionType(function.__code__, globals(), "message")
    layer = type("Own", (OfTypes,), {"message": message})().double()
    assert REFUSED[function] in refused(layer, x64(), EDGES, kinds_of(EDGES))


def test_configurations_that_are_left_to_upstream() -> None:
    x, kinds = x64(), kinds_of(EDGES)
    blocks = pyg.FastRGCNConv(CHANNELS, 4, RELATIONS, num_blocks=2).double()
    assert "its message is no edge program" in refused(blocks, x, EDGES, kinds)
    within = pyg.RGATConv(CHANNELS, 3, RELATIONS, attention_mechanism="within-relation").double()
    assert "its message is no edge program" in refused(within, x, EDGES, kinds)
    ids = pyg.FastRGCNConv(NODES, 3, RELATIONS).double()
    assert refused(ids, None, EDGES, kinds)


def test_pairs_of_many_types_are_those_of_few() -> None:
    """They are found by sorting where there are many more types than edges."""
    nodes, types = EDGES[0], kinds_of(EDGES)
    few, many = pairs_of(nodes, types, NODES, RELATIONS), pairs_of(nodes, types, NODES, 10_000)
    assert torch.equal(few.nodes, many.nodes) and torch.equal(few.of_edge, many.of_edge)
    assert few.counts == many.counts[:RELATIONS] and sum(many.counts) == sum(few.counts)


@pytest.mark.parametrize("name", ["FastRGCN", "RGAT"])
def test_no_matrix_is_stored_for_an_edge(name: str) -> None:
    """The largest tensors that a gradient needs have a row for each pair."""
    layer: Any = LAYERS[name]()
    edges = random_edges(NODES, NODES, 4000)
    with fastgraph.enabled(min_edges=0):
        layer(torch.randn(NODES, CHANNELS), edges, kinds_of(edges))  # which is traced here
    sizes: list[int] = []

    def packed(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with (
        fastgraph.enabled(min_edges=0),
        torch.autograd.graph.saved_tensors_hooks(packed, packed),
    ):
        layer(torch.randn(NODES, CHANNELS, requires_grad=True), edges, kinds_of(edges))
    assert max(sizes) <= 2 * edges.shape[1]
