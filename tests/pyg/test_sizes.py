"""Graphs that are too small to gain: upstream runs, at once, and nothing of the call is routed."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.nn import (
    CGConv,
    FAConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    GraphConv,
    HypergraphConv,
    LEConv,
    LGConv,
    MessagePassing,
    PNAConv,
    ResGatedGraphConv,
    RGCNConv,
    SAGEConv,
    SGConv,
    SimpleConv,
    TransformerConv,
)

import fastgraph
from fastgraph.layers.prepared import Prepared
from fastgraph.pyg import propagate, traced
from fastgraph.routing import status
from fastgraph.routing.sizes import (
    ATTENTION,
    EXTREMUM,
    GCN,
    NARROW_ATTENTION_WITH_EDGES,
    PROGRAM,
    SUM,
    TOO_SMALL,
    WEIGHTED_SUM,
    Least,
    Work,
    is_too_small,
    of_many,
)

CHANNELS = 32

LAYERS: dict[str, tuple[Callable[[], MessagePassing], Least]] = {
    "GCNConv": (lambda: GCNConv(CHANNELS, CHANNELS), GCN),
    "SAGEConv": (lambda: SAGEConv(CHANNELS, CHANNELS), SUM),
    "SAGEConv max": (lambda: SAGEConv(CHANNELS, CHANNELS, aggr="max"), EXTREMUM),
    "GraphConv": (lambda: GraphConv(CHANNELS, CHANNELS), SUM),
    "GraphConv min": (lambda: GraphConv(CHANNELS, CHANNELS, aggr="min"), EXTREMUM),
    "GINConv": (lambda: GINConv(torch.nn.Linear(CHANNELS, CHANNELS)), SUM),
    "GINConv max": (lambda: GINConv(torch.nn.Linear(CHANNELS, CHANNELS), aggr="max"), EXTREMUM),
    "GATConv": (lambda: GATConv(CHANNELS, CHANNELS), ATTENTION),
    "GATv2Conv": (lambda: GATv2Conv(CHANNELS, CHANNELS), ATTENTION),
    "TransformerConv": (lambda: TransformerConv(CHANNELS, CHANNELS), ATTENTION),
}


@pytest.fixture(autouse=True)
def default_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """As programs have it: the measured default."""
    monkeypatch.delenv("FASTGRAPH_MIN_EDGES")


def edges(num_edges: int, num_nodes: int = 20) -> Tensor:
    return torch.randint(num_nodes, (2, num_edges))


def counts() -> list[tuple[int, int, dict[str, int]]]:
    return [(row.routed, row.fell_back, dict(row.reasons)) for row in fastgraph.status().rows]


@pytest.mark.parametrize("channels", [1, 2])
def test_gatv2_of_one_channel_with_edges_loses_in_training(channels: int) -> None:
    conv, num_edges = GATv2Conv(CHANNELS, channels, edge_dim=3, add_self_loops=False), 100_000
    x, given = torch.randn(20, CHANNELS), (edges(num_edges), torch.randn(num_edges, 3))
    with fastgraph.enabled():
        conv(x, *given)
        is_left = channels == 1
        assert counts() == [(0, 1, {TOO_SMALL.reason: 1}) if is_left else (1, 0, {})]
        with torch.no_grad():
            conv(x, *given)
    assert counts()[0][0] == (1 if is_left else 2)


@pytest.mark.parametrize(
    ("dtype", "edge_dim", "is_wide"),
    [
        (torch.float32, 64, False),
        (torch.float32, 65, True),
        (torch.bfloat16, 31, False),  # which are folded around the operator
        (torch.bfloat16, 32, True),
    ],
)
def test_wide_features_of_few_edges_lose_in_training(
    dtype: torch.dtype, edge_dim: int, is_wide: bool
) -> None:
    conv, num_nodes = TransformerConv(CHANNELS, 16, 2, edge_dim=edge_dim).to(dtype), 2000
    x = torch.randn(num_nodes, CHANNELS, dtype=dtype)
    with fastgraph.enabled():
        for num_edges in (3 * num_nodes - 1, 3 * num_nodes):
            conv(x, edges(num_edges), torch.randn(num_edges, edge_dim, dtype=dtype))
    assert counts() == [(1, 1, {TOO_SMALL.reason: 1}) if is_wide else (2, 0, {})]
    with fastgraph.enabled(), torch.no_grad():
        conv(x, edges(3 * num_nodes - 1), torch.randn(3 * num_nodes - 1, edge_dim, dtype=dtype))
    assert counts()[0][0] == (2 if is_wide else 3)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("layer", LAYERS)
def test_the_number_of_edges_decides(layer: str, training: bool) -> None:
    make, least = LAYERS[layer]
    conv, x = make(), torch.randn(20, CHANNELS)
    bound = least.training if training else least.inference
    with torch.set_grad_enabled(training), fastgraph.enabled():
        conv(x, edges(bound - 1))
        assert counts() == [(0, 1, {TOO_SMALL.reason: 1})]
        conv(x, edges(bound))
        assert counts() == [(1, 1, {TOO_SMALL.reason: 1})]
        with fastgraph.enabled(min_edges=0):
            conv(x, edges(1))
        assert counts() == [(2, 1, {TOO_SMALL.reason: 1})]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("layer", ["LGConv", "GraphConv"])
def test_weighted_sums_have_a_bound_of_their_own(layer: str, named: bool, training: bool) -> None:
    conv = GraphConv(CHANNELS, CHANNELS) if layer == "GraphConv" else LGConv(normalize=False)
    x, bound = torch.randn(20, CHANNELS), WEIGHTED_SUM.training if training else WEIGHTED_SUM[0]
    with torch.set_grad_enabled(training), fastgraph.enabled():
        for num_edges in (bound - 1, bound):
            index, weight = edges(num_edges), torch.rand(num_edges)
            conv(x, index, edge_weight=weight) if named else conv(x, index, weight)
    assert counts() == [(1, 1, {TOO_SMALL.reason: 1})]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("heads", "channels"), [(1, 16), (2, 8), (2, 16)])
def test_narrow_attention_with_edges_has_a_bound_of_its_own(
    heads: int, channels: int, training: bool
) -> None:
    conv = TransformerConv(CHANNELS, channels, heads, edge_dim=3)
    least = NARROW_ATTENTION_WITH_EDGES if heads * channels == 16 else ATTENTION
    x, bound = torch.randn(20, CHANNELS), least.training if training else least.inference
    with torch.set_grad_enabled(training), fastgraph.enabled():
        for num_edges in (bound - 1, bound):
            conv(x, edges(num_edges), torch.randn(num_edges, 3))
    assert counts() == [(1, 1, {TOO_SMALL.reason: 1})]


@pytest.mark.parametrize("layer", LAYERS)
def test_nothing_within_a_small_call_is_planned(
    layer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, least = LAYERS[layer]
    # With the self-loops that some of them add there are more edges than the least.
    bound = min(least.inference, least.training)
    conv, x, index = make(), torch.randn(bound, CHANNELS), edges(bound - 1, bound)
    expected = conv(x, index)

    def plan(*_: object, **__: object) -> str:
        raise AssertionError("a call was planned")

    monkeypatch.setattr(propagate, "plan_propagate", plan)
    with fastgraph.enabled(strict=True), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(conv(x, index), expected)
    assert counts() == [(0, 1, {TOO_SMALL.reason: 1})]


NARROW: dict[str, tuple[Callable[[int], MessagePassing], Least]] = {
    "GCNConv": (lambda channels: GCNConv(CHANNELS, channels), GCN),
    "GraphConv": (lambda channels: GraphConv(channels, CHANNELS), SUM),
    "GINConv": (lambda channels: GINConv(torch.nn.Linear(channels, CHANNELS)), SUM),
    "GATConv": (lambda channels: GATConv(CHANNELS, channels), ATTENTION),
}


@pytest.mark.parametrize("channels", [1, 2, 4, 8])
@pytest.mark.parametrize("layer", NARROW)
def test_narrow_features_need_more_edges(layer: str, channels: int) -> None:
    make, least = NARROW[layer]
    times = least.narrow_edges if channels <= 2 else max(least.wide // channels, 1)
    conv, bound = make(channels), times * least.inference
    x = torch.randn(20, CHANNELS if layer in ("GCNConv", "GATConv") else channels)
    with torch.no_grad(), fastgraph.enabled():
        conv(x, edges(bound - 1))
        assert counts() == [(0, 1, {TOO_SMALL.reason: 1})]
        conv(x=x, edge_index=edges(bound))
        assert counts() == [(1, 1, {TOO_SMALL.reason: 1})]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("channels", [65, 128, 256, 100_000])
def test_sums_of_many_channels_need_fewer_edges(channels: int, training: bool) -> None:
    conv, x = SimpleConv(), torch.randn(20, channels)
    bound = SUM.training if training else SUM.inference
    bound = max(math.ceil(bound * math.sqrt(64 / channels)), 1500)
    with torch.set_grad_enabled(training), fastgraph.enabled():
        conv(x, edges(bound - 1))
        assert counts() == [(0, 1, {TOO_SMALL.reason: 1})]
        conv(x, edges(bound))
        assert counts() == [(1, 1, {TOO_SMALL.reason: 1})]
        # Where nobody knows how many there are.
        assert is_too_small(SUM, edges(SUM.bound() - 1), lambda: None)


@pytest.mark.parametrize(
    ("shape", "channels"),
    [((20, 4), 4), ((1, 20, 4), 4), ((3, 20, 2), 6), ((20, 2, 4), 8), ((20,), 1)],
)
def test_the_numbers_of_a_node_are_counted_in_any_layout(
    shape: tuple[int, ...], channels: int
) -> None:
    x, bound = torch.randn(shape), SUM.training
    if channels <= 2:
        bound *= SUM.narrow_edges
    else:
        bound = -(-bound * SUM.wide // channels)
    with fastgraph.enabled():
        for given in (x, (x, None), [x]):
            assert is_too_small(SUM, edges(bound - 1), lambda given=given: given)
            assert not is_too_small(SUM, edges(bound), lambda given=given: given)
        assert is_too_small(SUM, edges(bound - 1), lambda: torch.empty(0, 20, 0))


def test_layers_that_normalise_before_they_propagate() -> None:
    conv, x, index = SGConv(CHANNELS, CHANNELS, K=2), torch.randn(20, CHANNELS), edges(40)
    expected = conv(x, index)
    with fastgraph.enabled():
        assert torch.equal(conv(x, index), expected)
    assert counts() == [(0, 1, {TOO_SMALL.reason: 1})]  # as a whole


_CALLED: dict[str, Callable[[], MessagePassing]] = {
    "SimpleConv": SimpleConv,
    "CGConv": lambda: CGConv(CHANNELS),
    "LEConv": lambda: LEConv(CHANNELS, CHANNELS),
}


@pytest.mark.parametrize("layer", _CALLED)
def test_a_small_call_reaches_upstream_by_few_functions(layer: str) -> None:
    conv, x, index = _CALLED[layer](), torch.randn(20, CHANNELS), edges(40)

    def functions_called() -> int:
        called: list[str] = []

        def seen(frame: FrameType, event: str, _: object) -> None:
            if event == "call":
                called.append(frame.f_code.co_name)

        conv(x, index)  # what is decided once
        sys.setprofile(seen)
        try:
            conv(x, index)
        finally:
            sys.setprofile(None)
        return len(called)

    plain = functions_called()
    with fastgraph.enabled():
        ours = functions_called()
    assert counts() == [(0, 2, {TOO_SMALL.reason: 2})]
    # What is known answers the questions that upstream asks.
    assert ours - plain <= (0 if layer == "SimpleConv" else 6)


def test_a_layer_with_too_little_to_compute_is_not_planned_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    conv, x, index = CGConv(CHANNELS), torch.randn(20, CHANNELS), edges(4000)
    expected, planned, upstream = conv(x, index), [], traced.plan

    def plan(*arguments: Any) -> Any:
        planned.append(arguments[0])
        return upstream(*arguments)

    monkeypatch.setattr(traced, "plan", plan)
    with fastgraph.enabled():
        for graph in (index, index, index[:, :3500]):
            conv(x, graph)
        assert torch.equal(conv(x, index), expected) and len(planned) == 1
        with torch.no_grad():
            conv(x, index)
        conv(x, torch.cat([index, index[:, :3000]], 1))  # more edges than at any call before
        assert len(planned) == 3
        conv(x, index)
        assert len(planned) == 3
        for _ in range(2):
            conv.double()(x.double(), index)  # another dtype may have another bound
        assert len(planned) == 4
    assert counts() == [(0, 9, {TOO_SMALL.reason: 9})]


@pytest.mark.parametrize("name", ["of two kinds of nodes", "of relations"])
def test_nor_is_one_that_passes_messages_twice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, index = torch.randn(20, CHANNELS), edges(8000)
    kinds = (torch.arange(8000) % 5 > 0).long()  # the second relation has more edges
    conv: Any = HypergraphConv(CHANNELS, CHANNELS)
    if name == "of relations":
        conv = RGCNConv(CHANNELS, CHANNELS, 2)
    given = (x, index, kinds) if name == "of relations" else (x, index)
    planned, upstream = [], traced.plan

    def plan(*arguments: Any) -> Any:
        planned.append(arguments[0])
        return upstream(*arguments)

    monkeypatch.setattr(traced, "plan", plan)
    with fastgraph.enabled():
        for _ in range(3):
            conv(*given)
            with torch.no_grad():
                conv(*given)
    assert len(planned) <= 4
    assert counts()[0][0] == 0


def test_other_reasons_are_told_whatever_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "_warned", set())  # each reason is told once in a process
    with fastgraph.enabled(), pytest.warns(fastgraph.FallbackWarning):
        PNAConv(CHANNELS, CHANNELS, ["mul"], ["identity"], torch.ones(3))(
            torch.randn(20, CHANNELS), edges(40)
        )
    assert counts() == [(0, 1, {"aggregation MulAggregation": 1})]


def test_other_forms_of_graphs_are_routed_whatever_their_size() -> None:
    index = EdgeIndex(edges(40), sparse_size=(20, 20)).sort_by("col").values
    adjacency = torch.sparse_coo_tensor(edges(40), torch.ones(40), (20, 20)).coalesce()
    for graph in (index, adjacency.to_sparse_csr()):
        fastgraph.status().reset()
        with fastgraph.enabled():
            GINConv(torch.nn.Linear(CHANNELS, CHANNELS))(torch.randn(20, CHANNELS), graph)
        assert counts()[0][:2] == (1, 0)


def test_questions_are_answered_for_graphs_of_any_size() -> None:
    conv, x, index = GCNConv(CHANNELS, CHANNELS), torch.randn(20, CHANNELS), edges(40)
    fastgraph.enable()
    assert fastgraph.is_accelerated(conv, x, index) == (True, [])
    assert fastgraph.compare(conv, x, index).routing[0].routed > 0
    fastgraph.enable(min_edges=1000)
    assert fastgraph.is_accelerated(conv, x, index)[0] is False


@pytest.mark.parametrize("layer", ["GCNConv", "GINConv", "GATConv"])
def test_compiled_code_does_not_ask_for_the_size(layer: str) -> None:
    make, least = LAYERS[layer]
    conv, x = make(), torch.randn(20, CHANNELS)
    compiled_graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        compiled_graphs.append(graph)
        return graph

    with fastgraph.enabled():
        compiled = torch.compile(conv, fullgraph=True, dynamic=True, backend=backend)
        for num_edges in (min(least[:2]) - 1, max(least[:2]) + 1):
            index = edges(num_edges)
            with fastgraph.enabled(min_edges=0):
                expected = conv(x, index)
            torch.testing.assert_close(compiled(x, index), expected)
    assert len(compiled_graphs) == 1
    assert any("fastgraph" in str(node.target) for node in compiled_graphs[0].graph.nodes)


class Message(MessagePassing):
    """Its message is an edge program."""

    def forward(self, x: Tensor, edge_index: Tensor, rows: Tensor | None = None) -> Tensor:
        return self.propagate(edge_index, x=x, rows=rows)

    def message(self, x_j: Tensor, rows: Tensor | None) -> Tensor:
        return x_j.relu() if rows is None else x_j.relu() + rows


@pytest.mark.parametrize(
    ("channels", "has_rows", "passes", "training", "least"),
    [
        (8, False, 3, True, 100_000),
        (64, False, 3, False, 12_500),
        (64, False, 1, False, 37_500),
        (64, False, 10, True, 3_750),
        (512, False, 3, True, PROGRAM.training),
        (4, False, 10, True, 625_000),
        (64, True, 10, False, 23_438),
        (64, True, 10, True, 78_125),
        (4, True, 10, False, 625_000),
        (1, False, 10, False, 50_000_000),
    ],
)
def test_values_of_messages_decide_for_edge_programs(
    channels: int, has_rows: bool, passes: int, training: bool, least: int
) -> None:
    work = Work(channels, has_rows, passes=passes)
    with torch.set_grad_enabled(training), fastgraph.enabled():
        bound = max(least, PROGRAM.training)
        assert is_too_small(PROGRAM, edges(bound - 1), of_many) or work.is_too_little(bound - 1)
        assert not is_too_small(PROGRAM, edges(bound), of_many)
        assert not work.is_too_little(bound)
        with fastgraph.enabled(min_edges=0):
            assert not work.is_too_little(1)


@pytest.mark.parametrize(
    ("product", "edges", "is_little"),
    [
        (0, 1 << 18, False),
        (0, (1 << 18) - 1, True),
        (64 * 64, 1 << 19, False),
        (64 * 64, 1 << 18, True),
        (256 * 64, 1 << 22, True),
    ],
)
def test_on_gpus_values_decide_or_products_of_each_edge(
    product: int, edges: int, is_little: bool
) -> None:
    work = Work(64, False, largest_product=product)
    with fastgraph.enabled():
        assert work.is_too_little(edges, on_gpu=True) == is_little
        with fastgraph.enabled(min_edges=0):
            assert not work.is_too_little(edges, on_gpu=True)


def test_what_had_too_little_to_compute_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[int] = []
    message = traced._message

    def counted(*args: Any) -> Any:
        planned.append(args[3].shape[1])
        return message(*args)

    monkeypatch.setattr(traced, "_message", counted)
    layer, x = Message(), torch.randn(20, CHANNELS)
    with fastgraph.enabled():
        for count in (5000, 5000, 4000):
            layer(x, edges(count))
        assert planned == [5000]
        layer(x, edges(6000))
        layer(x.repeat(1, 2), edges(6000))  # other channels
        layer(x.repeat(1, 2), edges(6000), torch.randn(6000, 2 * CHANNELS))
        with torch.no_grad():
            layer(x.repeat(1, 2), edges(6000))
        assert planned == [5000, 6000, 6000, 6000, 6000]
        assert counts() == [(0, 7, {TOO_SMALL.reason: 7})]
        with fastgraph.enabled(min_edges=0):
            layer(x.repeat(1, 2), edges(10))
    assert fastgraph.status().row("Message").routed == 1


def test_exponentials_that_gradients_compute_again_count_in_training() -> None:
    one, gates = (
        Work(8, False, passes=10, exponentials=1),
        Work(8, False, passes=10, exponentials=3),
    )
    with fastgraph.enabled(min_edges=None):
        with torch.no_grad():
            assert not one.is_too_little(60_000) and not gates.is_too_little(60_000)
        assert not one.is_too_little(60_000) and gates.is_too_little(60_000)
        assert not gates.is_too_little(217_000)
        with_edges = gates._replace(has_wide_edges=True, passes=12)
        assert with_edges.is_too_little(1_000_000)
        assert not one._replace(has_wide_edges=True).is_too_little(1_000_000)


def test_gates_of_crystals_have_three_exponentials(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Work] = []
    compute = Prepared.compute

    def computed(prepared: Prepared, *args: Any, **kwargs: Any) -> list[Tensor]:
        found.append(prepared.work)
        return compute(prepared, *args, **kwargs)

    monkeypatch.setattr(Prepared, "compute", computed)
    edges = torch.arange(12).view(2, 6) % 4
    with fastgraph.enabled(min_edges=0):
        for conv in (CGConv(8), FAConv(8), ResGatedGraphConv(8, 8)):
            x = torch.randn(4, 8)
            conv(x, x, edges) if isinstance(conv, FAConv) else conv(x, edges)
    assert [work.exponentials for work in found] == [3, 0, 1]
