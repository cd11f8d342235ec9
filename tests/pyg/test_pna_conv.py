"""Scaled aggregations are multiplied by one matrix for each degree that many nodes have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import PNAConv

import fastgraph
from fastgraph.layers.degree_groups import degree_groups
from fastgraph.pyg import pna_conv
from tests.ab import arguments
from tests.graphs import quantised
from tests.outcomes import differences
from tests.pyg.traced_layers import second_derivative

pytestmark = pytest.mark.usefixtures("nothing_known")

CHANNELS = 4
NODES = 400
SCALERS = ["identity", "amplification", "attenuation", "linear", "inverse_linear"]


def edges(flow: str = "source_to_target", alone: int = 100) -> Tensor:
    """Nodes of degrees 1 to 3 in any order, a hub, some of rare degrees, and some without edges."""
    generator = torch.Generator().manual_seed(0)
    degrees = torch.arange(NODES) % 3 + 1
    degrees[:alone] = 0
    degrees[-5:] = torch.tensor([200, 40, 41, 7, 7])
    degrees = degrees[torch.randperm(NODES, generator=generator)]
    ends = torch.arange(NODES).repeat_interleave(degrees)
    found = torch.stack([torch.randint(NODES, ends.shape, generator=generator), ends])
    found = found[:, torch.randperm(len(ends), generator=generator)]
    return found if flow == "source_to_target" else found.flip(0)


def pna(aggregators: Any = ("mean", "min", "max", "std"), **options: Any) -> PNAConv:
    torch.manual_seed(0)
    degrees = torch.tensor([1, 3, 2, 5])
    scalers = options.pop("scaler", SCALERS)
    return PNAConv(CHANNELS, 6, list(aggregators), scalers, degrees, **options).double()


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of scalers of each call that was multiplied by degree."""
    made: list[int] = []
    products = pna_conv.scaled_products

    def counted(x: Tensor, groups: Any, *others: Any) -> list[Tensor]:
        made.append(len(groups.sizes))
        return products(x, groups, *others)

    monkeypatch.setattr(pna_conv, "scaled_products", counted)
    return made


LAYERS: dict[str, Callable[[], PNAConv]] = {
    "usual": pna,
    "normalisation": lambda: pna(["mean", "sum", "var"], train_norm=True),
    "towers": lambda: pna(["mean", "max"], towers=3),
    "divided": lambda: pna(["mean", "std"], towers=2, divide_input=True),
    "two layers afterwards": lambda: pna(["max"], post_layers=2),
    "edges": lambda: pna(edge_dim=3, towers=2),
    "backwards": lambda: pna(flow="target_to_source"),
    "power means": lambda: pna(["powermean"]),
}


@pytest.mark.parametrize("alone", [0, 1, 100])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_what_they_are_upstream(name: str, alone: int, multiplied: list[int]) -> None:
    layer = LAYERS[name]()
    x, index = quantised(NODES, CHANNELS), edges(layer.flow, alone)
    features = [] if layer.edge_dim is None else [quantised(index.shape[1], 3, seed=2)]
    assert differences(layer, {"": arguments(x, index, *features)}) == {}
    assert multiplied == [4 if alone == 100 else 3]
    assert fastgraph.status().row("PNAConv").programs == 1


def test_second_derivatives(multiplied: list[int]) -> None:
    layer, index = pna(train_norm=True, act="tanh"), edges()
    x = quantised(NODES, CHANNELS).requires_grad_()

    def loss() -> Tensor:
        return layer(x, index).square().sum()

    expected = second_derivative(loss, x)
    with fastgraph.enabled(min_edges=0):
        found = second_derivative(loss, x)
    assert multiplied
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-8)


def test_a_graph_seen_first_in_inference_mode_is_grouped_once(
    multiplied: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def counted(ptr: Tensor) -> Any:
        made.append(len(ptr))
        return degree_groups(ptr)

    monkeypatch.setattr("fastgraph.layers.degree_groups.degree_groups", counted)
    first, second, index = pna(), pna(train_norm=True), edges()
    x = quantised(NODES, CHANNELS).requires_grad_()
    with fastgraph.enabled(min_edges=0):
        with torch.inference_mode():
            first(x, index)
        second(x, index).sum().backward()
    assert made == [NODES + 1] and len(multiplied) == 2
    assert x.grad is not None and x.grad.abs().sum() > 0


def test_nodes_of_many_degrees_have_no_groups() -> None:
    ptr = torch.arange(1000).cumsum(0)
    assert degree_groups(ptr) is None
    assert degree_groups(torch.zeros(1, dtype=torch.int64)) is None
    groups = degree_groups(torch.cat([ptr, ptr[-1] + 2 * torch.arange(1, 2000)]))
    assert groups is not None
    assert (groups.degrees.tolist(), groups.sizes, len(groups.others)) == ([2], [2000], 998)


def watched(layer: PNAConv) -> None:
    layer.post_nns[0][0].register_forward_hook(lambda *_: None)


def of_another_kind(layer: PNAConv) -> None:
    layer.post_nns[0] = nn.Sequential(nn.Linear(CHANNELS * 21, 6).double())


@pytest.mark.parametrize("change", [watched, of_another_kind])
def test_what_others_see_is_upstreams(change: Callable[[PNAConv], None], multiplied: Any) -> None:
    layer = pna()
    change(layer)
    assert differences(layer, {"": arguments(quantised(NODES, CHANNELS), edges())}) == {}
    assert multiplied == []


def test_an_aggregation_that_is_left_to_upstream_is_scaled_there(multiplied: list[int]) -> None:
    layer, x, index = pna(), quantised(NODES, CHANNELS), edges()
    expected, seen = layer(x, index), []
    layer.aggr_module.register_forward_hook(lambda _, given, out: seen.append(out.shape[-1]))
    with fastgraph.enabled(min_edges=0):
        found = layer(x, index)
    torch.testing.assert_close(found, expected)
    assert (multiplied, seen) == ([], [CHANNELS * 4 * len(SCALERS)])


def test_a_graph_whose_messages_are_too_small_is_not_grouped(
    multiplied: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    conv, x = pna(), torch.randn(NODES, CHANNELS, dtype=torch.double)
    grouped: list[object] = []
    graph_of = pna_conv.graph_of
    monkeypatch.delenv("FASTGRAPH_MIN_EDGES", raising=False)
    monkeypatch.setattr(pna_conv, "graph_of", lambda *given: grouped.append(1) or graph_of(*given))
    graphs = [edges().repeat(1, 10) for _ in range(3)]  # more than tell it alone
    expected = conv(x, graphs[0])
    with fastgraph.enabled():
        assert all(torch.equal(conv(x, graph), expected) for graph in graphs)
    assert grouped == [1] and not multiplied  # the first call told the size
    with fastgraph.enabled(min_edges=0):
        torch.testing.assert_close(conv(x, graphs[0]), expected)
    assert multiplied


def test_an_edge_outside_the_nodes_is_upstreams_error() -> None:
    layer, index = pna(), edges()
    index[1, 3] = NODES
    assert differences(layer, {"": arguments(quantised(NODES, CHANNELS), index)}) == {}
