"""Modules that aggregate outside message passing run as they are and are counted with a reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.experimental import experimental_mode
from torch_geometric.nn import (
    ASAPooling,
    EdgePooling,
    GCNConv,
    GINConv,
    MemPooling,
    PNAConv,
    SAGEConv,
    SAGPooling,
    TopKPooling,
    WLConv,
    aggr,
    global_add_pool,
    global_max_pool,
    global_mean_pool,
)

import fastgraph
from tests.graphs import random_edges

NODES, CHANNELS = 12, 4
EDGES = random_edges(NODES, NODES, 40)
BATCH = torch.arange(NODES) // 5

pytestmark = pytest.mark.filterwarnings("ignore::fastgraph.FallbackWarning")


def counts() -> dict[str, tuple[int, int]]:
    return {row.layer: (row.routed, row.fell_back) for row in fastgraph.status().rows}


def called_twice(call: Callable[[], object]) -> dict[str, tuple[int, int]]:
    """The counts of a call, whose results are those without fastgraph."""
    torch.manual_seed(0)
    expected = call()
    with fastgraph.enabled(strict=True, min_edges=0):
        torch.manual_seed(0)
        found = call()
        call()
    if isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected)
    return counts()


AGGREGATIONS: dict[str, Callable[[], nn.Module]] = {
    "MulAggregation": aggr.MulAggregation,
    "MedianAggregation": aggr.MedianAggregation,
    "SortAggregation": lambda: aggr.SortAggregation(2),
}


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_aggregations_called_by_themselves(name: str) -> None:
    module, x = AGGREGATIONS[name](), torch.randn(NODES, CHANNELS)
    assert called_twice(lambda: module(x, BATCH)) == {name: (0, 2)}
    with fastgraph.enabled():
        assert fastgraph.is_accelerated(module, x, BATCH) == (
            False,
            [f"{name}: the aggregation is called by itself"],
        )


def test_aggregations_within_layers_are_part_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(NODES, CHANNELS)
    routed = GINConv(nn.Linear(CHANNELS, 3), aggr="max")
    several = SAGEConv(CHANNELS, 3, aggr=["mean", "median"])
    without_route = PNAConv(CHANNELS, 3, ["mul"], ["identity"], torch.ones(3))
    with fastgraph.enabled(min_edges=0):
        for layer in (routed, several, without_route):
            layer(x, EDGES)
    monkeypatch.delenv("FASTGRAPH_MIN_EDGES")
    with fastgraph.enabled():  # too small
        routed(x, EDGES)
    assert counts() == {"GINConv": (1, 1), "SAGEConv": (0, 1), "PNAConv": (0, 1)}


POOLING: dict[str, tuple[Callable[[], nn.Module], dict[str, tuple[int, int]]]] = {
    "TopKPooling": (lambda: TopKPooling(CHANNELS), {"TopKPooling": (0, 2)}),
    "SAGPooling": (
        lambda: SAGPooling(CHANNELS),
        {"SAGPooling": (0, 2), "GraphConv": (2, 0)},
    ),
    # These have reductions of groups beside what they select.
    "ASAPooling": (lambda: ASAPooling(CHANNELS), {"ASAPooling": (2, 0), "LEConv": (2, 0)}),
    "EdgePooling": (lambda: EdgePooling(CHANNELS), {"EdgePooling": (2, 0)}),
}


@pytest.mark.parametrize("name", POOLING)
def test_pooling_layers(name: str) -> None:
    make, expected = POOLING[name]
    module, x = make(), torch.randn(NODES, CHANNELS)
    assert called_twice(lambda: module(x, EDGES, batch=BATCH)[0]) == expected


def test_pooling_without_a_graph() -> None:
    x = torch.randn(NODES, CHANNELS)
    memory = MemPooling(CHANNELS, 3, heads=2, num_clusters=2)
    assert called_twice(lambda: memory(x, BATCH)) == {"MemPooling": (0, 2)}


@pytest.mark.parametrize("pool", [global_add_pool, global_mean_pool, global_max_pool])
def test_global_pooling_of_one_graph(pool: Callable[..., Tensor]) -> None:
    x = torch.randn(NODES, CHANNELS)
    assert called_twice(lambda: pool(x, None)) == {}  # torch's own reduction of a dense matrix


def test_a_model_with_an_aggregation_is_not_accelerated_as_a_whole() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.readout = GCNConv(CHANNELS, 3), aggr.MulAggregation()

        def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
            return self.readout(self.conv(x, edge_index), batch)

    model, x = Model(), torch.randn(NODES, CHANNELS)
    with fastgraph.enabled():
        assert fastgraph.is_accelerated(model, x, EDGES, BATCH) == (
            False,
            ["MulAggregation: the aggregation is called by itself"],
        )
        expected = model(x, EDGES, BATCH)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x, EDGES, BATCH), expected)
        scripted = torch.jit.script(model)
        torch.testing.assert_close(scripted(x, EDGES, BATCH), expected)
    assert counts()["MulAggregation"] == (0, 1)


def test_colours_of_nodes() -> None:
    conv, x = WLConv(), torch.zeros(NODES, dtype=torch.long)
    assert called_twice(lambda: conv(x, EDGES)) == {"WLConv": (0, 2)}


def test_upstreams_own_functions_come_back() -> None:
    from torch_geometric.nn.pool import glob

    before = aggr.Aggregation.__call__, TopKPooling.forward, WLConv.forward, glob.scatter
    with fastgraph.enabled():
        assert aggr.Aggregation.__call__ is not before[0]
    after = aggr.Aggregation.__call__, TopKPooling.forward, WLConv.forward, glob.scatter
    assert all(a is b for a, b in zip(before, after, strict=True))


class Guessing(GINConv):
    """It asks its aggregation for the number of nodes."""

    def aggregate(
        self, inputs: Tensor, index: Tensor, ptr: Tensor | None, dim_size: int | None
    ) -> Tensor:
        return self.aggr_module(inputs, index)  # type: ignore[no-any-return]


@pytest.mark.parametrize("option", ["disable_dynamic_shapes", None])
def test_parts_of_calls_obey_experimental_modes(option: str | None) -> None:
    layer = Guessing(nn.Linear(CHANNELS, CHANNELS))
    x, full = torch.randn(NODES, CHANNELS), torch.arange(NODES).expand(2, -1)
    expected = layer(x, full)
    with fastgraph.enabled():
        torch.testing.assert_close(layer(x, full), expected)
        with experimental_mode(option), pytest.raises(ValueError, match="Dynamic shapes disabled"):
            layer(x, full)
        torch.testing.assert_close(layer(x, full), expected)
        with pytest.raises(ValueError, match="Encountered invalid dimension '-2'"):
            aggr.SumAggregation()(x[0], BATCH)
    assert counts()["Guessing"] == (0, 3)
