"""Graphs on the CPU with features on a GPU, for which the emulator stands in with ``--emulate``.

Its tensors are the CPU's, so that a graph would not be copied for them: there it always is.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastgraph
from fastgraph.graphs.memo import MEMO
from fastgraph.plugins.refusal import Refusal
from tests.conftest import EMULATED, selected
from tests.dgl.graphs import block, graph
from tests.graphs import Case, random_edges

import dgl.nn as dglnn  # isort: skip
from fastgraph.dgl.structure import Structure, structure_of  # isort: skip
from fastgraph.dgl.conditions import call_refusal  # isort: skip
from fastgraph.dgl import calls, devices  # isort: skip

CASE = Case("small", random_edges(12, 12, 40), 12, 12)
IN = 8


@pytest.fixture(params=["cpu", EMULATED, "cuda"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Where features are; kernels for it are selected."""
    for name in selected(request.param):
        monkeypatch.setenv("FASTGRAPH_BACKEND", name)
        place = torch.device("cuda" if name == "cuda" else "cpu")
        if name != "cuda":
            monkeypatch.setattr(calls, "beside_features", lambda s, x: devices.copied(s, x.device))
        yield place


def relations() -> tuple[Tensor, ...]:
    return (torch.arange(CASE.num_edges) % 3,)


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "GATConv": (lambda: dglnn.GATConv(IN, 4, 2, allow_zero_in_degree=True), tuple),
    "GATConv weighted": (
        lambda: dglnn.GATConv(IN, 4, 2, allow_zero_in_degree=True),
        lambda: (torch.rand(CASE.num_edges),),
    ),
    "GATv2Conv": (lambda: dglnn.GATv2Conv(IN, 4, 2, allow_zero_in_degree=True), tuple),
    "DotGatConv": (lambda: dglnn.DotGatConv(IN, 4, 2, allow_zero_in_degree=True), tuple),
    "AGNNConv": (lambda: dglnn.AGNNConv(allow_zero_in_degree=True), tuple),
    "EdgeGATConv": (
        lambda: dglnn.EdgeGATConv(IN, 2, 4, 2, allow_zero_in_degree=True),
        lambda: (torch.randn(CASE.num_edges, 2),),
    ),
    "GraphConv": (lambda: dglnn.GraphConv(IN, 4, allow_zero_in_degree=True), tuple),
    "SAGEConv mean": (lambda: dglnn.SAGEConv(IN, 4, "mean"), tuple),
    "SAGEConv gcn": (lambda: dglnn.SAGEConv(IN, 4, "gcn"), tuple),
    "SAGEConv pool": (lambda: dglnn.SAGEConv(IN, 4, "pool"), tuple),
    "RelGraphConv": (lambda: dglnn.RelGraphConv(IN, 4, 3), relations),
    "HGTConv": (
        lambda: dglnn.HGTConv(IN, 4, 2, 2, 3, dropout=0.0),
        lambda: (torch.arange(CASE.num_src) % 2, *relations()),
    ),
}


def small_graph() -> Any:
    return graph(CASE.edge_index, CASE.num_src)


def run(module: nn.Module, g: Any, x: Tensor, more: tuple[Tensor, ...]) -> list[Tensor]:
    """Output and gradients, on the CPU."""
    x = x.detach().requires_grad_()
    out = module(g, x, *more)
    gradients = torch.autograd.grad(out.square().sum(), [x, *module.parameters()])
    return [value.detach().cpu() for value in (out, *gradients)]


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, device: torch.device) -> None:
    if name == "HGTConv" and device.type == "cuda":
        pytest.skip("DGL multiplies by the matrices of kinds of nodes itself")
    build, make_more = LAYERS[name]
    module, x, more = build(), torch.randn(CASE.num_src, IN), make_more()
    g = small_graph()
    expected = run(module, g, x, more)
    moved = copy.deepcopy(module).to(device)
    with fastgraph.enabled(strict=True, min_edges=0):
        found = run(moved, g, x.to(device), tuple(part.to(device) for part in more))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert fastgraph.status().row(name.partition(" ")[0]).routed == 1


def test_blocks(device: torch.device) -> None:
    mfg, module = block(CASE), dglnn.GATv2Conv(IN, 4, 2)
    x = torch.randn(mfg.num_src_nodes(), IN)
    expected = run(module, mfg, x, ())
    with fastgraph.enabled(strict=True, min_edges=0):
        found = run(copy.deepcopy(module).to(device), mfg, x.to(device), ())
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_the_graph_moves_once_and_is_freed_with_it(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[weakref.ref[Structure]] = []
    make = devices._Copy.__init__

    def counting(self: Any, *given: Any) -> None:
        make(self, *given)
        copies.append(weakref.ref(self.structure))

    monkeypatch.setattr(devices._Copy, "__init__", counting)
    module = dglnn.SAGEConv(IN, 4, "mean").to(device)
    x = torch.randn(CASE.num_src, IN, device=device, requires_grad=True)
    g = small_graph()
    with fastgraph.enabled(strict=True, min_edges=0):
        for _ in range(3):
            module(g, x).sum().backward()
        assert len(copies) == 1
        g.add_edges([0], [1])
        module(g, x).sum().backward()
        assert len(copies) == 2
        del g
        gc.collect()
        MEMO.trim()
    assert [found() for found in copies] == [None, None]


def test_edges_that_are_edited_through_dgls_tensors(device: torch.device) -> None:
    g = small_graph()
    module = dglnn.SAGEConv(IN, 4, "mean")
    moved, x = copy.deepcopy(module).to(device), torch.randn(CASE.num_src, IN)
    with torch.no_grad(), fastgraph.enabled(strict=True, min_edges=0):
        moved(g, x.to(device))
        _, index, _ = g.adj_tensors("csc")
        index[:] = (index + 1) % CASE.num_src
        found = moved(g, x.to(device)).cpu()
    with torch.no_grad():
        expected = module(g, x)
    torch.testing.assert_close(found, expected)


def test_what_can_be_moved() -> None:
    """From the CPU only, and only by layers that need nothing of DGL's frames."""
    structure = structure_of(small_graph()._graph)
    assert isinstance(structure, Structure)
    elsewhere = torch.empty(CASE.num_src, IN, device="meta")
    refusal = Refusal("features and graph on different devices")
    assert call_refusal(structure.device, structure.num_edges, elsewhere) == refusal
    assert call_refusal(structure.device, structure.num_edges, elsewhere, can_move=True) is None
    moved = devices.beside_features(structure, elsewhere)
    assert moved.index.device.type == "meta" and moved.num_dst == structure.num_dst
    assert devices.beside_features(structure, torch.empty(1)) is structure
    assert call_refusal(moved.device, moved.num_edges, torch.empty(1), can_move=True) == refusal
