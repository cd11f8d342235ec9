"""``python -m fastgraph tune``: the calls it records in a script, replays and chooses for."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fastgraph import ops
from fastgraph.cli.tuning import measuring
from fastgraph.cli.tuning.measuring import Budget, Measured
from fastgraph.cli.tuning.recording import Given, OperatorCall, Program, Values, record
from fastgraph.cli.tuning.replay import Candidate, Names, Replay, renamed
from fastgraph.graphs.edges import graph_of
from fastgraph.tune import choices
from fastgraph.tune.choices import Use
from tests.graphs import mixed_communities, random_edges

NODES, WIDTH = 5000, 256
FORWARD, BACKWARD = Use(False, False, 4 * WIDTH), Use(True, False, 4 * WIDTH)

INFERENCE = """
import torch
from fastgraph import ops

x, edges = torch.randn(20, 8), torch.randint(20, (2, 50))
weight = torch.randn(50, requires_grad=True)
for _ in range(3):
    ops.spmm(x, edges, weight)
ops.head_scores(x.view(20, 2, 4), torch.randn(1, 2, 4))
"""


@pytest.fixture(autouse=True)
def nothing_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def recorded(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    (folder / "script.py").write_text(script)
    monkeypatch.setattr("sys.argv", [])
    program = record(folder / "script.py", [])
    return pickle.loads(pickle.dumps(program))  # type: ignore[no-any-return]


def test_all_that_a_script_without_training_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = recorded(INFERENCE, tmp_path, monkeypatch)
    assert [(call.operator, names) for call, names in program.calls.items()] == [
        ("spmm", ["spmm"] * 3),
        ("head_scores", ["head_scores"]),
    ]
    (edges,) = program.tensors
    assert edges.shape == (2, 50) and program.threads == torch.get_num_threads()
    (one,) = measuring.calls_of(program)  # scores of nodes have no edges
    assert one.graph.num_edges == 50 and one.uses == {Use(False, False, 32)}


def test_of_a_script_that_trains_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = "ops.spmm(x, edges, weight).sum().backward()\n"
    script = INFERENCE.replace("for _", f"for _ in range(3):\n    {step}for _")
    program = recorded(script, tmp_path, monkeypatch)
    assert [(call.operator, len(names)) for call, names in program.calls.items()] == [("spmm", 1)]


def test_a_script_that_never_trains_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = "import torch\nfrom fastgraph import ops\nwhile True:\n    "
    endless += "ops.spmm(torch.ones(4, 2), torch.randint(4, (2, 9)))\n"
    assert len(recorded(endless, tmp_path, monkeypatch).tensors) == 65


def sums(edges: Tensor, *, requires_grad: bool = True) -> Program:
    """A program of two layers that add up neighbours."""
    x = Values((NODES, WIDTH), torch.float32, requires_grad)
    call = OperatorCall("spmm", (x, Given(0), None, None, NODES, "sum", False))
    return Program({call: ["SAGEConv"] * 2}, [edges], torch.get_num_threads(), False, 0)


def measured(program: Program) -> list[Measured]:
    found = measuring.calls_of(program)
    measuring.measure(found, Budget(0.2))
    return found


def test_orders_are_measured_where_there_are_any() -> None:
    (one,) = measured(sums(mixed_communities(NODES, 10)))
    assert one.is_measured and one.uses == {FORWARD, BACKWARD} == set(one.in_order)
    (one,) = measured(sums(mixed_communities(NODES, 10), requires_grad=False))
    assert one.uses == {FORWARD} == set(one.in_order)
    (one,) = measured(sums(random_edges(NODES, NODES, 50_000)))
    assert one.is_measured and not one.in_order
    found = measuring.calls_of(sums(mixed_communities(NODES, 10)))
    measuring.measure(found, Budget(0))
    assert not found[0].is_measured and measuring.chosen(found) == {}


def test_what_is_faster_by_more_than_noise_is_chosen() -> None:
    (one,) = measuring.calls_of(sums(mixed_communities(NODES, 10)))
    one.as_they_are = 1.0
    one.in_order = {FORWARD: 0.9, BACKWARD: 0.98}
    assert measuring.chosen([one]) == {one.identity: {FORWARD: 4 * WIDTH, BACKWARD: 0}}
    # Another layer makes the same use of the graph twice in a step, as this one does, and loses.
    other = Measured(one.replay, one.layers, one.graph, one.identity, {FORWARD})
    other.as_they_are, other.in_order = 1.0, {FORWARD: 1.2}
    assert measuring.chosen([one, other])[one.identity][FORWARD] == 0
    # The order is that for the widest features.
    wide = FORWARD._replace(row_bytes=4096)
    other = Measured(one.replay, ["GCNConv"], one.graph, one.identity, {wide})
    other.as_they_are, other.in_order = 1.0, {wide: 0.5}
    assert measuring.chosen([one, other])[one.identity] == {FORWARD: 4096, BACKWARD: 0, wide: 4096}


def test_other_orders_of_nodes() -> None:
    pytest.importorskip("torch_geometric")
    found = measuring.calls_of(sums(mixed_communities(NODES, 10)))
    others = {one.order: one for one in measuring.reorderings(found, Budget(2))}
    assert "degree" in others
    for one in others.values():
        assert one.seconds > 0 and one.step > 0
        # Communities come together by all of them but the degrees.
        assert (one.reads < 0.6) == (one.order != "degree")
    assert not measuring.reorderings(found, Budget(0))


@pytest.mark.parametrize("form", ["edges", "groups", "numbered groups"])
def test_a_graph_with_new_numbers_is_the_same_graph(form: str) -> None:
    edges = random_edges(30, 30, 200)
    names = Names(edges, None)
    if form != "edges":
        rows = graph_of(edges, None, 30, 30).by_destination
        assert rows.edge_id is not None
        index = rows.col if form == "groups" else torch.stack([rows.col, rows.edge_id])
        names = Names(index, rows.ptr)
    inverse = torch.randperm(30)
    x, weight = torch.randn(30, 4), torch.randn(200)
    given = None if form == "groups" else weight
    found = renamed(names, inverse)
    out = ops.spmm(x[inverse.argsort()], found.index, given, ptr=found.ptr)
    expected = ops.spmm(x, names.index, given, ptr=names.ptr)
    torch.testing.assert_close(out[inverse], expected)


def test_every_operator_with_edges_can_be_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = """
import torch
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, SAGEConv, TransformerConv

x, edges = torch.randn(30, 8), torch.randint(30, (2, 90))
layers = [
    GATConv(8, 4, heads=2, dropout=0.5), GATv2Conv(8, 4, heads=2, edge_dim=3), GCNConv(8, 8),
    SAGEConv(8, 8, aggr="max"), TransformerConv(8, 4, heads=2),
]
for epoch in range(3):
    sum(
        layer(x, edges, *([torch.randn(90, 3)] if layer.__class__ is GATv2Conv else [])).sum()
        for layer in layers
    ).backward()
"""
    pytest.importorskip("torch_geometric")
    program = recorded(script, tmp_path, monkeypatch)
    calls = measuring.calls_of(program)
    for one in calls:
        assert Candidate(one.replay).seconds() > 0
        assert isinstance(one.replay, Replay)
    # GATv2Conv has the mean of each node's edge features besides, whose sources are the edges.
    found = {one.layers[0]: one for one in calls if one.graph.num_src == 30}
    assert set(found) == {"GATConv", "GATv2Conv", "GCNConv", "SAGEConv", "TransformerConv"}
    assert all(use.attention for use in found["TransformerConv"].uses)
    assert choices.orders_of(found["GCNConv"].graph) is choices.NOTHING
