"""Profiles: what they count is exact, their parts add up, and nothing stays of them."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import GATConv, GCNConv, RGATConv, SAGEConv
from torch_geometric.nn.conv import message_passing
from torch_geometric.utils import softmax

import fastgraph
from fastgraph.profiling import installing, profile, tables
from fastgraph.routing import status

X = torch.randn(20, 8)
EDGES = torch.randint(20, (2, 90))


@pytest.fixture(autouse=True)
def _enabled():
    with fastgraph.enabled(min_edges=0):
        yield


def found(p: fastgraph.Profile) -> dict[tuple[str, str], int]:
    return {(row.key.layer, row.key.route): row.calls for row in p.rows}


def total(p: fastgraph.Profile) -> float:
    return sum(p.parts.values())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = GCNConv(8, 8)
        self.second = GATConv(8, 8)
        self.third = GATConv(8, 8, flow="target_to_source", add_self_loops=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x, EDGES).relu()
        x = self.second(x, EDGES).relu()
        return self.third(x, EDGES)


def test_calls_and_routes_are_those_of_the_status() -> None:
    net, relations = Net(), RGATConv(8, 8, num_relations=2)
    before = {row.layer: (row.routed, row.fell_back) for row in fastgraph.status().rows}
    with fastgraph.profile() as p:
        for _ in range(3):
            net(X).sum().backward()
        relations(X, EDGES, torch.randint(2, (90,)))
    assert found(p) == {
        ("GCNConv", "operator"): 3,
        ("GATConv", "operator"): 3,
        ("GATConv", "flow target_to_source"): 3,
        ("RGATConv", "edge program"): 1,
    }
    for row in fastgraph.status().rows:
        routed, fell_back = before.get(row.layer, (0, 0))
        mine = [r for r in p.rows if r.key.layer == row.layer]
        assert row.routed - routed == sum(r.calls for r in mine if r.key.is_routed)
        assert row.fell_back - fell_back == sum(r.calls for r in mine if not r.key.is_routed)


def test_rows_are_of_source_lines() -> None:
    conv = GCNConv(8, 8)
    with fastgraph.profile() as p:
        conv(X, EDGES)
        conv(X, EDGES)
        for _ in range(3):
            conv(X, EDGES)
    lines = sorted((int(row.key.line.rpartition(":")[2]), row.calls) for row in p.rows)
    first = lines[0][0]
    assert lines == [(first, 1), (first + 1, 1), (first + 3, 3)]
    assert all(row.key.line.rpartition(":")[0].endswith("test_profiling.py") for row in p.rows)


def test_parts_add_up_to_no_more_than_the_total() -> None:
    net = Net()
    with fastgraph.profile() as p:
        net(X).sum().backward()
    forward, backward = (sum(getattr(r, n) for r in p.rows) for n in ("forward", "backward"))
    assert forward == pytest.approx(p.parts["layers, forward"])
    assert backward == pytest.approx(p.parts["layers, backward"])
    assert all(row.forward > 0 and row.backward > 0 and row.timed == 1 for row in p.rows)
    assert p.parts["other, backward"] > 0
    assert total(p) <= p.seconds
    assert sum(row.processor + row.backward_processor for row in p.rows) <= p.processor_seconds


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_computes_again_counts_once(reentrant: bool) -> None:
    net, x = Net(), X.clone().requires_grad_()
    with fastgraph.profile() as p:
        checkpoint(net, x, use_reentrant=reentrant).sum().backward()
    assert found(p) == {
        ("GCNConv", "operator"): 2,
        ("GATConv", "operator"): 2,
        ("GATConv", "flow target_to_source"): 2,
    }
    assert total(p) <= p.seconds
    assert min(*p.parts.values(), *(row.backward for row in p.rows)) >= 0


def test_a_layer_within_another_counts_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by one at each look, so that each call takes what it must."""
    clock = iter(range(1_000_000))
    monkeypatch.setattr(profile.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(profile.time, "process_time", lambda: 0.0)
    p = fastgraph.Profile()
    p.start()  # 0
    outer = p.enter("layer", "Outer")  # 1
    p.decided("Outer", "operator", True)
    inner = p.enter("layer", "Inner")  # 2
    p.decided("Inner", "edge program", True)
    unlisted = p.enter("layer", "Linear")  # 3
    loader = p.enter("sampling", "")  # 4
    p.leave(loader)  # 5
    p.leave(unlisted)  # 6
    p.leave(inner)  # 7
    p.leave(outer)  # 8
    p.stop()  # 9
    assert {row.key.layer: row.forward for row in p.rows} == {"Outer": 2.0, "Inner": 4.0}
    assert p.parts["sampling"] == 1.0
    assert (total(p), p.seconds) == (7.0, 9.0)


def test_gradients_and_results_are_the_same() -> None:
    net = Net()
    net(X).sum().backward()
    expected = [parameter.grad.clone() for parameter in net.parameters()]
    net.zero_grad()
    with fastgraph.profile():
        net(X).sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(expected, net.parameters(), strict=True))


def test_functions_count_without_times() -> None:
    with fastgraph.profile() as p:
        softmax(torch.randn(90), EDGES[0])
    (row,) = p.rows
    assert (row.calls, row.timed, row.key.is_routed) == (1, 0, True)
    assert " - " in str(p)


def test_sampling_and_gathering_are_told_apart() -> None:
    data = Data(x=X, edge_index=EDGES)
    with fastgraph.profile() as p:
        batches = list(NeighborLoader(data, num_neighbors=[2], batch_size=5))
    assert len(batches) == 4
    assert p.parts["sampling"] > 0 and p.parts["gathering"] > 0
    kinds = [event.kind for event in p.events]
    assert (kinds.count("sampling"), kinds.count("gathering")) == (5, 4)  # the last finds no batch
    assert total(p) <= p.seconds


def test_an_error_is_the_programs_and_leaves_no_call_open() -> None:
    conv = GCNConv(8, 8)
    with fastgraph.profile() as p:
        with pytest.raises(RuntimeError):
            conv(torch.randn(20, 3), EDGES)
        conv(X, EDGES)
    assert p.rows[0].calls >= 1
    assert not p._threads.spans


def test_calls_of_other_threads_count_and_are_no_part_of_the_total() -> None:
    conv = GCNConv(8, 8)
    with fastgraph.profile() as p:
        thread = threading.Thread(target=lambda: conv(X, EDGES).sum().backward())
        thread.start()
        thread.join()
    (row,) = p.rows
    assert row.calls == 1 and row.forward > 0
    assert total(p) == 0


def test_nothing_stays_when_it_has_ended() -> None:
    owners = (
        (nn.Module, "__call__"),
        (torch.autograd, "backward"),
        (torch.autograd, "grad"),
        (sys.modules["torch.utils.data.dataloader"]._BaseDataLoaderIter, "__next__"),
        (NeighborLoader, "filter_fn"),
        (message_passing.MessagePassing, "propagate"),
    )
    before = [getattr(owner, name) for owner, name in owners]
    taken = fastgraph.profile()
    taken.__enter__()
    assert nn.Module.__call__ is not before[0]
    assert not taken.__exit__(None, None, None)
    assert [getattr(owner, name) for owner, name in owners] == before
    assert type(status.STATUS) is status.Status
    assert {type(row) for row in status.STATUS.rows} <= {status.StatusRow}


def test_there_is_one_at_a_time() -> None:
    with (
        fastgraph.profile() as p,
        pytest.raises(RuntimeError, match="a profile is being taken"),
        fastgraph.profile(),
    ):
        pass
    assert not p.is_running
    assert not installing._running


def test_a_wrapper_that_another_keeps_does_nothing() -> None:
    conv = SAGEConv(8, 8)
    with fastgraph.profile() as p:
        kept = nn.Module.__call__
    kept(conv, X, EDGES)
    assert not p.rows


def test_a_compiled_model_runs() -> None:
    conv = GCNConv(8, 8)
    compiled = torch.compile(conv, backend="eager")
    with fastgraph.profile() as p, torch.no_grad():
        assert torch.allclose(compiled(X, EDGES), conv(X, EDGES))
    assert ("GCNConv", "operator") in found(p)
    assert status.NOT_COUNTED in str(p)


def test_the_trace_and_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    monkeypatch.setattr(profile, "MOST_EVENTS", 6)
    with fastgraph.profile() as p:
        net(X).sum().backward()
    tables.write_trace(p, tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["otherData"] == {"left out": 1}  # of three layers, both ways, and the pass itself
    assert {event["ph"] for event in trace["traceEvents"]} == {"X"}
    assert [(e["name"], e["cat"]) for e in trace["traceEvents"]] == [
        ("GCNConv", "forward"),
        ("GATConv", "forward"),
        ("GATConv", "forward"),
        ("GATConv", "backward"),
        ("GATConv", "backward"),
        ("GCNConv", "backward"),
    ]
    assert trace["traceEvents"][0]["args"]["route"] == "operator"
    begins = [event["ts"] for event in trace["traceEvents"][:3]]
    assert begins == sorted(begins) and begins[0] >= 0
    tables.write_html(p, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "GATConv" in page and "target_to_source" in page and "http" not in page


def test_layers_without_anything_between_have_each_their_backward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A node that is a result and an argument belongs to the layer whose result it is."""
    seen = []
    monkeypatch.setattr(
        fastgraph.Profile, "backward_at", lambda _, key: seen.append(key and key.layer)
    )
    first, second, third = GCNConv(8, 8), SAGEConv(8, 8), GATConv(8, 8)
    with fastgraph.profile():
        x = X.clone().requires_grad_().relu()
        third(second(first(x, EDGES), EDGES), EDGES).sum().backward()
    assert seen == ["GATConv", "SAGEConv", "GCNConv", None]


def test_a_layer_within_another_is_left_for_the_outer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Outer(GCNConv):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.inner = SAGEConv(8, 8)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.inner(super().forward(x, edge_index).relu(), edge_index)

    seen = []
    monkeypatch.setattr(
        fastgraph.Profile, "backward_at", lambda _, key: seen.append(key and key.layer)
    )
    outer = Outer()
    with fastgraph.profile() as p:
        x = X.clone().requires_grad_().relu()
        outer(x, EDGES).sum().backward()
    assert {layer for layer, _ in found(p)} == {"Outer", "SAGEConv"}
    assert seen == ["SAGEConv", "Outer", None]


@pytest.mark.parametrize("reentrant", [True, False])
def test_bars_of_a_thread_are_within_each_other_or_apart(reentrant: bool) -> None:
    """As viewers of traces need them."""
    net, x = Net(), X.clone().requires_grad_()
    with fastgraph.profile() as p:
        checkpoint(net, x, use_reentrant=reentrant).sum().backward()
    bars = [(event.begin, event.begin + event.seconds) for event in p.events]
    for begin, end in bars:
        for other, until in bars:
            assert not begin + 1e-9 < other < end - 1e-9 < until - 2e-9
