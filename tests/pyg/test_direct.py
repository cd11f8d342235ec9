"""Small calls that skip upstream's questions: the same bits, the same errors, and hooks are run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.nn import (
    CGConv,
    ChebConv,
    EGConv,
    FAConv,
    FeaStConv,
    GatedGraphConv,
    GENConv,
    GINConv,
    GINEConv,
    GraphConv,
    HANConv,
    HypergraphConv,
    LEConv,
    LGConv,
    MessagePassing,
    PointTransformerConv,
    RGCNConv,
    SAGEConv,
    SimpleConv,
    TAGConv,
)
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.nn.conv import message_passing

import fastgraph
from fastgraph.routing.status import counted_as_whole

# Whatever computes, upstream's functions run on the host's memory.
pytestmark = pytest.mark.repeats

EDGES = torch.tensor([[0, 1, 2, 2, 5, 5, 5, 0], [1, 0, 1, 1, 5, 3, 1, 0]])
WEIGHT = torch.linspace(-1, 2, 8)

LAYERS: dict[str, Callable[[], tuple[MessagePassing, tuple[Any, ...]]]] = {
    "SimpleConv": lambda: (SimpleConv(), ()),
    "SimpleConv, weighted": lambda: (SimpleConv(), (WEIGHT,)),
    "SimpleConv mean": lambda: (SimpleConv("mean"), ()),
    "SimpleConv max": lambda: (SimpleConv("max"), ()),
    "reversed": lambda: (SimpleConv(flow="target_to_source"), ()),
    "LGConv": lambda: (LGConv(), ()),
    "TAGConv": lambda: (TAGConv(4, 3), (WEIGHT.abs(),)),
    "ChebConv": lambda: (ChebConv(4, 3, 3), ()),
    "GatedGraphConv": lambda: (GatedGraphConv(4, 2), ()),
    "GINConv": lambda: (GINConv(torch.nn.Linear(4, 2)), ()),
    "SAGEConv": lambda: (SAGEConv(4, 2), ()),
    "GraphConv": lambda: (GraphConv(4, 2), (WEIGHT,)),
}


TRACED: dict[str, Callable[[], tuple[MessagePassing, Callable[[Any, Tensor], Any]]]] = {
    "CGConv": lambda: (CGConv(4), lambda m, x: m(x, EDGES)),
    "CGConv max": lambda: (CGConv(4, aggr="max"), lambda m, x: m((x, x[:6]), EDGES)),
    "EGConv": lambda: (EGConv(4, 4, num_heads=2), lambda m, x: m(x, EDGES)),  # own aggregate
    "FAConv": lambda: (FAConv(4), lambda m, x: m(x, x, EDGES)),
    "FeaStConv": lambda: (FeaStConv(4, 3, 2), lambda m, x: m(x, EDGES)),
    "GENConv": lambda: (GENConv(4, 3), lambda m, x: m(x, EDGES)),  # aggregates by a softmax
    "GINEConv": lambda: (
        GINEConv(torch.nn.Linear(4, 2), edge_dim=1),
        lambda m, x: m(x, EDGES, WEIGHT[:, None]),
    ),
    "HANConv": lambda: (
        HANConv(4, 4, (["n"], [("n", "a", "n"), ("n", "b", "n")]), heads=2),
        lambda m, x: m({"n": x}, {("n", "a", "n"): EDGES, ("n", "b", "n"): EDGES.flip(0)})["n"],
    ),
    "HypergraphConv": lambda: (HypergraphConv(4, 3), lambda m, x: m(x, EDGES)),  # sizes differ
    "LEConv": lambda: (LEConv(4, 3), lambda m, x: m(x, EDGES, WEIGHT)),
    "PointTransformerConv": lambda: (
        PointTransformerConv(4, 3),
        lambda m, x: m(x, x[:, :3], EDGES),
    ),
    "RGCNConv": lambda: (RGCNConv(4, 3, 3), lambda m, x: m(x, EDGES, EDGES[0] % 3)),
    "Changed": lambda: (Changed(), lambda m, x: m(x, EDGES)),
    "reversed": lambda: (
        Changed(aggr="mean", flow="target_to_source"),
        lambda m, x: m(x, EDGES),
    ),
}


class Changed(MessagePassing):
    """A layer whose messages take both ends, and whose results are changed for each node."""

    def forward(self, x: Tensor, edge_index: Tensor, size: Any = None) -> Tensor:
        return self.propagate(edge_index, x=x, scale=x[:, :1], size=size)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return x_i - 2 * x_j

    def update(self, inputs: Tensor, scale: Tensor) -> Tensor:
        return inputs * scale


@pytest.fixture(autouse=True)
def default_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """As programs have it: the measured default."""
    monkeypatch.delenv("FASTGRAPH_MIN_EDGES")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The graphs about which upstream's own ``propagate`` asks before it computes."""
    found: list[object] = []
    upstream = message_passing.is_sparse
    monkeypatch.setattr(
        message_passing, "is_sparse", lambda graph: (found.append(graph), upstream(graph))[1]
    )
    return found


def _both(conv: MessagePassing, x: Any, *given: Any) -> tuple[Tensor, Tensor]:
    expected = conv(x, EDGES, *given)
    with fastgraph.enabled():
        return conv(x, EDGES, *given), expected


@pytest.mark.parametrize("layer", LAYERS)
def test_results_and_gradients_are_upstreams_bits(layer: str, asked: list[object]) -> None:
    conv, given = LAYERS[layer]()
    x = torch.randn(6, 4, requires_grad=True)
    leaves = [x, *conv.parameters()]
    conv(x, EDGES, *given)  # whose shapes may be learned
    asked.clear()
    expected = conv(x, EDGES, *given)
    assert asked
    gradients = torch.autograd.grad(expected.square().sum(), leaves, allow_unused=True)
    asked.clear()
    with fastgraph.enabled():
        ours = conv(x, EDGES, *given)
    assert not asked
    assert torch.equal(ours, expected)
    found = torch.autograd.grad(ours.square().sum(), leaves, allow_unused=True)
    for a, b in zip(found, gradients, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("layer", TRACED)
def test_traced_messages_have_upstreams_bits(layer: str, asked: list[object]) -> None:
    conv, call = TRACED[layer]()
    x = torch.randn(6, 4, requires_grad=True)
    call(conv, x)  # whose shapes may be learned
    leaves = [x, *conv.parameters()]
    asked.clear()
    expected = call(conv, x)
    assert asked
    gradients = torch.autograd.grad(expected.square().sum(), leaves, allow_unused=True)
    with fastgraph.enabled():
        call(conv, x)  # is found to be too small
        asked.clear()
        ours = call(conv, x)
    assert not asked
    assert torch.equal(ours, expected)
    found = torch.autograd.grad(ours.square().sum(), leaves, allow_unused=True)
    for a, b in zip(found, gradients, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def _calls(run: Callable[[], object]) -> int:
    """How many functions of Python are called."""
    count = 0

    def seen(_: object, event: str, __: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("layer", TRACED)
def test_a_small_call_asks_less_than_upstream(layer: str) -> None:
    conv, call = TRACED[layer]()
    x = torch.randn(6, 4)
    with torch.no_grad():
        call(conv, x)
        expected = _calls(lambda: call(conv, x))
        with fastgraph.enabled():
            call(conv, x)
            call(conv, x)
            assert _calls(lambda: call(conv, x)) < expected


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("num_out", [None, 6, 7])
def test_two_kinds_of_nodes(num_out: int | None, flow: str) -> None:
    conv = SimpleConv(flow=flow)
    x = torch.randn(6, 4), None if num_out is None else torch.randn(num_out, 4)
    given = (None, (6, 6)) if num_out == 6 else ()
    ours, expected = _both(conv, x, *given)
    assert ours.shape == expected.shape and torch.equal(ours, expected)


@pytest.mark.parametrize("end", [0, 1])
@pytest.mark.parametrize("value", [-1, 6])
def test_errors_are_upstreams(end: int, value: int) -> None:
    edges, conv, x = EDGES.clone(), SimpleConv(), torch.randn(6, 4)
    edges[end, 2] = value
    _assert_same_error(lambda: conv(x, edges))


@pytest.mark.parametrize("end", [0, 1])
@pytest.mark.parametrize("value", [-1, 6])
@pytest.mark.parametrize("size", [None, (6, 6), (6, 5), (7, 6)])
def test_errors_of_traced_messages_are_upstreams(size: Any, value: int, end: int) -> None:
    edges, conv, x = EDGES.clone(), Changed(), torch.randn(6, 4)
    edges[end, 2] = value
    _assert_same_error(lambda: conv(x, edges, size))


def test_an_error_of_the_aggregation_is_upstreams() -> None:
    class Ends(MessagePassing):
        def forward(self, x: Tensor, edge_index: Tensor, size: Any) -> Tensor:
            return self.propagate(edge_index, x=(x, None), size=size)

        def message(self, x_j: Tensor) -> Tensor:
            return 2 * x_j

    conv, x = Ends(), torch.randn(6, 4)
    error = _assert_same_error(lambda: conv(x, EDGES, (6, 3)))
    assert "Encountered invalid 'dim_size' (got '3' but expected >= '6')" in str(error)
    conv.node_dim = 1
    _assert_same_error(lambda: conv(x, EDGES, (4, 6)))
    conv.node_dim = -3
    _assert_same_error(lambda: conv(x, EDGES, (6, 6)))


def _assert_same_error(call: Callable[[], object]) -> BaseException:
    with pytest.raises((IndexError, ValueError, RuntimeError)) as expected:
        call()
    with fastgraph.enabled():
        for _ in range(2):  # the second is known to be small
            with pytest.raises(type(expected.value)) as ours:
                call()
            assert str(ours.value) == str(expected.value)
    return expected.value


_OTHER_FORMS: dict[str, Callable[[], Tensor]] = {
    "three rows": lambda: torch.cat([EDGES, EDGES[:1]]),
    "EdgeIndex": lambda: EdgeIndex(EDGES, sparse_size=(7, 7)),
}


@pytest.mark.parametrize("form", _OTHER_FORMS)
def test_upstream_checks_other_forms_of_graphs_in_layers_left_as_a_whole(form: str) -> None:
    edges, conv, x = _OTHER_FORMS[form](), SimpleConv(), torch.randn(6, 4)
    with pytest.raises(ValueError, match=r"expected size 7|to have size '2'") as expected:
        conv(x, edges)
    with fastgraph.enabled(), counted_as_whole(conv), pytest.raises(ValueError) as ours:
        conv(x, edges)
    assert str(ours.value) == str(expected.value)


def _changed_message(conv: Any) -> None:
    conv.message = lambda x_j, edge_weight: 2 * x_j


def _changed_update(conv: Any) -> None:
    conv.update = lambda out: out + 1


def _changed_gather(conv: Any) -> None:
    conv._index_select = lambda x, index: 3 * x[index]


_CHANGES: dict[str, Callable[[Any], object]] = {
    "message": _changed_message,
    "update": _changed_update,
    "gather": _changed_gather,
    "hook before": lambda conv: conv.register_message_forward_pre_hook(
        lambda _, given: {**given[0], "x_j": given[0]["x_j"] + 1}
    ),
    "hook of messages": lambda conv: conv.register_message_forward_hook(lambda *a: 2 * a[-1]),
    "hook of sums": lambda conv: conv.register_aggregate_forward_hook(lambda *a: 3 * a[-1]),
    "hook of all": lambda conv: conv.register_propagate_forward_hook(lambda *a: 4 * a[-1]),
    "hook of the aggregation": lambda conv: conv.aggr_module.register_forward_hook(
        lambda *a: 5 * a[-1]
    ),
}


@pytest.mark.parametrize("change", _CHANGES)
def test_what_a_user_has_changed_is_run(change: str) -> None:
    conv, x = SimpleConv(), torch.randn(6, 4)
    plain, _ = _both(conv, x)
    _CHANGES[change](conv)
    ours, expected = _both(conv, x)
    assert torch.equal(ours, expected)
    assert not torch.equal(ours, plain)


def _changed_aggregate(conv: Any) -> None:
    conv.aggregate = lambda x, index, ptr, dim_size: x[:6]


def _changed_aggregation(conv: Any) -> None:
    conv.aggr_module.forward = lambda x, index, **_: x[:6]


_CHANGES_OF_TRACED: dict[str, Callable[[Any], object]] = {
    **{name: _CHANGES[name] for name in _CHANGES if name not in ("message", "update")},
    "message": lambda conv: setattr(conv, "message", lambda x_i, x_j: x_j),
    "update": lambda conv: setattr(conv, "update", lambda inputs, scale: inputs),
    "aggregate": _changed_aggregate,
    "aggregation": _changed_aggregation,
}


@pytest.mark.parametrize("change", _CHANGES_OF_TRACED)
def test_what_a_user_has_changed_of_a_traced_layer_is_run(change: str) -> None:
    conv, x = Changed(), torch.randn(6, 4)
    plain, _ = _both(conv, x)
    with fastgraph.enabled():
        conv(x, EDGES)  # is known to be small
        _CHANGES_OF_TRACED[change](conv)
        ours = conv(x, EDGES)
    assert torch.equal(ours, conv(x, EDGES))
    assert not torch.equal(ours, plain)


def test_a_hook_of_all_modules_sees_the_aggregation() -> None:
    conv, x, seen = Changed(), torch.randn(6, 4), []
    with fastgraph.enabled():
        conv(x, EDGES)
        handle = torch.nn.modules.module.register_module_forward_hook(
            lambda module, *_: seen.append(type(module))
        )
        try:
            conv(x, EDGES)
        finally:
            handle.remove()
    assert seen == [SumAggregation, Changed]


def test_a_method_that_its_class_gets_later_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(MessagePassing):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.propagate(edge_index, x=x)

    conv, x = Own(), torch.randn(6, 4)
    plain, _ = _both(conv, x)
    monkeypatch.setattr(Own, "update", lambda self, out: out + 1)
    ours, expected = _both(conv, x)
    assert torch.equal(ours, expected) and torch.equal(ours, plain + 1)
