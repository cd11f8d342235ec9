"""Layers that are left to upstream as a whole: asked once, and nothing in them looks up a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import (
    APPNP,
    ARMAConv,
    ChebConv,
    ClusterGCNConv,
    EGConv,
    FAConv,
    GCN2Conv,
    LGConv,
    MessagePassing,
    MixHopConv,
    PDNConv,
    SGConv,
    SSGConv,
    TAGConv,
)

import fastgraph
from fastgraph.graphs.memo import MEMO
from fastgraph.pyg import propagate, small_layers, traced
from fastgraph.routing.sizes import LEARNED_SUM, TOO_SMALL, WEIGHTED_SUM

NODES, EDGES, CHANNELS = 50, 4000, 4

Call = Callable[[Any, Tensor, Tensor], Tensor]

LAYERS: dict[str, tuple[Callable[[], MessagePassing], Call]] = {
    "APPNP": (lambda: APPNP(3, 0.1), lambda m, x, e: m(x, e)),
    "ARMAConv": (lambda: ARMAConv(4, 4, 2, 2), lambda m, x, e: m(x, e)),
    "ChebConv": (lambda: ChebConv(4, 4, 4), lambda m, x, e: m(x, e)),
    "ClusterGCNConv": (lambda: ClusterGCNConv(4, 4), lambda m, x, e: m(x, e)),
    "GCN2Conv": (lambda: GCN2Conv(4, 0.1), lambda m, x, e: m(x, x, e)),
    "LGConv": (LGConv, lambda m, x, e: m(x, e)),
    "MixHopConv": (lambda: MixHopConv(4, 4), lambda m, x, e: m(x, e)),
    "PDNConv": (lambda: PDNConv(4, 4, 1, 4), lambda m, x, e: m(x, e, e[0, :, None].float())),
    "SGConv": (lambda: SGConv(4, 4, 3), lambda m, x, e: m(x, e)),
    "SSGConv": (lambda: SSGConv(4, 4, 0.1, 2), lambda m, x, e: m(x, e)),
    "TAGConv": (lambda: TAGConv(4, 4), lambda m, x, e: m(x, edge_index=e)),
    "EGConv": (lambda: EGConv(4, 4, num_heads=2), lambda m, x, e: m(x, e)),
    "FAConv": (lambda: FAConv(4), lambda m, x, e: m(x, x, e)),
}

KNOWN = [name for name in LAYERS if name not in small_layers._TRACED]


@pytest.fixture(autouse=True)
def default_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """As programs have it: the measured default."""
    monkeypatch.delenv("FASTGRAPH_MIN_EDGES")


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The plans of calls, and the questions to the memory of graphs."""
    found: list[str] = []
    for owner, name in (
        (MEMO, "get"),
        (MEMO, "noted"),
        (MEMO, "note"),
        (MEMO, "put"),
        (propagate, "plan_propagate"),
        (traced, "plan"),
    ):
        function = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *a, n=name, f=function, **k: (found.append(n), f(*a, **k))[1]
        )
    return found


def _graph() -> Tensor:
    return torch.randint(NODES, (2, EDGES))


def _counts() -> list[tuple[int, int, dict[str, int]]]:
    return [(row.routed, row.fell_back, dict(row.reasons)) for row in fastgraph.status().rows]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_asks_once_and_has_upstreams_bits(
    layer: str, training: bool, looked_up: list[str]
) -> None:
    make, call = LAYERS[layer]
    conv, x = make().eval(), torch.randn(NODES, CHANNELS, requires_grad=True)
    graphs = [_graph() for _ in range(4)]
    with torch.set_grad_enabled(training):
        expected = [call(conv, x, graph) for graph in graphs]
        with fastgraph.enabled():
            call(conv, x, graphs[0])  # a traced message tells its size
            looked_up.clear()
            fastgraph.status().reset()
            ours = [call(conv, x, graph) for graph in graphs[1:]]
    assert all(map(torch.equal, ours, expected[1:]))
    assert looked_up == []
    assert _counts() == [(0, 3, {TOO_SMALL.reason: 3})]
    if training:
        for a, b in zip(ours, expected[1:], strict=True):
            assert torch.equal(*(torch.autograd.grad(o.square().sum(), x)[0] for o in (a, b)))


@pytest.mark.parametrize("layer", KNOWN)
def test_other_calls_take_their_routes(layer: str) -> None:
    make, call = LAYERS[layer]
    conv, x, graph = make(), torch.randn(NODES, CHANNELS), _graph()
    expected = call(conv, x, graph)
    with fastgraph.enabled(min_edges=0):
        torch.testing.assert_close(call(conv, x, graph), expected)
    assert sum(routed for routed, *_ in _counts()) > 0
    bounds = (least.training * least.wide for least in (WEIGHTED_SUM, LEARNED_SUM))
    bound = max(bounds) * 11 // 10  # self-loops may go
    graph = torch.randint(NODES, (2, bound))
    expected = call(conv, x, graph)
    fastgraph.status().reset()
    with fastgraph.enabled():
        torch.testing.assert_close(call(conv, x, graph), expected, rtol=1e-4, atol=1e-5)
    assert sum(routed for routed, *_ in _counts()) > 0


def test_a_graph_that_layers_meet_again_and_again_is_remembered() -> None:
    graph, x = _graph(), torch.randn(NODES, CHANNELS)
    layers = [LGConv(), LGConv(), SGConv(CHANNELS, CHANNELS)]
    expected = [layer(x, graph) for layer in layers]
    fastgraph.clear_cache()
    with fastgraph.enabled():
        for _ in range(5):
            for layer, plain in zip(layers, expected, strict=True):
                assert torch.equal(layer(x, graph), plain)
        kept = [key for key in MEMO._entries if key[0] == "gcn_norm"]
        assert len(kept) == 2  # with self-loops and without
        graph.numpy()[:] = graph.flip(0).numpy()  # which torch does not count
        for layer in layers:
            with fastgraph.enabled():
                fastgraph.disable()
                plain = layer(x, graph)
            assert torch.equal(layer(x, graph), plain)


def test_weights_that_are_computed_anew_are_not_remembered(looked_up: list[str]) -> None:
    conv, graph, x = PDNConv(4, 4, 1, 4), _graph(), torch.randn(NODES, CHANNELS)
    features = torch.rand(EDGES, 1)
    with torch.no_grad(), fastgraph.enabled():
        for _ in range(4):
            conv(x, graph, features)
    assert looked_up == []


def test_a_subclass_with_a_message_of_its_own_is_asked_for_its_parts() -> None:
    class Doubled(LGConv):
        def message(self, x_j: Tensor, edge_weight: Tensor) -> Tensor:
            return 2 * edge_weight.view(-1, 1) * x_j

    conv, graph, x = Doubled(), _graph(), torch.randn(NODES, CHANNELS)
    expected = conv(x, graph)
    with fastgraph.enabled():
        assert torch.equal(conv(x, graph), expected)
    assert [row.layer for row in fastgraph.status().rows] == ["Doubled"]


@pytest.mark.parametrize("layer", small_layers._TRACED)
def test_traced_layers_tell_calls_apart(layer: str, looked_up: list[str]) -> None:
    make, call = LAYERS[layer]
    conv, x, graph = make(), torch.randn(NODES, CHANNELS), _graph()
    with fastgraph.enabled():
        call(conv, x, graph)
        looked_up.clear()
        call(conv, x, graph[:, :3500])
        assert looked_up == []
        call(conv, x, torch.cat([graph, graph], 1))  # more edges than at any call before
        assert "plan" in looked_up
        with fastgraph.enabled(min_edges=0):
            call(conv, x, graph)
    assert _counts()[0][0] == 1


def test_a_traced_layer_learns_from_the_call_itself() -> None:
    conv, x, graph = FAConv(8), torch.randn(NODES, 8), torch.randint(NODES, (2, 200_000))
    with fastgraph.enabled():
        conv(x, x, graph[:, :EDGES])  # is too small
        conv.propagate = lambda *_, **given: given["x"]  # of which nobody asks anything
        conv(x, x, graph)
        del conv.propagate
        fastgraph.status().reset()
        conv(x, x, graph)
    assert _counts() == [(1, 0, {})]


@pytest.mark.parametrize("layer", small_layers._TRACED)
def test_traced_layers_leave_tiny_graphs_at_the_first_call(
    layer: str, looked_up: list[str]
) -> None:
    make, call = LAYERS[layer]
    conv, x, graph = make(), torch.randn(NODES, CHANNELS), _graph()[:, :60]
    expected = call(conv, x, graph)
    with fastgraph.enabled():
        assert torch.equal(call(conv, x, graph), expected)
    assert looked_up == []
    assert _counts() == [(0, 1, {TOO_SMALL.reason: 1})]
