"""Messages of any form go by edge programs: the same numbers, or upstream's code with a reason."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import random
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fastgraph
from fastgraph.layers import tracing
from fastgraph.pyg import traced
from tests.ab import Arguments, arguments
from tests.graphs import Case, all_cases, hub_edges, quantised, random_edges
from tests.outcomes import differences
from tests.pyg.traced_layers import (
    CHANNELS,
    EDGES,
    NODES,
    Scaled,
    Updating,
    refused,
    routed,
    second_derivative,
    traces,
    with_message,
    x64,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::fastgraph.FallbackWarning"),
    pytest.mark.usefixtures("nothing_known"),
]


def features(case: Case, width: int = CHANNELS) -> Any:
    """Features with ties, of both kinds of nodes where there are two."""
    x = quantised(case.num_src, width)
    if case.num_src == case.num_dst:
        return x
    return x, quantised(case.num_dst, width, seed=1)


def of_edges(case: Case, *shape: int) -> Tensor:
    return quantised(case.num_edges, *shape, seed=2)


def sized(case: Case) -> dict[str, Any]:
    return {"size": (case.num_src, case.num_dst)}


# By name: the layer, and its arguments besides features and edges; None where it takes no pair.
Made = tuple[Callable[[], nn.Module], Callable[[Case], Arguments | None]]


def plain(case: Case) -> Arguments:
    return arguments(features(case), case.edge_index)


def square(case: Case) -> Arguments | None:
    return plain(case) if case.num_src == case.num_dst else None


def with_edges(width: int) -> Callable[[Case], Arguments]:
    return lambda case: arguments(features(case), case.edge_index, of_edges(case, width))


LAYERS: dict[str, Made] = {
    "ResGatedGraphConv": (lambda: pyg.ResGatedGraphConv(CHANNELS, 3), plain),
    "ResGatedGraphConv with edges": (
        lambda: pyg.ResGatedGraphConv(CHANNELS, 3, edge_dim=2),
        with_edges(2),
    ),
    "GENConv max": (lambda: pyg.GENConv(CHANNELS, CHANNELS, aggr="max"), with_edges(CHANNELS)),
    "GENConv sum of projected edges": (
        lambda: pyg.GENConv(CHANNELS, 3, aggr="add", edge_dim=2),
        with_edges(2),
    ),
    "GINEConv": (lambda: pyg.GINEConv(nn.Linear(CHANNELS, 3)), with_edges(CHANNELS)),
    "GINEConv with projected edges": (
        lambda: pyg.GINEConv(nn.Linear(CHANNELS, 3), edge_dim=2),
        with_edges(2),
    ),
    "CGConv": (lambda: pyg.CGConv(CHANNELS, 2), with_edges(2)),
    "CGConv of one kind of nodes": (
        lambda: pyg.CGConv(CHANNELS),
        lambda case: plain(case) if case.num_src == case.num_dst else None,
    ),
    "FiLMConv": (lambda: pyg.FiLMConv(CHANNELS, 3), plain),
    "EdgeConv": (
        lambda: pyg.EdgeConv(nn.Sequential(nn.Linear(2 * CHANNELS, 3), nn.ReLU())),
        plain,
    ),
    "EdgeConv sum": (lambda: pyg.EdgeConv(nn.Linear(2 * CHANNELS, 3), aggr="add"), plain),
    "LEConv": (lambda: pyg.LEConv(CHANNELS, 3), square),
    "GeneralConv": (lambda: pyg.GeneralConv(CHANNELS, 3), plain),
    "GeneralConv mean": (lambda: pyg.GeneralConv(CHANNELS, 3, aggr="mean"), square),
    "a user's sum": (Scaled, lambda case: arguments(*plain(case)[0], **sized(case))),
    "a user's mean": (lambda: Scaled("mean"), plain),
    "a user's max": (lambda: Scaled("max"), plain),
    "a user's min": (lambda: Scaled("min"), plain),
    "a user's update": (Updating, plain),
    "a user's layer backwards": (lambda: Scaled(flow="target_to_source"), square),
    "rows first": (lambda: Scaled(node_dim=0), plain),
}


def calls_of(make: Callable[[Case], Arguments | None]) -> dict[str, Arguments]:
    """The calls on all graphs but those of which upstream's gradients are wrong, or less exact."""
    found = {case.name: make(case) for case in all_cases() if case.name not in ("int32", "hub")}
    return {name: call for name, call in found.items() if call is not None}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_what_they_are_upstream(name: str) -> None:
    torch.manual_seed(0)
    make, given = LAYERS[name]
    layer, calls = make().double(), calls_of(given)
    assert differences(layer, calls) == {}
    (row,) = fastgraph.status().rows
    assert not row.reasons and row.routed == len(calls)


@pytest.mark.parametrize("aggr", ["sum", "max"])
def test_rows_of_many_edges(aggr: str) -> None:
    torch.manual_seed(0)
    layer, x = Scaled(aggr).double(), quantised(40, CHANNELS).requires_grad_()
    edges = hub_edges(40, 12_000)
    leaves = [x, *layer.parameters()]
    expected = layer(x, edges)
    grads = torch.autograd.grad(expected.sin().sum(), leaves)
    with fastgraph.enabled(min_edges=0):
        found = layer(x, edges)
    # Sums of thousands of messages, in another order.
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-9)
    torch.testing.assert_close(
        torch.autograd.grad(found.sin().sum(), leaves), grads, rtol=1e-8, atol=1e-6
    )


def test_int32_indices_give_the_gradients_of_int64_ones() -> None:
    layer, x = Scaled().double(), x64().requires_grad_()
    found = []
    with fastgraph.enabled(min_edges=0):
        for edges in (EDGES, EDGES.int()):
            out = layer(x, edges)
            found.append((out, *torch.autograd.grad(out.sin().sum(), [x, *layer.parameters()])))
    assert fastgraph.status().row("Scaled").routed == 2
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_hypergraphs() -> None:
    torch.manual_seed(0)
    layer = pyg.HypergraphConv(CHANNELS, 3).double()
    edges = torch.stack([EDGES[0], EDGES[1] % 5])
    call = arguments(quantised(NODES, CHANNELS), edges)
    assert differences(layer, {"hyperedges": call}) == {}
    assert not fastgraph.status().row("HypergraphConv").reasons


def test_a_program_is_traced_once() -> None:
    layer = Scaled().double()
    for count in (40, 50, 60):
        routed(layer, x64(), random_edges(NODES, NODES, count))
    assert traces(layer) == 1
    other = Scaled().double()  # in the same state
    routed(other, x64())
    assert traces(other) == 0


def test_masks_of_edges_nodes_and_parameters() -> None:
    class Masked(Weighted):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.arange(CHANNELS) % 2 == 0)

        def message(self, x_i: Tensor, x_j: Tensor, e: Tensor, w_j: Tensor) -> Tensor:
            return torch.where(self.mask, x_j * e, x_i) + x_i.masked_fill(w_j, 3.0)

    torch.manual_seed(0)
    masks = torch.rand(40, 1) > 0.5, torch.rand(NODES, 1) > 0.5
    for dtype in (torch.float64, torch.float32):
        layer = Masked().to(dtype)
        x = x64().to(dtype).requires_grad_()
        expected = layer(x, EDGES, *masks)
        with fastgraph.enabled(min_edges=0):
            found = layer(x, EDGES, *masks)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(
            torch.autograd.grad(found.square().sum(), x),
            torch.autograd.grad(expected.square().sum(), x),
        )
    row = fastgraph.status().row("Masked")
    assert (row.routed, dict(row.reasons)) == (2, {})


def test_differences_keep_their_digits_far_from_zero() -> None:
    torch.manual_seed(0)
    places = torch.randn(NODES, 3) + 1e5
    layer = pyg.PointNetConv(nn.Linear(3, 8), add_self_loops=False)
    with fastgraph.enabled(min_edges=0):
        found = layer(None, places, EDGES)
    exact = layer.double()(None, places.double(), EDGES)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    assert fastgraph.status().row("PointNetConv").routed == 1


def test_messages_without_edges_in_the_dimension_of_nodes_are_upstreams_error() -> None:
    layer = with_message(lambda self, x_i, x_j: (x_i * x_j).view(-1, 1))(node_dim=-1).double()
    for min_edges in (1000, 0):
        with fastgraph.enabled(min_edges=min_edges), pytest.raises(RuntimeError, match="expanded"):
            layer(x64(NODES), EDGES)


def test_nothing_stays_in_a_layer() -> None:
    layer, x = Scaled().double(), x64()
    before, state = dict(layer.__dict__), copy.deepcopy(layer.state_dict())
    routed(layer, x)
    assert layer.__dict__ == before
    torch.testing.assert_close(layer.state_dict(), state, rtol=0, atol=0)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.testing.assert_close(routed(other, x), layer(x, EDGES))
        assert traces(other) == 0


def test_random_states_stay_as_they_are() -> None:
    layer, x = Scaled().double(), x64()
    torch.manual_seed(3)
    with fastgraph.enabled(min_edges=0):
        layer(x, EDGES)
    assert traces(layer) == 1
    drawn = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(2))


def test_garbage_may_be_collected_meanwhile() -> None:
    """Callbacks of the collector are none of the message: Hypothesis and profilers have some."""
    layer, x, seen = Scaled().double(), x64(), []

    def collected(phase: str, info: dict[str, int]) -> None:
        seen.append(phase)
        random.seed(0)
        print(phase, file=io.StringIO())

    thresholds = gc.get_threshold()
    gc.callbacks.append(collected)
    gc.set_threshold(1)
    try:
        routed(layer, x)
    finally:
        gc.callbacks.remove(collected)
        gc.set_threshold(*thresholds)
    assert seen and gc.isenabled()


def test_a_profiler_keeps_its_place() -> None:
    layer, x, called = Scaled().double(), x64(), []

    def profiled(frame: types.FrameType, event: str, argument: Any) -> None:
        called.append(frame.f_code.co_name)

    sys.setprofile(profiled)
    try:
        routed(layer, x)
        assert sys.getprofile() is profiled
    finally:
        sys.setprofile(None)
    assert "routed" in called and traces(layer) == 1


@pytest.mark.parametrize("aggr", ["sum", "max", "std"])
def test_hooks_of_saved_tensors_see_nothing_of_tracing(aggr: str) -> None:
    """A checkpoint must save as much when it computes again."""
    layer, x = Scaled(aggr).double(), x64().requires_grad_()
    leaves = [x, *layer.parameters()]
    expected = torch.autograd.grad(layer(x, EDGES).sin().sum(), leaves)
    with fastgraph.enabled(min_edges=0):
        out = checkpoint(layer, x, EDGES, use_reentrant=False)
        found = torch.autograd.grad(out.sin().sum(), leaves)
    torch.testing.assert_close(found, expected)
    assert fastgraph.status().row("Scaled").routed == 2 and traces(layer) == 1


class Nesting(Scaled):
    """A layer whose message calls another layer, where it is compared with its program."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Scaled()

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.inner(x_i, EDGES) if x_i.dtype is torch.float64 else x_j


@pytest.mark.parametrize("profiler", [None, lambda *_: None])
def test_a_layer_within_a_message_is_not_traced_meanwhile(profiler: Any) -> None:
    """It would wait for the lock that tracing holds."""
    layer, x = Nesting(), torch.randn(NODES, CHANNELS)
    fastgraph.status().reset()
    sys.setprofile(profiler)
    try:
        with fastgraph.enabled(min_edges=0):
            layer(x, EDGES)
    finally:
        sys.setprofile(None)
    (reason,) = fastgraph.status().row("Nesting").reasons
    assert "no edge program" in reason


@pytest.mark.parametrize("aggr", ["sum", "max"])
def test_features_may_be_edited_before_the_backward_pass(aggr: str) -> None:
    layer = Scaled(aggr).double()

    def gradients() -> list[Tensor]:
        x = x64().requires_grad_()
        features = x * 1
        out = layer(features, EDGES)
        features += 1
        leaves = [x, *layer.parameters()]
        return list(torch.autograd.grad(out.square().sum() + features.sum(), leaves))

    torch.manual_seed(0)
    expected = gradients()
    with fastgraph.enabled(min_edges=0):
        torch.manual_seed(0)
        found = gradients()
    assert fastgraph.status().row("Scaled").routed == 1
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


class Weighted(Scaled):
    """A layer whose message multiplies features of edges."""

    def forward(self, x: Any, edge_index: Tensor, e: Any = None, w: Any = None) -> Tensor:
        return self.propagate(edge_index, x=x, e=e, w=w)

    def message(self, x_j: Tensor, e: Tensor, w: Tensor) -> Tensor:
        return x_j * e * w


def test_edited_features_of_edges_are_an_error() -> None:
    layer = Weighted().double()
    for min_edges in (1000, 0):  # upstream, ours
        e, w, x = x64(40, CHANNELS), x64(40, CHANNELS), x64()
        with fastgraph.enabled(min_edges=min_edges):
            out = layer(x.requires_grad_(), EDGES, e, w)
        e += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    assert fastgraph.status().row("Weighted").routed == 1


def test_results_may_be_edited() -> None:
    layer, x = Scaled().double(), x64().requires_grad_()
    with fastgraph.enabled(min_edges=0):
        out = layer(x, EDGES)
        out += 1
        out.view(-1)[0] = 3
        out.sum().backward()
    assert x.grad is not None


def test_edited_maxima_of_several_dimensions_are_an_error() -> None:
    cls = with_message(lambda self, x_i, x_j: (x_i * x_j).view(-1, 2, CHANNELS // 2))
    layer, x = cls("max", node_dim=0).double(), x64().requires_grad_()
    for min_edges in (1000, 0):  # upstream, ours
        with fastgraph.enabled(min_edges=min_edges):
            out = layer(x, EDGES)
        out += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    assert fastgraph.status().row("Own").routed == 1


@pytest.mark.parametrize("aggr", ["sum", "max"])
def test_second_derivatives(aggr: str) -> None:
    torch.manual_seed(0)
    layer = Scaled(aggr, act=nn.Tanh()).double()
    x = quantised(NODES + 1, CHANNELS).add(0.25).requires_grad_()  # one without edges

    def loss() -> Tensor:
        return (layer(x, EDGES) + x).square().sum()

    expected = second_derivative(loss, x)
    with fastgraph.enabled(min_edges=0):
        found = second_derivative(loss, x)
    assert fastgraph.status().row("Scaled").routed == 1
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_inference_mode_and_no_grad() -> None:
    layer, x = Scaled().double(), x64()
    expected = layer(x, EDGES).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        traced.KNOWN.clear()
        with fastgraph.enabled(min_edges=0), mode():
            torch.testing.assert_close(layer(x, EDGES), expected)
        with fastgraph.enabled(min_edges=0):
            out = layer(x.requires_grad_(), EDGES)
            torch.autograd.grad(out.sum(), [x, *layer.parameters()])
    assert fastgraph.status().row("Scaled").routed == 4


def test_few_states_are_kept() -> None:
    x = x64()
    with fastgraph.enabled(min_edges=0):
        for k in range(tracing.MOST_STATES + 2):
            layer = Scaled().double()
            layer.scale = k + 0.5
            layer(x, EDGES)
    (states,) = traced.KNOWN.states()
    assert len(states) == tracing.MOST_STATES
    routed(layer, x)
    assert traces(layer) == 1


def test_a_layer_that_is_another_one_at_every_call() -> None:
    layer, x = Scaled().double(), x64()
    with fastgraph.enabled(min_edges=0):
        for k in range(tracing.MOST_TRACES + 2):
            layer.scale = k + 0.5
            layer(x, EDGES)
    row = fastgraph.status().row("Scaled")
    assert (row.routed, row.fell_back) == (tracing.MOST_TRACES, 2)
    assert dict(row.reasons) == {"its message or its layer is another one at every call": 2}


def test_edges_outside_the_nodes_are_upstreams_error() -> None:
    layer, x = Scaled().double(), x64()
    wrong = torch.tensor([[0, NODES], [1, 2]])
    with fastgraph.enabled(min_edges=0), pytest.raises(IndexError, match="larger than 11") as found:
        layer(x, wrong)
    assert any("fastgraph" in note for note in found.value.__notes__)


def test_other_arguments_are_upstreams_error() -> None:
    layer = Scaled().double()
    with fastgraph.enabled(min_edges=0), pytest.raises(TypeError, match="unexpected keyword"):
        layer.propagate(EDGES, x=x64(), y=x64())
    with fastgraph.enabled(min_edges=0), pytest.raises(ValueError, match="expected size"):
        layer.propagate(EDGES, x=x64(), size=(NODES + 1, NODES + 1))


def test_one_layer_in_many_threads_is_traced_beside_itself() -> None:
    layer = Scaled().double()
    stand_in = tracing.stand_in(layer)
    stand_in.lin.weight = nn.Parameter(x64(3))
    stand_in.scale = 9
    assert layer.lin.weight.shape == (CHANNELS, 2 * CHANNELS)
    assert layer.scale == 0.5


def test_compiled_code_runs_upstreams() -> None:
    layer, x = Scaled().double(), x64()
    expected = layer(x, EDGES)
    with fastgraph.enabled(min_edges=0):
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x, EDGES), expected)


def test_small_graphs_gain_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTGRAPH_MIN_EDGES")
    layer, x = Scaled().double(), x64()
    with fastgraph.enabled():
        layer(x, EDGES)
        layer(x, random_edges(NODES, NODES, 20_000))  # 4 channels
    row = fastgraph.status().row("Scaled")
    assert (row.routed, row.fell_back) == (0, 2)
    assert "too few edges" in next(iter(row.reasons))


def test_programs_are_told() -> None:
    layer, x = Scaled().double(), x64()
    assert fastgraph.explain(layer) == (
        "Scaled: no message was traced; fastgraph.status() says which layers were routed"
    )
    routed(layer, x)
    row = fastgraph.status().row("Scaled")
    assert (row.routed, row.programs) == (1, 1)
    assert "edge program" in str(fastgraph.status())
    text = fastgraph.explain(layer)
    assert text.startswith("Scaled: edge program, reduced by sum:\n")
    assert "  x_i = row 4\n" in text
    assert "linear(x_i, slice(lin.weight, 1, 0, 4))" in text
    assert "kept for the gradients of all operands: " in text
    other = Scaled(aggr="median").double()
    refused(other, x, EDGES)
    assert fastgraph.explain(nn.Sequential(layer, other)).endswith(
        "\n1 (Scaled): left to upstream: aggregation MedianAggregation"
    )
    with pytest.raises(TypeError, match="module must be"):
        fastgraph.explain(3)


@pytest.mark.parametrize(
    "act", [torch.relu, torch.abs, torch.nn.functional.leaky_relu], ids=lambda act: act.__name__
)
def test_second_derivatives_that_are_zero(act: Any) -> None:
    """Zeros where upstream has zeros, of a slope, and no gradient where it has none."""

    def message(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
        return act(x_i - x_j) @ self.matrix

    layer, x = with_message(message)().double(), x64().requires_grad_()
    layer.register_buffer("matrix", x64(CHANNELS, 3))
    found = []
    for min_edges in (1000, 0):  # upstream, ours
        with fastgraph.enabled(min_edges=min_edges):
            out = layer(x, EDGES)
        (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.sum(), x, allow_unused=True)[0])
    assert fastgraph.status().row("Own").routed == 1
    assert found[0] is not None and torch.equal(found[1], found[0])
