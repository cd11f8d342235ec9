"""How the arguments of a message are found is kept for calls of the same kind, and no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

import fastgraph
from fastgraph.pyg import traced
from tests.graphs import random_edges

pytestmark = [
    pytest.mark.filterwarnings("ignore::fastgraph.FallbackWarning"),
    pytest.mark.usefixtures("nothing_known"),
]

CHANNELS = 4


class Gated(MessagePassing):
    """A layer with features of both ends, of edges, and a tensor of all edges together."""

    def forward(self, x: Any, edge_index: Tensor, gate: Tensor, power: float = 1.0) -> Tensor:
        return self.propagate(edge_index, x=x, gate=gate, power=power)

    def message(self, x_i: Tensor, x_j: Tensor, gate: Tensor, power: float) -> Tensor:
        return power * gate * x_j.sigmoid() + x_i


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of edges of calls whose arguments were looked at one by one."""
    found: list[int] = []
    collect = traced.collect
    monkeypatch.setattr(traced, "_KINDS", {})

    def counted(*args: Any) -> Any:
        found.append(args[3])
        return collect(*args)

    monkeypatch.setattr(traced, "collect", counted)
    return found


def values(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype)


def check(layer: Gated, *arguments: Any, **named: Any) -> None:
    expected = layer(*arguments, **named)
    with fastgraph.enabled(min_edges=0):
        found = layer(*arguments, **named)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_graphs_of_any_size_are_one_kind(collected: list[int]) -> None:
    layer = Gated()
    for nodes, count in ((10, 40), (7, 40), (12, 33), (1, 5)):
        edges = random_edges(nodes, nodes, count)
        check(layer, values(nodes, CHANNELS), edges, values(CHANNELS))
    assert collected == [40]
    assert fastgraph.status().row("Gated").routed == 4


def test_all_else_makes_another_kind(collected: list[int]) -> None:
    layer, edges = Gated(), random_edges(10, 10, 40)
    x, gate = values(10, CHANNELS), values(CHANNELS)
    narrow = values(9, CHANNELS)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x, edges, gate), {}),
        ((x.float(), edges, gate.float()), {}),
        ((x, edges, values(40, CHANNELS)), {}),  # one for each edge
        ((x, edges, values(40, 1)), {}),
        ((x, edges, values(1)), {}),
        ((x, edges, values()), {}),
        ((x, edges.int(), gate), {}),
        ((x, edges, gate), {"power": 2.0}),
        ((x, edges, gate), {"power": 0.0}),
        ((x, edges, gate), {"power": -0.0}),
        (((x, x), edges, gate), {}),
        (((narrow, x), random_edges(9, 10, 40), gate), {}),
    ]
    for arguments, named in calls:
        check(layer, *arguments, **named)
    assert len(collected) == len(calls) - 1  # pairs of any sizes are one kind
    for arguments, named in calls:
        check(layer, *arguments, **named)
    # Of tensors that are neither of nodes nor of edges, the last one alone is kept.
    assert len(collected) <= len(calls) + 2
    assert fastgraph.status().row("Gated").routed == 2 * len(calls)


def test_a_layer_of_another_flow_or_with_another_aggregation(collected: list[int]) -> None:
    edges, x, gate = random_edges(10, 10, 40), values(10, CHANNELS), values(CHANNELS)
    layer = Gated()
    for flow in ("source_to_target", "target_to_source", "source_to_target"):
        layer.flow = flow
        check(layer, x, edges, gate)
    assert collected == [40, 40]
    for aggr in ("max", "mean", "max"):
        check(Gated(aggr=aggr), x, edges, gate)
    assert collected == [40] * 4


def test_numbers_of_nodes_that_do_not_fit_are_upstreams_error(collected: list[int]) -> None:
    layer, edges = Gated(), random_edges(10, 10, 40)
    x, gate = values(10, CHANNELS), values(CHANNELS)
    check(layer, (x, x), edges, gate)
    few = (x, values(3, CHANNELS))
    for _ in range(2):
        with fastgraph.enabled(min_edges=0), pytest.raises(IndexError):
            layer(few, edges, gate)
    assert fastgraph.status().row("Gated").routed == 1
    assert collected == [40]
