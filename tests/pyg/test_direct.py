"""Small calls that skip upstream's questions: the same bits, the same errors, and hooks are run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.nn import (
    ChebConv,
    GatedGraphConv,
    GINConv,
    GraphConv,
    LGConv,
    MessagePassing,
    SAGEConv,
    SimpleConv,
    TAGConv,
)
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
    with pytest.raises((IndexError, ValueError, RuntimeError)) as expected:
        conv(x, edges)
    with fastgraph.enabled(), pytest.raises(type(expected.value)) as ours:
        conv(x, edges)
    assert str(ours.value) == str(expected.value)


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


def test_a_method_that_its_class_gets_later_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(MessagePassing):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.propagate(edge_index, x=x)

    conv, x = Own(), torch.randn(6, 4)
    plain, _ = _both(conv, x)
    monkeypatch.setattr(Own, "update", lambda self, out: out + 1)
    ours, expected = _both(conv, x)
    assert torch.equal(ours, expected) and torch.equal(ours, plain + 1)
