"""Functions of users that are left to DGL, and changes after which they are traced anew."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fastgraph
from tests.dgl.graphs import dgl
from tests.dgl.user_functions import APPLY, UPDATE, Functions, both, reason_of, square_graph

import dgl.function as fn  # isort: skip
from dgl.init import zero_initializer  # isort: skip
from fastgraph.dgl import traced  # isort: skip

Function = Callable[[Any], Any]

FACTOR = 2.0
LAYER = nn.Linear(4, 4)


def graph() -> Any:
    """A graph with features of several dtypes."""
    torch.manual_seed(1)
    g = square_graph()
    g.ndata["h"], g.ndata["label"] = torch.randn(20, 4), torch.arange(20)
    g.ndata["wide"] = torch.randn(20, 4, dtype=torch.float64)
    g.edata["w"] = torch.rand(120, 1)
    return g


def updated(g: Any, message: Any, reduce: Any = None) -> Tensor:
    """The features that a call of ``update_all`` leaves."""
    with g.local_scope():
        g.update_all(message, fn.sum("m", "out") if reduce is None else reduce)
        out: Tensor = g.dstdata["out"]
        return out


def _edited(edges: Any) -> dict[str, Tensor]:
    edges.data["x"] = edges.src["h"]
    return {"m": edges.src["h"]}


def _branching(edges: Any) -> dict[str, Tensor]:
    return {"m": edges.src["h"] if (edges.src["h"] > 0).any() else -edges.src["h"]}


def _in_place(edges: Any) -> dict[str, Tensor]:
    return {"m": edges.src["h"] * edges.data["w"].mul_(1)}


class _Plain:
    def message(self, edges: Any) -> dict[str, Tensor]:
        return {"m": edges.src["h"]}


def _of_so_many_edges(edges: Any) -> dict[str, Tensor]:
    x = edges.src["h"]
    return {"m": x * 2 if x.shape[0] == 120 else x}


MESSAGES: dict[str, tuple[Function, str]] = {
    "so many edges": (_of_so_many_edges, "the number of edges"),
    "edges": (lambda edges: {"m": edges.src["h"] * edges.edges()[0].view(-1, 1)}, "edges.edges"),
    "batch size": (lambda edges: {"m": edges.src["h"] / edges.batch_size()}, "edges.batch_size"),
    "length": (lambda edges: {"m": edges.src["h"] / len(edges)}, "the number of edges"),
    "numbers": (lambda edges: {"m": edges.src["h"] + edges.data[dgl.EID].view(-1, 1)}, "int64"),
    "labels": (lambda edges: {"m": edges.src["h"] * edges.dst["label"].view(-1, 1)}, "int64"),
    "two dtypes": (lambda edges: {"m": edges.src["h"] + edges.src["wide"].float()}, "of torch."),
    "all features": (lambda edges: {"m": edges.src[min(edges.src.keys())]}, "all of edges.src"),
    "a new feature": (_edited, "it sets edges.data"),
    "values": (_branching, "aten.any"),
    "in place": (_in_place, "in place"),
    "random": (lambda edges: {"m": edges.src["h"] * torch.rand_like(edges.src["h"])}, "random"),
    "a global layer": (lambda edges: {"m": LAYER(edges.src["h"])}, "LAYER"),
    "a partial": (functools.partial(lambda s, edges: {"m": s * edges.src["h"]}, 2), "partial"),
    "a method of no module": (
        type("C", (), {"f": lambda s, e: {"m": e.src["h"]}})().f,
        "no module",
    ),
    "across edges": (lambda edges: {"m": edges.src["h"] - edges.src["h"].mean(0)}, "across edges"),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_messages(name: str) -> None:
    message, text = MESSAGES[name]
    g = graph()
    g.edata[dgl.EID] = torch.arange(120)

    def call() -> Tensor:
        torch.manual_seed(2)
        return updated(g, message)

    assert text in reason_of(call)


def _second(nodes: Any) -> Tensor:
    m: Tensor = nodes.mailbox["m"]
    return m[:, 0]


def _by_degree(nodes: Any) -> dict[str, Tensor]:
    m = nodes.mailbox["m"]
    return {"out": m.sum(1) if m.shape[1] > 3 else m.mean(1)}


REDUCTIONS: dict[str, tuple[Function, str]] = {
    "the first": (lambda nodes: {"out": _second(nodes)}, "takes a part"),
    "by degree": (_by_degree, "depends on values"),
    "a product": (lambda nodes: {"out": nodes.mailbox["m"].prod(1)}, "prod"),
    "a median": (lambda nodes: {"out": torch.median(nodes.mailbox["m"], 1)[0]}, "median"),
    "an index": (lambda nodes: {"out": nodes.mailbox["m"].max(1)[1].float()}, "AttributeError"),
    "across nodes": (
        lambda nodes: {"out": nodes.mailbox["m"].sum(1) / nodes.mailbox["m"].sum(0)},
        "across",
    ),
    "all": (lambda nodes: {"out": nodes.data["h"] * nodes.mailbox["m"].sum()}, "all or several"),
    "deviations": (
        lambda nodes: {
            "out": (nodes.mailbox["m"] - nodes.mailbox["m"].mean(1, keepdim=True)).abs().sum(1)
        },
        "messages and values of nodes",
    ),
    "nothing": (lambda nodes: {"out": nodes.data["h"] * 2}, "reduces nothing"),
    "messages": (lambda nodes: {"out": nodes.mailbox["m"].relu()}, "no value of nodes"),
    "nodes": (lambda nodes: {"out": nodes.mailbox["m"].sum(1) * nodes.batch_size()}, "batch_size"),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name: str) -> None:
    reduce, text = REDUCTIONS[name]
    g = graph()
    expected: Any = None
    try:
        expected = updated(g, fn.copy_u("h", "m"), reduce)
    except Exception as error:  # DGL's own refusal of what it cannot do
        expected = type(error)
    fastgraph.status().reset()
    with fastgraph.enabled(min_edges=0):
        if isinstance(expected, type):
            with pytest.raises(expected):
                updated(g, fn.copy_u("h", "m"), reduce)
        else:
            assert torch.equal(updated(g, fn.copy_u("h", "m"), reduce), expected)
    row = fastgraph.status().row(UPDATE)
    assert row.routed == 0
    assert text in next(iter(row.reasons))


def test_features_of_edges_as_they_are() -> None:
    """Their owner would edit the others as well, or not."""
    g = graph()

    def call() -> Tensor:
        with g.local_scope():
            g.apply_edges(lambda edges: {"v": edges.data["w"]})
            g.edata["v"].add_(1)
            return torch.cat([g.edata["v"], g.edata["w"]])

    expected = call()
    g.edata["w"] = expected[:120] - 1
    assert "as they are" in reason_of(lambda: call() * 0, APPLY)


def test_initialised_nodes() -> None:
    """Those without edges get what a function of users gives them."""
    g = graph()
    g.set_n_initializer(lambda shape, dtype, ctx, _: torch.full(shape, 7.0, dtype=dtype))
    reduce = lambda nodes: {"out": nodes.mailbox["m"].sum(1)}  # noqa: E731
    assert "initialised" in reason_of(lambda: updated(g, fn.copy_u("h", "m"), reduce))
    g.set_n_initializer(zero_initializer)
    _, _, row = both(lambda: updated(g, fn.copy_u("h", "m"), reduce))
    assert row.programs == 1


def test_hooks() -> None:
    g, layer = graph(), Functions("gated", None)
    layer.gate = nn.Linear(8, 4)
    layer.weight = nn.Parameter(torch.ones(4))
    g.ndata["k"] = g.ndata["h"]
    seen = []
    handle = layer.gate.register_forward_hook(lambda *_: seen.append(1))
    assert "has hooks" in reason_of(lambda: updated(g, layer.gated))
    assert len(seen) >= 2
    handle.remove()
    _, _, row = both(lambda: updated(g, layer.gated))
    assert row.programs == 1


def test_a_bound_of_edges() -> None:
    g = graph()

    def message(edges: Any) -> dict[str, Tensor]:
        return {"m": edges.src["h"].sin()}

    with fastgraph.enabled(min_edges=10_000):
        updated(g, message)
    row = fastgraph.status().row(UPDATE)
    assert row.routed == 0 and row.reasons


def test_changes_around_a_function() -> None:
    g = graph()
    layer = Functions("tied", None)
    g.ndata["k"] = g.ndata["h"] * 0.5

    def by_global(edges: Any) -> dict[str, Tensor]:
        return {"m": edges.src["h"] * FACTOR}

    def by_module(edges: Any) -> dict[str, Tensor]:
        return {"m": layer.slope * F.relu(edges.src["h"] - edges.dst["k"])}

    def presence(edges: Any) -> dict[str, Tensor]:
        h: Tensor = edges.src["h"]
        return {"m": h * edges.data["norm"] if "norm" in edges.data else h.cos()}

    def check(message: Function) -> None:
        expected, found, row = both(lambda: updated(g, message))
        assert (row.programs, dict(row.reasons)) == (1, {})
        torch.testing.assert_close(found, expected)

    global FACTOR
    for FACTOR in (2.0, 3.0):  # noqa: B007
        check(by_global)
    for slope in (0.2, 0.9):
        layer.slope = slope
        check(by_module)
    check(presence)
    g.edata["norm"] = torch.rand(120, 1)
    check(presence)
    g.edata["norm"] = torch.rand(120, 4)
    check(presence)
    g.ndata["h"] = g.ndata["h"].double()
    g.ndata["k"] = g.ndata["k"].double()
    check(by_module)


def test_calls_that_are_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of edges decides before anything is traced, and then that of all values."""
    monkeypatch.delenv("FASTGRAPH_MIN_EDGES")
    calls: list[tuple[int, int, Any, bool]] = [
        (2_900, 512, fn.sum("m", "out"), False),
        (3_100, 16, fn.sum("m", "out"), False),
        (3_100, 512, fn.sum("m", "out"), True),
        (3_100, 64, fn.sum("m", "out"), False),
        (3_100, 64, lambda nodes: {"out": nodes.mailbox["m"].sum(1)}, True),
        (3_100, 512, fn.max("m", "out"), False),
    ]
    for num_edges, channels, reduce, is_routed in calls:
        ends = torch.arange(num_edges)
        g = dgl.graph((ends * 7 % 20, ends % 20), num_nodes=20)
        g.ndata["h"] = torch.randn(20, channels)
        fastgraph.status().reset()
        with fastgraph.enabled():
            updated(g, lambda edges: {"m": edges.src["h"].sin() + edges.dst["h"]}, reduce)
        row = fastgraph.status().row(UPDATE)
        assert (row.routed, row.fell_back) == (int(is_routed), int(not is_routed)), num_edges
        assert is_routed or "too few edges" in next(iter(row.reasons))


@pytest.mark.parametrize("is_of_edges", [False, True])
def test_nothing_within_a_tiny_call_is_planned(
    is_of_edges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is counted as a whole, and what it calls of DGL's own is no matter."""
    monkeypatch.delenv("FASTGRAPH_MIN_EDGES")
    ends = torch.arange(40)
    g = dgl.graph((ends * 7 % 20, ends % 20), num_nodes=20)
    g.ndata["h"] = torch.randn(20, 8).requires_grad_()

    def message(edges: Any) -> dict[str, Any]:
        return {"m": edges.src["h"].sin() + edges.dst["h"]}

    def call() -> Any:
        if is_of_edges:
            g.apply_edges(message)
            return g.edata.pop("m")
        return updated(g, message, fn.sum("m", "out"))

    expected = call()
    monkeypatch.setattr(traced, "_planned", None)
    with fastgraph.enabled(strict=True):
        found = call()
        assert torch.equal(found, expected)
        seen = [(row.layer, row.routed, row.fell_back) for row in fastgraph.status().rows]
        assert seen == [(APPLY if is_of_edges else UPDATE, 0, 1)]
        found.sum().backward()
    assert g.ndata["h"].grad is not None


def test_calls_that_are_too_small_are_planned_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """One function may be called with features of several shapes by turns, as of relations."""
    monkeypatch.delenv("FASTGRAPH_MIN_EDGES")
    ends = torch.arange(3_100)
    g = dgl.graph((ends * 7 % 20, ends % 20), num_nodes=20)
    planned: list[Any] = []
    plan = traced._plan

    def planning(*given: Any) -> Any:
        planned.append(given)
        return plan(*given)

    monkeypatch.setattr(traced, "_plan", planning)

    def message(edges: Any) -> dict[str, torch.Tensor]:
        return {"m": edges.src["h"].sin() + edges.dst["h"]}

    for _ in range(3):
        for channels in (16, 8):
            g.ndata["h"] = torch.randn(20, channels)
            with fastgraph.enabled():
                updated(g, message, fn.sum("m", "out"))
    assert len(planned) == 2
