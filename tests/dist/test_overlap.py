"""Ranks compute while halo rows travel; results are tested in tests/dist/test_fused.py."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch_geometric.data import Data

import fastgraph
import fastgraph.dist as fgd
from fastgraph.dist.operators.halo import computing
from fastgraph.dist.operators.halo import graph as halves
from fastgraph.dist.operators.halo.graph import EdgeFractions, Halves
from fastgraph.dist.ranks import phases, transport
from fastgraph.dist.ranks.phases import RECORDER
from fastgraph.dist.ranks.world import WORLD
from fastgraph.graphs.graph import Graph
from tests.dist.comparing import deviation
from tests.dist.test_fused import HALVES, by_halves

TOLERANCE = 1e-12
N, D = 90, 6

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "GCN": lambda: gnn.GCNConv(D, D),
    "SAGE": lambda: gnn.SAGEConv(D, D),
    "GAT": lambda: gnn.GATConv(D, 3, heads=2),
    "GATv2": lambda: gnn.GATv2Conv(D, 3, heads=2),
}

FORWARD = ["begin", "kernel", "wait", "kernel"]
"""The events of a sum by halves."""

BACKWARD = ["kernel", "begin", "kernel", "wait"]


def ring() -> Data:
    """Nodes joined to those near them, so that most rows have no neighbour on another rank."""
    g = torch.Generator().manual_seed(0)
    sources = torch.randint(N, (5 * N,), generator=g)
    destinations = (sources + torch.randint(-2, 3, (5 * N,), generator=g)) % N
    index = torch.stack([sources, destinations])
    return Data(x=torch.randn(N, D, generator=g), edge_index=index, num_nodes=N)


def second_derivatives(make: Callable[[], nn.Module], data: Any) -> list[Tensor]:
    """The output, then gradients of a penalty on its gradients."""
    torch.manual_seed(0)
    layer = make()
    x = data.x.detach().clone().requires_grad_()
    out = layer(x, data.edge_index)
    parameters = list(layer.parameters())
    first = torch.autograd.grad(out.square().sum(), [x, *parameters], create_graph=True)
    penalty = sum(grad.square().sum() for grad in first)
    found = torch.autograd.grad(penalty, [x, *parameters], allow_unused=True)
    present = [grad for grad in found if grad is not None]
    return [out.local.detach(), *(grad.local if fgd.is_sharded(grad) else grad for grad in present)]


def events_of(data: Any) -> tuple[list[str], list[str]]:
    """The events on a rank, in their order, in both passes of a sum."""
    events: list[str] = []

    def noted(event: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            events.append(event)
            return function(*args, **kwargs)

        return call

    conv = gnn.GCNConv(D, D).to(data.x.device)
    x = data.x.detach().clone().requires_grad_()  # whose gradient travels, too
    conv(x, data.edge_index)  # plans
    of_gradients = importlib.import_module("fastgraph.ops.spmm")  # `ops.spmm` is a function
    with (
        mock.patch.object(computing, "SPMM", noted("kernel", computing.SPMM)),
        mock.patch.object(of_gradients, "SPMM", noted("kernel", of_gradients.SPMM)),
        mock.patch.object(
            transport, "begin_all_to_all", noted("begin", transport.begin_all_to_all)
        ),
        mock.patch.object(transport.Exchange, "wait", noted("wait", transport.Exchange.wait)),
    ):
        out = conv(x, data.edge_index)
        forward = events.copy()
        events.clear()
        out.sum().backward()
    return forward, events


def seconds_of_an_exchange() -> list[float]:
    """By a clock that goes on by 1 while it begins, by 10 until it is waited for, then by 2."""
    ticks = iter([0.0, 1.0, 11.0, 13.0])
    rows = [1] * WORLD.size
    with mock.patch.object(phases, "time", SimpleNamespace(perf_counter=lambda: next(ticks))):
        recorded = RECORDER.begin()
        exchange = transport.begin_all_to_all(torch.ones(WORLD.size, 1), rows, rows)
        RECORDER.end()
        exchange.wait()
    return [sum(last - first for first, last in one.spans) for one in recorded]


def on_this_rank() -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    data = fgd.shard(ring(), parts=torch.arange(N) * WORLD.size // N, mode="halo")
    found: dict[str, Any] = {"seconds": seconds_of_an_exchange()}
    with fastgraph.enabled():
        expected = {name: second_derivatives(make, data) for name, make in LAYERS.items()}
        for layout, shares in HALVES.items():
            if shares is None:
                continue
            by_halves(shares)
            for name, make in LAYERS.items():
                fgd.COUNTS.reset()
                results = second_derivatives(make, data)
                pairs = zip(expected[name], results, strict=True)
                wrong = [deviation(*pair, TOLERANCE) for pair in pairs]
                same = torch.equal(expected[name][0], results[0])
                found[f"{name}, {layout}"] = set(wrong), same, dict(fgd.COUNTS.halo)
            found[f"events, {layout}"] = events_of(data)
    return found


@pytest.fixture(scope="module")
def found(world_size: int, once_on_ranks: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = once_on_ranks(on_this_rank, world_size)
    return found


@pytest.mark.parametrize("layout", [layout for layout, shares in HALVES.items() if shares])
@pytest.mark.parametrize("name", LAYERS)
def test_second_derivatives_by_halves(found: list[Any], name: str, layout: str) -> None:
    by_edges = name == "GCN" and layout == "one without training"
    for of_rank in found:
        wrong, has_same_bits, halo = of_rank[f"{name}, {layout}"]
        assert wrong == {""}
        assert has_same_bits or by_edges
        assert list(halo) == [f"{'edges' if by_edges else 'rows'} without the halo"]


def test_exchanges_begin_before_and_end_after_a_kernel(found: list[Any]) -> None:
    for of_rank in found:
        for layout in ("one is empty", "one without training"):
            assert of_rank[f"events, {layout}"] == (FORWARD, BACKWARD)


def test_time_of_computing_meanwhile_is_none_of_the_exchange(found: list[Any]) -> None:
    for of_rank in found:
        assert of_rank["seconds"] == [3.0]


# Rows 0 and 3 have neighbours of the halo (sources 4 and 5), row 2 none at all.
SOURCES = [1, 4, 0, 2, 1, 5, 5]
DESTINATIONS = [0, 0, 1, 1, 3, 3, 0]


@pytest.mark.parametrize("by", ["rows", "edges"])
def test_halves_have_all_edges_once(by: str) -> None:
    csr = Graph(torch.tensor([SOURCES, DESTINATIONS]), 6, 4).by_destination
    found = Halves(csr, 4, 2, by, one_kind=True)
    assert found.rows.tolist() == [0, 3]
    sources = [torch.arange(4), torch.cat([found.own, torch.tensor([4, 5])])]
    rows = [torch.arange(4), found.rows]
    edges = []
    for half, edges_of_half in enumerate([found.first, found.second]):
        of_edge = torch.repeat_interleave(rows[half], edges_of_half.ptr.diff())
        edges += list(
            zip(sources[half][edges_of_half.index.long()].tolist(), of_edge.tolist(), strict=True)
        )
    positions = torch.cat(found.positions).tolist()
    assert [(SOURCES[i], DESTINATIONS[i]) for i in positions] == edges
    assert sorted(positions) == list(range(len(SOURCES)))
    assert len(found.positions[0]) == {"rows": 2, "edges": 4}[by]


def test_when_halves_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    csr = Graph(torch.tensor([SOURCES, DESTINATIONS]), 6, 4).by_destination
    fractions = EdgeFractions(csr, 4)
    assert (fractions.interior, fractions.local) == (1 - 5 / 7, 1 - 3 / 7)
    assert (fractions.by(sums=True), fractions.by(sums=False)) == ("edges", "rows")
    monkeypatch.setattr(halves, "LEAST_SHARE", 0.3)
    assert (fractions.by(sums=True), fractions.by(sums=False)) == ("edges", None)
    assert EdgeFractions(csr, 6).by(sums=True) == "rows"
