"""Graphs that are too small to gain: upstream runs, at once, and nothing is read of the graph."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastgraph
from fastgraph.routing.sizes import TOO_SMALL, Least
from fastgraph.settings import Settings
from tests.dgl.graphs import dgl

dglnn = pytest.importorskip("dgl.nn.pytorch")

from dgl.heterograph_index import HeteroGraphIndex  # noqa: E402

from fastgraph.dgl import index_objects, sizes, structure, traced  # noqa: E402  (it imports DGL)

WIDE = 32

Call = Callable[[Any, Tensor], Any]


@pytest.fixture(autouse=True)
def default_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """As programs have it: the measured default."""
    monkeypatch.delenv("FASTGRAPH_MIN_EDGES")


def graph(num_edges: int) -> Any:
    """Edges that begin and end at 20 nodes, at each of them where there are 20 or more."""
    ends = torch.arange(num_edges)
    return dgl.graph((ends * 7 % 20, ends % 20), num_nodes=20)


def counts(name: str) -> tuple[int, int, dict[str, int]]:
    row = fastgraph.status().row(name)
    return row.routed, row.fell_back, dict(row.reasons)


def edge_values(g: Any, *shape: int) -> Tensor:
    return torch.ones(g.num_edges(), *shape)


CALLS: dict[str, tuple[str, Call, Least]] = {
    "sum": ("dgl.gspmm", lambda g, x: dgl.ops.copy_u_sum(g, x), sizes.SUM),
    "max": ("dgl.gspmm", lambda g, x: dgl.ops.copy_u_max(g, x), sizes.EXTREMUM),
    "weighted sum": (
        "dgl.gspmm",
        lambda g, x: dgl.ops.u_mul_e_sum(g, x, edge_values(g, 1)),
        sizes.WEIGHTED_SUM,
    ),
    "max of edges": (
        "dgl.gspmm",
        lambda g, x: dgl.ops.copy_e_max(g, edge_values(g, x.shape[1])),
        sizes.EXTREMUM_OF_EDGES,
    ),
    "dot products": ("dgl.gsddmm", lambda g, x: dgl.ops.u_dot_v(g, x, x), sizes.PRODUCT),
    "softmax": (
        "dgl.edge_softmax",
        lambda g, x: dgl.ops.edge_softmax(g, edge_values(g, 2)),
        sizes.SOFTMAX,
    ),
}

LAYERS: dict[str, tuple[Callable[[int], nn.Module], Least]] = {
    "EdgeGATConv": (lambda c: dglnn.EdgeGATConv(c, 3, c // 2, 2), sizes.EDGE_ATTENTION),
    "HGTConv": (lambda c: dglnn.HGTConv(c, c // 2, 2, 1, 1, 0.0), sizes.TYPED_ATTENTION),
    "RelGraphConv": (lambda c: dglnn.RelGraphConv(c, c, 2), sizes.RELATIONS),
}


def further(layer: str, g: Any) -> dict[str, Tensor]:
    """The arguments of a layer after the graph and the features of nodes."""
    num_edges = g.num_edges()
    return {
        "EdgeGATConv": {"edge_feat": edge_values(g, 3)},
        "HGTConv": {
            "ntype": torch.zeros(20, dtype=torch.int64),
            "etype": torch.zeros(num_edges, dtype=torch.int64),
        },
        "RelGraphConv": {"etypes": torch.arange(num_edges) % 2},
    }.get(layer, {})


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("call", CALLS)
def test_the_number_of_edges_decides_on_message_passing(call: str, training: bool) -> None:
    name, function, least = CALLS[call]
    x = torch.randn(20, sizes.WIDE_EXTREMUM, requires_grad=True)
    bound = least.training if training else least.inference
    with torch.set_grad_enabled(training), fastgraph.enabled(strict=True):
        function(graph(bound - 1), x)
        assert counts(name) == (0, 1, {TOO_SMALL.reason: 1})
        function(graph(bound), x)
        assert counts(name) == (1, 1, {TOO_SMALL.reason: 1})


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("layer", LAYERS)
def test_the_number_of_edges_decides_on_layers(layer: str, training: bool) -> None:
    make, least = LAYERS[layer]
    conv, x = make(WIDE), torch.randn(20, WIDE)
    bound = least.training if training else least.inference
    with torch.set_grad_enabled(training), fastgraph.enabled(strict=True):
        for num_edges, expected in ((bound - 1, (0, 1)), (bound, (1, 1))):
            g = graph(num_edges)
            conv(g, x, **further(layer, g))
            assert counts(layer) == (*expected, {TOO_SMALL.reason: 1})
        g = graph(40)
        with fastgraph.enabled(min_edges=0):
            conv(g, x, **further(layer, g))
        assert counts(layer) == (2, 1, {TOO_SMALL.reason: 1})


@pytest.mark.parametrize(
    ("layer", "channels"),
    [
        ("EdgeGATConv", 8),
        ("HGTConv", 8),
        ("HGTConv", sizes.FEW),
        ("RelGraphConv", sizes.FEW),
    ],
)
def test_narrow_messages_need_more_edges(layer: str, channels: int) -> None:
    make, least = LAYERS[layer]
    conv, x = make(channels), torch.randn(20, channels)
    times = sizes.NARROW_TIMES if channels > sizes.FEW else sizes.FEW_TIMES[least]
    bound = times * least.training
    with fastgraph.enabled():
        for num_edges, expected in ((bound - 1, (0, 1)), (bound, (1, 1))):
            g = graph(num_edges)
            conv(g, x, **further(layer, g))
            assert counts(layer) == (*expected, {TOO_SMALL.reason: 1})


def test_a_layer_that_is_too_small_is_left_with_its_softmax() -> None:
    """DGL groups the edges for the rest of it, and they would be grouped here once more."""
    conv, x = LAYERS["EdgeGATConv"][0](8), torch.randn(20, 8)
    g = graph(sizes.NARROW_TIMES * sizes.EDGE_ATTENTION.training - 1)
    assert g.num_edges() > sizes.SOFTMAX.training
    expected = conv(g, x, **further("EdgeGATConv", g))
    with fastgraph.enabled(strict=True):
        assert torch.equal(conv(g, x, **further("EdgeGATConv", g)), expected)
    assert [row.layer for row in fastgraph.status().rows] == ["dgl.EdgeGATConv"]


@pytest.mark.filterwarnings("ignore::fastgraph.FallbackWarning")
def test_a_layer_that_is_refused_keeps_its_softmax() -> None:
    conv, x = LAYERS["EdgeGATConv"][0](8), torch.randn(20, 8)
    conv.fc_edge.register_forward_hook(lambda *_: None)
    g = graph(sizes.NARROW_TIMES * sizes.EDGE_ATTENTION.training)
    with fastgraph.enabled():
        conv(g, x, **further("EdgeGATConv", g))
    assert counts("EdgeGATConv")[:2] == (0, 1)
    assert counts("dgl.edge_softmax") == (1, 0, {})


def test_a_narrow_layer_that_is_too_small_is_left_with_its_sums() -> None:
    conv, x = dglnn.EGATConv(4, 3, 1, 1, 1), torch.randn(20, 4)
    g = graph(sizes.FEW_TIMES[sizes.WEIGHTED_SUM] * sizes.WEIGHTED_SUM.inference)
    with torch.no_grad(), fastgraph.enabled(strict=True):
        conv(g, x, edge_values(g, 3))
        assert [row.layer for row in fastgraph.status().rows] == ["dgl.EGATConv"]
        dgl.ops.u_mul_e_sum(g, x[:, :1], edge_values(g, 1))
    assert counts("dgl.gspmm") == (1, 0, {})


def test_gradients_of_few_channels_by_learned_weights_are_dgls() -> None:
    """It has grouped the edges for the forward pass."""
    g = graph(sizes.FEW_TIMES[sizes.WEIGHTED_SUM] * sizes.WEIGHTED_SUM.inference)
    x = torch.randn(20, 2, requires_grad=True)
    weights = edge_values(g, 1).requires_grad_()
    with fastgraph.enabled():
        dgl.ops.u_mul_e_sum(g, x, weights).sum().backward()
    reason = "sum of 2 channels by learned weights has no operator"
    assert counts("dgl.gspmm") == (0, 2, {reason: 2})


@pytest.mark.parametrize("layer", ["HGTConv", "RelGraphConv"])
def test_messages_of_types_are_never_traced(layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their products have a gradient of their own, so that no program can be made of them."""

    def plan(*_: object) -> str:
        raise AssertionError("a message was traced")

    monkeypatch.setattr(traced, "plan", plan)
    monkeypatch.setattr(traced, "plan_edges", plan)
    conv, g = LAYERS[layer][0](2), graph(6000)
    x = torch.randn(20, 2)
    expected = conv(g, x, **further(layer, g))
    with fastgraph.enabled(strict=True):
        assert torch.equal(conv(g, x, **further(layer, g)), expected)
    assert counts(layer) == (0, 1, {TOO_SMALL.reason: 1})


@pytest.mark.parametrize(
    ("channels", "with_edges", "values"),
    [(WIDE, False, 250_000), (WIDE, True, 1_000_000), (WIDE - 1, False, 800_000)],
)
def test_the_values_of_messages_of_users_decide(
    channels: int, with_edges: bool, values: int
) -> None:
    def message(edges: Any) -> dict[str, Tensor]:
        other = edges.data["e"] if with_edges else edges.dst["x"]
        return {"m": torch.relu(edges.src["x"] + other)}

    bound = -(-values // channels)
    with fastgraph.enabled(strict=True):
        for num_edges, expected in ((bound - 1, (0, 1)), (bound, (1, 1))):
            g = graph(num_edges)
            g.ndata["x"], g.edata["e"] = torch.randn(20, channels), torch.randn(num_edges, channels)
            g.update_all(message, dgl.function.mean("m", "x"))
            assert counts("dgl.update_all") == (*expected, {TOO_SMALL.reason: 1})


def test_narrow_features_need_more_edges() -> None:
    bound = sizes.NARROW_TIMES * sizes.WEIGHTED_SUM.training
    _, function, _ = CALLS["weighted sum"]
    with fastgraph.enabled():
        function(graph(bound - 1), torch.randn(20, WIDE - 1))
        assert counts("dgl.gspmm") == (0, 1, {TOO_SMALL.reason: 1})
        function(graph(bound), torch.randn(20, WIDE - 1))
        assert counts("dgl.gspmm") == (1, 1, {TOO_SMALL.reason: 1})


def test_sums_of_narrow_features_need_no_more_edges() -> None:
    with fastgraph.enabled(strict=True):
        dgl.ops.copy_u_sum(graph(sizes.SUM.training), torch.randn(20, 1))
        assert counts("dgl.gspmm") == (1, 0, {})


def test_extrema_of_narrow_features_are_left_to_upstream() -> None:
    g = graph(sizes.NARROW_TIMES * sizes.EXTREMUM.training)
    wide = torch.randn(20, sizes.WIDE_EXTREMUM)
    with fastgraph.enabled(strict=True):
        dgl.ops.copy_u_max(g, wide[:, 1:])
        assert counts("dgl.gspmm") == (0, 1, {TOO_SMALL.reason: 1})
        dgl.ops.copy_u_max(g, wide)
        assert counts("dgl.gspmm") == (1, 1, {TOO_SMALL.reason: 1})
        with fastgraph.enabled(min_edges=0):
            dgl.ops.copy_u_max(g, wide[:, 1:])
        assert counts("dgl.gspmm") == (2, 1, {TOO_SMALL.reason: 1})


@pytest.mark.parametrize("layer", ["GraphConv", "GATConv", "AGNNConv"])
def test_layers_that_gain_on_any_graph(layer: str) -> None:
    make = {
        "GraphConv": lambda: dglnn.GraphConv(8, 8),
        "GATConv": lambda: dglnn.GATConv(8, 4, 2),
        "AGNNConv": dglnn.AGNNConv,
    }[layer]
    with fastgraph.enabled(strict=True):
        make()(graph(20), torch.randn(20, 8))
    assert counts(layer) == (1, 0, {})


@pytest.mark.parametrize(
    ("kind", "bound"),
    [("pool", sizes.POOLING.training), ("gcn", sizes.SUM_WITH_ITSELF.training)],
)
def test_some_layers_are_left_to_message_passing(kind: str, bound: int) -> None:
    conv, x = dglnn.SAGEConv(WIDE, WIDE, kind), torch.randn(20, WIDE)
    with fastgraph.enabled():
        conv(graph(bound - 1), x)
        assert counts("SAGEConv")[0] == 0
        assert counts("dgl.gspmm") == (0, 1, {TOO_SMALL.reason: 1})
        conv(graph(bound), x)
        assert counts("SAGEConv")[0] == 1


@pytest.mark.parametrize("layer", [*LAYERS, "GINConv"])
def test_nothing_is_read_of_a_small_graph(layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    others = {"GINConv": lambda c: dglnn.GINConv(nn.Linear(c, c), "max")}
    conv = (others.get(layer) or LAYERS[layer][0])(WIDE)
    x = torch.randn(20, WIDE, requires_grad=True)
    g = graph(60)
    arguments = further(layer, g)

    def step() -> list[Tensor]:
        out = conv(graph(60), x, **arguments)
        return [out, *torch.autograd.grad(out.square().sum(), [x, *conv.parameters()])]

    expected = step()

    def read(*_: object) -> str:
        raise AssertionError("a graph was read")

    monkeypatch.setattr(structure, "_read", read)
    with fastgraph.enabled(strict=True), warnings.catch_warnings():
        warnings.simplefilter("error", fastgraph.FallbackWarning)
        found = step()
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    reasons = {reason for row in fastgraph.status().rows for reason in row.reasons}
    assert reasons == {TOO_SMALL.reason}


def test_a_given_least_number_of_edges_counts_instead() -> None:
    x = torch.randn(20, WIDE)
    with fastgraph.enabled(min_edges=60):
        dgl.ops.copy_u_sum(graph(60), x)
        dgl.ops.copy_u_sum(graph(59), x)
    assert counts("dgl.gspmm") == (1, 1, {"fewer than min_edges=60 edges": 1})


def test_wrong_calls_are_told_whatever_the_size() -> None:
    with fastgraph.enabled(), pytest.raises(ValueError, match="must have a row for each of 40"):
        dgl.ops.edge_softmax(graph(40), torch.ones(39, 2))
    with fastgraph.enabled(), pytest.raises(ValueError, match="must have a row for each of 20"):
        dgl.ops.u_dot_v(graph(40), torch.ones(20, 4), torch.ones(0, 4))


def test_layers_need_no_more_edges_than_what_they_consist_of() -> None:
    """Or else parts of a layer would be routed that is too small as a whole."""
    parts = (sizes.WEIGHTED_SUM, sizes.SUM, sizes.SOFTMAX, sizes.PRODUCT)
    for _, least in LAYERS.values():
        for part in parts:
            assert least.inference <= part.inference and least.training <= part.training
    assert sizes.SUM_WITH_ITSELF.inference <= sizes.SUM.inference
    assert sizes.SUM_WITH_ITSELF.training <= sizes.SUM.training
    assert sizes.POOLING.inference <= sizes.EXTREMUM.inference
    assert sizes.POOLING.training <= sizes.EXTREMUM.training


def entered(call: Callable[[], object]) -> Counter[str]:
    """The functions of fastgraph that a call enters, but for those of tests."""
    found: Counter[str] = Counter()

    def notice(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith("fastgraph."):
            found[frame.f_code.co_name] += 1

    before = sys.getprofile()
    sys.setprofile(notice)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found


def scores(edges: Any) -> dict[str, Tensor]:
    return {"score": edges.src["x"] - edges.dst["x"]}


TINY_CALLS: dict[str, Call] = {
    **{name: call for name, (_, call, _) in CALLS.items()},
    "messages without an operator": lambda g, x: dgl.ops.u_add_e_max(g, x, edge_values(g, 1)),
    "products of features": lambda g, x: dgl.ops.u_mul_v(g, x, x),
    "function of a user": lambda g, x: g.apply_edges(scores),
}


@pytest.mark.parametrize("call", TINY_CALLS)
def test_a_tiny_graph_is_left_to_upstream_at_one_look(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    g, x = graph(60), torch.randn(20, WIDE)
    g.ndata["x"] = x
    with fastgraph.enabled(strict=True), torch.no_grad():
        TINY_CALLS[call](g, x)

        def asked(*_: object) -> int:
            raise AssertionError("DGL's library was asked for what is known")

        monkeypatch.setattr(structure, "_source_of", asked)
        made = entered(lambda: TINY_CALLS[call](g, x))
    assert made.total() <= 12, made
    assert not {"plan", "plan_edges", "is_too_small"} & made.keys()
    assert {reason for row in fastgraph.status().rows for reason in row.reasons} == {
        TOO_SMALL.reason
    }


def test_so_is_the_gradient_of_a_sum_on_one() -> None:
    g, x = graph(60), torch.randn(20, WIDE, requires_grad=True)

    def step() -> None:
        with torch.autograd.set_multithreading_enabled(False):
            dgl.ops.copy_u_sum(g, x).sum().backward()

    with fastgraph.enabled(strict=True):
        step()
        made = entered(step)
    assert made["apply"] == 2 and made["reversed_index"] == 1
    assert not {"plan", "_join", "is_too_small"} & made.keys()


def test_a_layer_that_is_left_counts_nothing_within() -> None:
    conv, g = LAYERS["RelGraphConv"][0](WIDE), graph(60)
    with fastgraph.enabled(strict=True):
        conv(g, torch.randn(20, WIDE), **further("RelGraphConv", g))
    assert [row.layer for row in fastgraph.status().rows] == ["dgl.RelGraphConv"]


def test_edges_are_counted_once_on_larger_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    g, x = graph(index_objects.FEWEST), torch.randn(20, WIDE)
    with fastgraph.enabled(strict=True), torch.no_grad():
        dgl.ops.copy_u_sum(g, x)
        count = index_objects.num_edges_of(g._graph)
        monkeypatch.setattr(HeteroGraphIndex, "number_of_edges", lambda *_: 1 / 0)
        made = entered(lambda: dgl.ops.copy_u_sum(g, x))
    assert count == index_objects.FEWEST and "plan" not in made
    assert counts("dgl.gspmm") == (0, 2, {TOO_SMALL.reason: 2})


def test_a_new_graph_tells_its_size_without_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: object) -> None:
        raise AssertionError("DGL's library was asked")

    monkeypatch.setattr(index_objects, "_MAY_BE_ON_GPU", False)
    monkeypatch.setattr(index_objects, "current", Settings)  # whatever others have set
    g = graph(60)
    for name in ("ctx", "metagraph"):
        monkeypatch.setattr(HeteroGraphIndex, name, property(asked))
    for name in ("number_of_edges", "number_of_etypes", "get_relation_graph"):
        monkeypatch.setattr(HeteroGraphIndex, name, asked)
    assert index_objects.is_tiny_graph(g)
    assert index_objects.is_single(g._graph)
    assert index_objects.num_edges_of(g._graph) == 60
    assert not index_objects.is_graph_below(g, 60)


@pytest.mark.parametrize("may_be_on_gpu", [False, True])
def test_facts_of_a_graph_are_those_of_its_library(
    may_be_on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_objects, "_MAY_BE_ON_GPU", may_be_on_gpu)
    monkeypatch.setattr(index_objects, "current", Settings)  # whatever others have set
    edges = torch.tensor([0, 1, 1]), torch.tensor([1, 0, 2])
    grown, shrunk = dgl.graph(edges), dgl.graph(edges)
    grown.add_edges(2, 0)
    shrunk.remove_edges([0, 1])
    for g, size in (
        (dgl.graph(edges), 3),
        (dgl.graph(([], []), num_nodes=4), 0),
        (grown, 4),
        (shrunk, 1),
        (dgl.reverse(grown), 4),
        (grown.local_var(), 4),
        (dgl.to_block(grown), 4),
        (dgl.heterograph({("a", "to", "b"): edges}), 3),
    ):
        assert index_objects.is_graph_below(g, size + 1)
        assert not index_objects.is_graph_below(g, size)
        assert index_objects.is_single(g._graph)
    several = dgl.heterograph({("a", "to", "a"): edges, ("a", "from", "a"): edges})
    assert not index_objects.is_graph_below(several, sys.maxsize - 1)
    assert not index_objects.is_single(several._graph)


def test_no_operator_of_message_passing_gains_on_a_tiny_graph() -> None:
    for _, _, least in CALLS.values():
        assert min(least.inference, least.training) >= index_objects.FEWEST
    assert min(*sizes.SUM_OF_EDGES[:2]) >= index_objects.FEWEST


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "work",
    [
        sizes.ProgramWork(1),
        sizes.ProgramWork(8),
        sizes.ProgramWork(64),
        sizes.ProgramWork(64, has_wide_edges=True),
        sizes.ProgramWork(64, has_winners=True),
        sizes.ProgramWork(16, gains_in_training=False),
    ],
)
def test_a_program_has_one_bound_for_its_edges(work: sizes.ProgramWork, training: bool) -> None:
    with torch.set_grad_enabled(training):
        fewest = sizes._fewest_edges(work, training)
        assert fewest >= sizes.PROGRAM.bound()
        if fewest == sizes.NEVER:
            assert training and not work.gains_in_training
            return
        assert not work.is_too_little(fewest)
        assert fewest == sizes.PROGRAM.bound() or work.is_too_little(fewest - 1)
