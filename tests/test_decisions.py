"""Lines on standard error for each new decision, and listeners that hear each count once."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch_geometric.nn import GATConv, GCNConv, RGATConv

import fastgraph
from fastgraph.routing import decisions, observing, status

X, EDGES = torch.randn(20, 8), torch.randint(20, (2, 90))
REFUSED = GATConv(8, 8, flow="target_to_source", add_self_loops=False)


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "_said", set())
    monkeypatch.setattr(status, "_warned", set())


def test_each_decision_is_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    conv, relations = GCNConv(8, 8), RGATConv(8, 8, num_relations=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", fastgraph.FallbackWarning)  # the line says it already
        with fastgraph.enabled(min_edges=0, verbose=True):
            for _ in range(2):
                conv(X, EDGES)
                REFUSED(X, EDGES)
                relations(X, EDGES, torch.randint(2, (90,)))
        with fastgraph.enabled(min_edges=1000, verbose=True):
            conv(X, EDGES)
            conv(X, EDGES)
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "fastgraph: GCNConv runs by an operator",
        "fastgraph: GATConv runs upstream's own code: flow target_to_source",
        "fastgraph: RGATConv runs by an edge program",
        "fastgraph: GCNConv runs upstream's own code: fewer than min_edges=1000 edges",
    ]


def test_without_it_nothing_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    with fastgraph.enabled(min_edges=0):
        GCNConv(8, 8)(X, EDGES)
        with pytest.warns(fastgraph.FallbackWarning):
            REFUSED(X, EDGES)
    assert capfd.readouterr().err == ""
    assert type(status.STATUS) is status.Status


def test_it_ends_with_the_block(capfd: pytest.CaptureFixture[str]) -> None:
    with fastgraph.enabled(min_edges=0):
        with fastgraph.enabled(verbose=True):
            pass
        GCNConv(8, 8)(X, EDGES)
    assert capfd.readouterr().err == ""


def test_listeners_hear_each_count_once_and_counts_stay() -> None:
    heard: list[tuple[str, str, bool]] = []
    other: list[str] = []

    def listener(*decision: object) -> None:
        heard.append(decision)  # type: ignore[arg-type]

    def second(layer: str, *_: object) -> None:
        other.append(layer)

    with fastgraph.enabled(min_edges=0):
        conv = GCNConv(8, 8)
        conv(X, EDGES)
        before = fastgraph.status().row("GCNConv").routed
        observing.observe(listener)
        observing.observe(second)
        conv(X, EDGES)
        observing.ignore(second)
        observing.ignore(second)
        REFUSED(X, EDGES)
        observing.ignore(listener)
        conv(X, EDGES)
    assert heard == [
        ("GCNConv", "operator", True),
        ("GATConv", "flow target_to_source", False),
    ]
    assert other == ["GCNConv"]
    assert fastgraph.status().row("GCNConv").routed == before + 2
    assert {type(row) for row in fastgraph.status().rows} == {status.StatusRow}
    str(fastgraph.status())


def test_counts_that_are_forgotten_are_observed_anew() -> None:
    heard: list[str] = []

    def listener(layer: str, *_: object) -> None:
        heard.append(layer)

    own = status.Status()
    own.named("GCNConv").routed += 1  # of another recorder
    observing.observe(listener)
    try:
        with status.recording() as recorder:
            status.count_routed("GCNConv")
        assert recorder.row("GCNConv").routed == 1
        assert not heard
    finally:
        observing.ignore(listener)
