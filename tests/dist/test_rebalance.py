"""Rows that move to other ranks while a program uses them."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import HeteroData
from torch_geometric.nn import GATConv, GCNConv, SAGEConv

import fastgraph
import fastgraph.dist as fgd
from fastgraph.dist.balance import balance, first_epochs, performance, rebalancing, shares
from fastgraph.dist.balance.automatic import Automatic
from fastgraph.dist.balance.first_epochs import FirstEpochs
from fastgraph.dist.ranks import devices, phases, transport
from fastgraph.dist.ranks.world import WORLD
from fastgraph.machine import cache
from tests.dist.graphs import NUM_FEATURES, NUM_NODES, graph

STEPS = 6


class Model(nn.Module):
    """Two layers of different kinds, after a learnt vector for each node."""

    def __init__(self, vectors: Tensor) -> None:
        super().__init__()
        self.vectors = nn.Parameter(vectors)
        self.first = GCNConv(NUM_FEATURES, 8)
        self.second = GATConv(8, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = F.dropout(self.first(x + self.vectors, edge_index).relu(), 0.3)
        return self.second(x, edge_index)


def train(data: Any, after_steps: dict[int, Any]) -> list[float]:
    """Losses, with something done after some steps; names of its own for what the graph holds."""
    torch.manual_seed(0)
    x, y, detached = data.x, data.y, data.x.detach()
    model = Model(torch.zeros_like(x) + 0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    chosen = data.train_mask.nonzero().view(-1)
    of_training, half = y[data.train_mask], x[: NUM_NODES // 2]
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        out = model(x, data.edge_index)
        loss = F.cross_entropy(out[chosen], of_training) + half.square().mean() + detached.mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if step in after_steps:
            after_steps[step](data, model, optimizer, loss)
    x.add_(1)  # is seen by what shares its memory
    losses.append(float(detached.sum()))
    return losses


def to_double(data: Any) -> Any:
    return data.apply(lambda value: value.double() if value.is_floating_point() else value)


class Clock:
    """Time that goes by when it is told to, for each rank as much as it is told."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def compute(self, *seconds: float) -> None:
        self.now += seconds[WORLD.rank]


@contextmanager
def clock() -> Iterator[Clock]:
    made = Clock()
    modules = (balance, phases)
    before = [module.time for module in modules]
    for module in modules:
        module.time = made  # type: ignore[assignment]
    yield made
    for module, time in zip(modules, before, strict=True):
        module.time = time


def error_of(action: Any) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def work_on_ranks() -> dict[str, Any]:
    """Everything that needs ranks, as starting them takes seconds."""
    torch.set_default_dtype(torch.float64)
    fastgraph.enable()
    found: dict[str, Any] = {}
    plain = to_double(graph())

    found["losses before"] = train(fgd.shard(plain, method="even"), {})

    def move(data: Any, model: Model, optimizer: Any, loss: Tensor) -> None:
        grads = fgd.whole(model.vectors.grad)
        done = fgd.rebalance(data, weights=[1, 3], method="even")
        state = optimizer.state[model.vectors]["exp_avg"]
        found["moved"] = done
        found["rows"] = [len(t.local) for t in (data.x, data.y, model.vectors, state)]
        found["edges"] = data.edge_index.local.shape[1]
        found["same gradient"] = torch.equal(fgd.whole(model.vectors.grad), grads)
        new = data.x.rows
        # Edges are with their destinations.
        found["own"] = bool((new.owner[data.edge_index.local[1]] == WORLD.rank).all())
        found["stale"] = error_of(lambda: model.vectors.sum().backward())

    def after_graph(data: Any, model: Model, optimizer: Any, loss: Tensor) -> None:
        kept = (model.vectors * 2).sum()
        fgd.rebalance(data, weights=[3, 1])
        found["recorded before"] = error_of(kept.backward)

    moves = {1: move, 3: after_graph}
    fgd.COUNTS.reset()
    losses = train(fgd.shard(plain, method="even"), moves)
    found["losses"], found["gathers"] = losses, dict(fgd.COUNTS.gathers)
    found["measured"] = measured(plain)
    found["types"] = several_types()
    found["by heads"] = by_heads(plain)
    found["errors"] = errors(plain)
    found["performance"] = performance_of_a_model()
    found["script"] = script(plain)
    found["diverged"] = diverged(plain)
    return found


def measured(plain: Any) -> Any:
    data = fgd.shard(plain, weights="uniform", method="even")
    with clock() as ours:
        with fgd.measured(data, epochs=2) as first:
            for _ in range(2):
                ours.compute(0.6, 0.2)
                data.x.sum()
        limited = limited_shares(first)
        done = fgd.rebalance(data, first, method="even")
        with fgd.measured(data) as second:
            ours.compute(0.3, 0.32)
        again = fgd.rebalance(data, second)
    return first, done, again, data.x.rows.counts, limited


def limited_shares(found: fgd.Balance) -> list[float]:
    """The highest shares of ranks, of which the second has no address space left."""
    spaces = transport.gather_objects(devices.address_space())

    def facts() -> list[devices.Device]:
        first, second = devices.devices()
        return [first, dataclasses.replace(second, limit=float(spaces[1]))]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rebalancing, "devices", facts)
        return rebalancing.highest_shares(found)


def by_heads(plain: Any) -> Any:
    """The results of attention, and counts of it by mode, before and after rebalancing."""
    data = fgd.shard(plain, method="even", mode="heads")
    torch.manual_seed(0)
    conv = GATConv(NUM_FEATURES, 4, heads=2)
    fgd.COUNTS.attention.clear()
    before = fgd.whole(conv(data.x, data.edge_index).detach())
    fgd.rebalance(data, weights=[1, 3])
    after = fgd.whole(conv(data.x, data.edge_index).detach())
    with torch.no_grad():
        expected = conv(plain.x, plain.edge_index)
    off = [float((x - expected).abs().max()) for x in (before, after)]
    return off, dict(fgd.COUNTS.attention)


def several_types() -> Any:
    torch.manual_seed(0)
    data = HeteroData()
    data["a"].x, data["b"].x = torch.randn(30, 4), torch.randn(50, 4)
    data["a", "to", "b"].edge_index = torch.stack(
        [torch.randint(30, (200,)), torch.randint(50, (200,))]
    )
    data["b", "to", "a"].edge_index = data["a", "to", "b"].edge_index.flip(0)
    sharded = fgd.shard(data, method="even")
    torch.manual_seed(1)
    conv = SAGEConv((4, 4), 3)

    def run() -> Tensor:
        pair = sharded["a"].x, sharded["b"].x
        return fgd.whole(conv(pair, sharded["a", "to", "b"].edge_index).detach())

    before = run()
    done = fgd.rebalance(sharded, weights=[1, 4])
    counts = sharded["b"].x.rows.counts
    return float((run() - before).abs().max()), done.moved, counts


def errors(plain: Any) -> list[str]:
    data = fgd.shard(plain, method="even")
    with fgd.measured(data) as before:
        pass
    fgd.rebalance(data, weights=[1, 2])
    conv = GCNConv(8, 4)

    def measure_twice() -> None:
        with fgd.measured(data), fgd.measured(data):
            pass

    actions = [
        lambda: fgd.rebalance(data),
        lambda: fgd.rebalance(plain, weights=[1, 1]),
        lambda: fgd.rebalance(data, before),
        lambda: fgd.rebalance(data, weights=[1, 2, 3]),
        lambda: fgd.rebalance(data, weights=[1, 2], threshold=0),
        lambda: fgd.shard(plain, weights="fair"),
        lambda: fgd.shard(plain, weights=[1, 0]),
        lambda: fgd.shard(plain, model=conv),
        lambda: fgd.shard(plain, weights="auto", model="GCN"),
        lambda: fgd.measure_performance(conv, plain, ratios=[0.5, 2]),
        lambda: fgd.measure_performance(conv, plain, ratios=[0.5]),
        lambda: fgd.measure_performance(conv, plain),
        measure_twice,
    ]
    return [error_of(action) for action in actions]


def larger() -> Any:
    data = to_double(graph())
    edges = torch.randint(400, (2, 3000), generator=torch.Generator().manual_seed(2))
    data.edge_index, data.x = edges, torch.randn(400, 8, generator=torch.Generator().manual_seed(2))
    data.y = torch.arange(400) % 4
    del data.train_mask, data.edge_attr, data.edge_weight, data.w
    return data


def performance_of_a_model() -> Any:
    """Few and short samples, which are kept."""
    performance._SECONDS = 0.01
    conv, data = GCNConv(8, 4), larger()
    before = [p.clone() for p in conv.parameters()]
    learnt = fgd.measure_performance(conv, data, ratios=[0.5, 1.0], reuse=False)
    issued = fgd.COUNTS.calls.total()
    again = fgd.measure_performance(conv, data, ratios=[0.5, 1.0])
    issued = fgd.COUNTS.calls.total() - issued
    said, by_most = io.StringIO(), []
    for most in (-1.0, math.inf):
        shares.MOST_ERROR = most
        with contextlib.redirect_stderr(said):
            sharded = fgd.shard(data, weights="auto", model=again)
        with fgd.measured(sharded) as found:
            pass
        by_most.append(found.predicted is not None)
    with fgd.measured(sharded) as found:
        torch.autograd.grad(conv(sharded.x, sharded.edge_index).sum(), list(conv.parameters()))
    same = all(torch.equal(p, q) for p, q in zip(conv.parameters(), before, strict=True))
    is_kept = learnt.samples == again.samples
    return is_kept, same, issued, found, learnt.samples[0], by_most, said.getvalue()


def script(plain: Any) -> Any:
    """The rebalancing by the launcher while a script trains, in which a rank is slow."""
    first_epochs._SECONDS = 0.0
    found = []
    for _ in range(2):
        shares = Automatic("a script", "even")
        if not found:
            shares.weights = [0.5, 0.5]
        data = fgd.shard(plain, weights=shares.shares(plain), method="even")
        FirstEpochs([shares.correct]).watch(data)
        weight = nn.Parameter(torch.ones(NUM_FEATURES))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        counts = [data.x.rows.counts]
        with clock() as ours:
            for _ in range(13):
                ours.compute(0.3, 0.1)
                optimizer.zero_grad()
                (data.x * weight).mean().backward()
                optimizer.step()
        counts.append(data.x.rows.counts)
        found.append((shares.weights, counts, weight.detach()))
    return found, cache.read("speeds", shares._identity)


def diverged(plain: Any) -> str:
    data = fgd.shard(plain, method="even")
    if WORLD.rank == 0:
        data.x + 1
    return error_of(lambda: fgd.rebalance(data, weights=[1, 2]))


@pytest.fixture(scope="module")
def results(once_on_ranks: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = once_on_ranks(work_on_ranks, 2)
    return found


def test_training_goes_on_to_the_same_losses(results: list[dict[str, Any]]) -> None:
    for found in results:
        torch.testing.assert_close(found["losses"], found["losses before"], rtol=1e-13, atol=0)
        assert found["gathers"] == {}


def test_rows_and_edges_are_where_they_should_be(results: list[dict[str, Any]]) -> None:
    first, second = results
    nodes = [found["rows"] for found in results]
    assert [len(set(rows)) for rows in nodes] == [1, 1]
    assert nodes[0][0] + nodes[1][0] == NUM_NODES and nodes[1][0] > nodes[0][0]
    assert 0.2 < (first["edges"] + nodes[0][0]) / 360 < 0.3
    assert first["edges"] + second["edges"] == 300
    for found in results:
        assert found["own"] and found["same gradient"]
        assert found["moved"].weights == (0.25, 0.75)
        assert found["moved"].moved >= 10  # of the graph, and of the model and its optimizer


def test_what_was_recorded_before_cannot_be_gone_back_through(
    results: list[dict[str, Any]],
) -> None:
    for found in results:
        assert found["stale"] == "nothing"  # what is recorded after can be
        assert "recorded before fastgraph.dist.rebalance()" in found["recorded before"]


def test_the_slower_rank_gets_less(results: list[dict[str, Any]], tmp_path: Path) -> None:
    found, done, again, counts, limited = results[0]["measured"]
    assert found == results[1]["measured"][0]
    assert [one.compute for one in found.measured] == pytest.approx([0.6, 0.2])
    assert found.collectives == 1 and found.imbalance == pytest.approx(1.5)
    assert found.work == [n + e for n, e in zip(found.nodes, found.edges, strict=True)]
    assert done.weights == pytest.approx((0.25, 0.75), abs=0.05) and done.moved
    assert counts[0] < counts[1]
    # One that has no memory beside that of its rows gets no more than it has.
    assert limited[0] == 1 and 0 < limited[1] < found.work[1] / sum(found.work) + 1e-9
    assert again.moved == 0 and sum(again.weights) == pytest.approx(1)  # it is balanced
    assert "compute" in str(found) and "predicted" not in str(found)
    pytest.importorskip("matplotlib")
    found.plot(tmp_path / "balance.svg")
    assert (tmp_path / "balance.svg").read_text().count("<svg") == 1


def test_several_types_of_nodes(results: list[dict[str, Any]]) -> None:
    difference, moved, counts = results[0]["types"]
    assert difference < 1e-14 and moved == 4 and counts[0] < counts[1]


def test_bad_arguments(results: list[dict[str, Any]]) -> None:
    messages = [
        "ValueError: either balance or weights must be given",
        "ValueError: data must be a graph whose nodes and edges are sharded",
        "ValueError: balance must be of this graph as it is sharded now",
        "ValueError: weights must be 2 numbers above 0",
        "ValueError: threshold must be at least 1, got 0",
        "ValueError: weights must be one of ['auto', 'uniform'] or a number for each rank, got",
        "ValueError: weights must be 2 numbers above 0",
        "ValueError: model is for weights='auto', got weights=None",
        "TypeError: model must be a torch.nn.Module or a Performance, got str",
        "ValueError: ratios must be above 0 and at most 1, got [0.5, 2]",
        "ValueError: ratios must be at least 2, got [0.5]",
        "ValueError: data must have at least 128 nodes to be sampled, got 60",
        "RuntimeError: measurements must not be nested",
    ]
    for found in results:
        for error, message in zip(found["errors"], messages, strict=True):
            assert error.startswith(message)


def test_a_model_of_performance(results: list[dict[str, Any]]) -> None:
    pytest.importorskip("sklearn")
    is_kept, is_unchanged, issued, found, samples, *_ = results[0]["performance"]
    assert is_kept and is_unchanged
    assert issued < 20  # nothing is trained again
    assert len(samples) == 4 and len({one["sample"] for one in samples}) == 4
    assert all(one["seconds"] > 0 and one["collectives"] > 1 for one in samples)
    assert len(found.predicted) == 2
    assert all(phases.compute > 0 for phases in found.predicted)
    assert "compute, predicted" in str(found)


def test_a_model_that_is_far_off_is_not_used(results: list[dict[str, Any]]) -> None:
    pytest.importorskip("sklearn")
    for rank, of_rank in enumerate(results):
        *_, is_used, said = of_rank["performance"]
        assert is_used == [False, True]
        expected = "shares of the work by the devices: the model of performance is off by "
        assert said.count(expected) == (rank == 0)


def test_a_script_is_corrected_once(results: list[dict[str, Any]]) -> None:
    (first, second), speeds = results[0]["script"]
    _, (before, after), trained = first
    assert after[0] < 0.7 * before[0]
    assert set(speeds) == {"speed"} and speeds["speed"] > 0
    # Ranks on like devices have done so much on average.
    assert second[0] == pytest.approx([0.5, 0.5])
    torch.testing.assert_close(second[2], trained, rtol=1e-12, atol=0)


def test_ranks_that_do_different_things_are_not_mixed_up(results: list[dict[str, Any]]) -> None:
    for found in results:
        assert found["diverged"].startswith("RanksDivergedError: ranks have made different numbers")


def test_the_mode_of_attention_stays(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        off, attention = of_rank["by heads"]
        assert max(off) < 1e-12
        assert attention == {"heads": 2}
