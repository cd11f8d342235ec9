"""Compiled layers find their graph once in a step, and notice edits as uncompiled ones do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import (
    GATConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    GraphConv,
    SAGEConv,
    TransformerConv,
)

import fastgraph
from fastgraph.registry.registry import Registry
from tests.graphs import random_edges

NODES, EDGES = 30, 120  # and channels too many for sums that need no graph

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "GCN": lambda: GCNConv(16, 16),
    "GraphConv": lambda: GraphConv(16, 16),
    "SAGE": lambda: SAGEConv(16, 16),
    "SAGE max": lambda: SAGEConv(16, 16, aggr="max"),
    "GAT": lambda: GATConv(16, 8, heads=2),
    "GATv2": lambda: GATv2Conv(16, 8, heads=2),
    "Transformer": lambda: TransformerConv(16, 8, heads=2),
}


@pytest.fixture(autouse=True)
def ours() -> Iterator[None]:
    torch.manual_seed(0)
    fastgraph.clear_cache()
    with fastgraph.enabled(min_edges=0):
        yield
    torch.compiler.reset()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...]]]:
    """Each call of a kernel: its operator, and the arguments."""
    called: list[tuple[str, tuple[Any, ...]]] = []
    upstream = Registry.kernel

    def kernel(self: Registry, operator: str, *where: Any) -> Any:
        found = upstream(self, operator, *where)

        def call(*arguments: Any, **options: Any) -> Any:
            called.append((operator, arguments))
            return found(*arguments, **options)

        return call

    monkeypatch.setattr(Registry, "kernel", kernel)
    return called


def _layer(name: str) -> tuple[Any, Any]:
    """A layer in float64, and the same compiled."""
    conv = LAYERS[name]().double()
    return conv, torch.compile(conv, backend="aot_eager", fullgraph=True)


def _features() -> Tensor:
    return torch.randn(NODES, 16, dtype=torch.float64, requires_grad=True)


def _upstream(conv: Any, x: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
    """The output of upstream's code, and the gradient of the features."""
    x = x.detach().requires_grad_()
    fastgraph.disable()
    try:
        out = conv(x, edges)
    finally:
        fastgraph.enable(min_edges=0)
    return out.detach(), torch.autograd.grad(out.square().sum(), x)[0]


def _gradient(out: Tensor, x: Tensor, **options: Any) -> Tensor:
    return torch.autograd.grad(out.square().sum(), x, **options)[0]


def _edit_unseen(edges: Tensor, other: Tensor) -> None:
    version = edges._version
    edges.numpy()[:] = other.numpy()
    assert edges._version == version


@pytest.mark.parametrize("name", LAYERS)
def test_a_step_compares_the_edges_once(name: str, looks: list[int]) -> None:
    _, compiled = _layer(name)
    x, edges = _features(), random_edges(NODES, NODES, EDGES)
    for _ in range(3):
        out = compiled(x, edges)
        _gradient(out, x)
    looks.clear()
    out = compiled(x, edges)
    assert looks.count(2 * EDGES) == 1
    _gradient(out, x)
    assert looks.count(2 * EDGES) == 1


@pytest.mark.parametrize("name", LAYERS)
def test_an_edit_between_calls(name: str) -> None:
    conv, compiled = _layer(name)
    x, edges = _features(), random_edges(NODES, NODES, EDGES)
    before = _upstream(conv, x, edges)[0]
    for seed in range(3):
        expected, expected_gradient = _upstream(conv, x, edges)
        out = compiled(x, edges)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(_gradient(out, x), expected_gradient)
        _edit_unseen(edges, random_edges(NODES, NODES, EDGES, seed=seed + 1))
    assert not torch.allclose(before, compiled(x, edges))


@pytest.mark.parametrize("name", LAYERS)
def test_an_edit_before_the_backward_pass(name: str) -> None:
    """The gradient is that of the edges in the forward pass."""
    conv, compiled = _layer(name)
    x, edges = _features(), random_edges(NODES, NODES, EDGES)
    expected = _upstream(conv, x, edges)[1]
    for _ in range(2):
        given = edges.clone()
        out = compiled(x, given)
        _edit_unseen(given, edges.flip(0))
        torch.testing.assert_close(_gradient(out, x), expected)


@pytest.mark.parametrize("name", LAYERS)
def test_several_graphs_and_several_backward_passes(name: str) -> None:
    conv, compiled = _layer(name)
    x = _features()
    graphs = [random_edges(NODES, NODES, EDGES, seed=seed) for seed in range(3)]
    outs = [compiled(x, edges) for edges in graphs]
    for edges, out in zip(graphs, outs, strict=True):
        expected = _upstream(conv, x, edges)[1]
        torch.testing.assert_close(_gradient(out, x, retain_graph=True), expected)
        torch.testing.assert_close(_gradient(out, x), expected)


@pytest.mark.parametrize("name", LAYERS)
def test_two_layers_on_edges_that_are_made_between(name: str) -> None:
    """Compilers make them in memory of theirs, and the backward pass may make them anew."""
    first, second = LAYERS[name]().double(), LAYERS[name]().double()

    def both(x: Tensor, edges: Tensor) -> Tensor:
        out: Tensor = second(first(x, edges.flip(0)).relu(), (edges + 1) % NODES)
        return out

    x = _features()
    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    for seed in range(3):
        edges = random_edges(NODES, NODES, EDGES, seed=seed)
        expected, expected_gradient = _upstream(both, x, edges)
        out = compiled(x, edges)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(_gradient(out, x), expected_gradient)


@pytest.mark.parametrize("name", LAYERS)
def test_a_checkpoint(name: str) -> None:
    conv = LAYERS[name]().double()
    x, edges = _features(), random_edges(NODES, NODES, EDGES)

    def forward(x: Tensor, edges: Tensor) -> Tensor:
        out: Tensor = checkpoint(conv, x, edges, use_reentrant=False)
        return out

    compiled = torch.compile(forward, backend="aot_eager", fullgraph=True)
    expected = _upstream(conv, x, edges)[1]
    for _ in range(2):
        torch.testing.assert_close(_gradient(compiled(x, edges), x), expected)


@pytest.mark.parametrize("name", ["GAT", "GATv2", "Transformer"])
def test_attention_numbers_no_edges(name: str, kernels: list[tuple[str, tuple[Any, ...]]]) -> None:
    """The backward pass writes what it leaves for each edge in the order of rows."""
    _, compiled = _layer(name)
    x = _features()
    _gradient(compiled(x, random_edges(NODES, NODES, EDGES)), x)
    graphs = [arguments[0] for operator, arguments in kernels if "head_scores" not in operator]
    assert len(graphs) == 2
    assert all(graph.by_destination.edge_id is None for graph in graphs)


@pytest.mark.parametrize("cls", [GATConv, GATv2Conv, TransformerConv])
@pytest.mark.parametrize("has_features", [False, True])
def test_attention_that_is_asked_for_each_edge(cls: Any, has_features: bool) -> None:
    conv = cls(16, 8, heads=2, edge_dim=3 if has_features else None).double()
    x, edges = _features(), random_edges(NODES, NODES, EDGES)
    features = torch.randn(EDGES, 3, dtype=torch.float64) if has_features else None

    def forward(x: Tensor, edges: Tensor) -> Tensor:
        out, (_, alpha) = conv(x, edges, features, return_attention_weights=True)
        weighted: Tensor = alpha * torch.arange(len(alpha)).unsqueeze(1)
        return torch.cat([out.flatten(), weighted.flatten()])

    expected, expected_gradient = _upstream(forward, x, edges)
    out = torch.compile(forward, backend="aot_eager")(x, edges)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(_gradient(out, x), expected_gradient)


# Enough of both for the aggregation of constant features to be remembered.
MANY_NODES, MANY_EDGES = 500, 10_000

CONSTANT: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "GraphConv": ("spmm", lambda: GraphConv(32, 32)),
    "SAGE": ("spmm", lambda: SAGEConv(32, 32)),
    "SAGE max": ("segment_reduce", lambda: SAGEConv(32, 32, aggr="max")),
    "GIN": ("spmm", lambda: GINConv(nn.Linear(32, 32))),
}


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("name", CONSTANT)
def test_constant_features_are_aggregated_once(
    name: str, trains: bool, kernels: list[tuple[str, tuple[Any, ...]]]
) -> None:
    operator, make = CONSTANT[name]
    conv = make().double()
    x = torch.randn(MANY_NODES, 32, dtype=torch.float64)
    edges = random_edges(MANY_NODES, MANY_NODES, MANY_EDGES)

    def forward(x: Tensor, edges: Tensor) -> Tensor:
        out: Tensor = conv(x, edges)
        return out.mul_(2)  # in the memory of what it was given

    fastgraph.disable()  # which forgets aggregations, so that all is computed before
    edited = [(x, edges), (x.flip(0), edges), (x.flip(0), edges.flip(0))]
    expected = [forward(*tensors).detach() for tensors in edited]
    fastgraph.enable(min_edges=0)
    compiled = torch.compile(forward, backend="aot_eager")

    def count(expected: Tensor) -> int:
        """How often it is aggregated in a step."""
        kernels.clear()
        with torch.set_grad_enabled(trains):
            out = compiled(x, edges)
            torch.testing.assert_close(out, expected)
            if trains:
                out.sum().backward()
        return [called for called, _ in kernels].count(operator)

    assert [count(expected[0]) for _ in range(4)] == [1, 1, 0, 0]
    _edit_unseen(x, x.flip(0))
    assert count(expected[1]) == 1
    _edit_unseen(edges, edges.flip(0))
    assert count(expected[2]) == 1


def test_features_that_get_a_gradient_are_not_taken_for_constant(
    kernels: list[tuple[str, tuple[Any, ...]]],
) -> None:
    conv = SAGEConv(32, 32).double()
    x = torch.randn(MANY_NODES, 32, dtype=torch.float64, requires_grad=True)
    edges = random_edges(MANY_NODES, MANY_NODES, MANY_EDGES)
    compiled = torch.compile(conv, backend="aot_eager", fullgraph=True)
    expected = _upstream(conv, x, edges)[1]
    for _ in range(3):
        kernels.clear()
        torch.testing.assert_close(_gradient(compiled(x, edges), x), expected)
        assert Counter(called for called, _ in kernels) == {"spmm": 2}
