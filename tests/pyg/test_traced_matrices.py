"""Layers whose messages are traced, on sparse adjacency matrices."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import (
    FastRGCNConv,
    GATConv,
    GENConv,
    GINEConv,
    NNConv,
    PNAConv,
    SAGEConv,
)

import fastgraph
from tests.ab import Arguments, arguments
from tests.graphs import quantised, random_edges
from tests.outcomes import difference, outcome
from tests.pyg.traced_layers import Scaled, refused

SOURCES, NODES, CHANNELS = 14, 9, 4


@pytest.fixture(autouse=True)
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CSR tensors are in beta
        yield


def entries(num_src: int) -> Tensor:
    """Distinct edges, sorted as matrices hold them; the last node of either kind has none."""
    edges = random_edges(num_src - 1, NODES - 1, 40).flip(0).unique(dim=1)
    return edges.flip(0)


def matrix(layout: str, edges: Tensor, values: Tensor, num_src: int) -> Tensor:
    size = NODES, num_src, *values.shape[1:]
    coo = torch.sparse_coo_tensor(edges.flip(0), values, size).coalesce()
    if layout == "coo":
        return coo
    offsets = torch.bincount(edges[1], minlength=NODES).cumsum(0)
    ptr = torch.cat([torch.zeros(1, dtype=torch.long), offsets])
    return torch.sparse_csr_tensor(ptr, edges[0], values, size)


def _pna() -> nn.Module:
    degrees = torch.bincount(torch.bincount(entries(SOURCES)[1]))
    return PNAConv(CHANNELS, 4, ["mean", "max", "std"], ["identity", "amplification"], degrees)


_PROJECTED = {"mode": "proj", "mode_kwargs": {"in_channels": CHANNELS, "out_channels": CHANNELS}}
_AGGREGATIONS = ["mean", "max", "sum", "softmax"]

# By name, the layer, and as how many values of an edge it takes those of the matrix.
LAYERS: dict[str, tuple[Callable[[], nn.Module], int | None]] = {
    "GEN": (lambda: GENConv(CHANNELS, 5, "softmax", edge_dim=3), 3),
    "GEN without values": (lambda: GENConv(CHANNELS, 5, ["softmax", "mean"]), None),
    "NN": (lambda: NNConv((CHANNELS, CHANNELS), 3, nn.Linear(3, CHANNELS * 3)), 3),
    "GINE": (lambda: GINEConv(nn.Linear(CHANNELS, 5), edge_dim=3), 3),
    "PNA": (_pna, None),
    "SAGE": (
        lambda: SAGEConv(CHANNELS, 5, aggr=_AGGREGATIONS, aggr_kwargs=dict(_PROJECTED)),
        None,
    ),
    "a user's": (lambda: Scaled(aggr="max"), None),
}


class On(nn.Module):
    """A layer on a matrix that gets no gradient."""

    def __init__(self, layer: nn.Module, graph: Tensor) -> None:
        super().__init__()
        self.layer, self.graph = layer, lambda: graph  # which no copy of the module copies

    def forward(self, x: Any, **more: Tensor) -> Tensor:
        out: Tensor = self.layer(x, self.graph(), **more)
        return out


def _both(module: nn.Module, call: Arguments) -> tuple[Any, Any]:
    upstream = outcome(module, call)
    fastgraph.status().reset()
    with fastgraph.enabled(min_edges=0):
        return upstream, outcome(module, call)


@pytest.mark.parametrize("is_pair", [False, True], ids=["one kind of nodes", "two kinds"])
@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.parametrize("name", LAYERS)
def test_matrices(name: str, layout: str, is_pair: bool) -> None:
    """They give upstream's results, and the bits that the edges as ``edge_index`` give."""
    if is_pair and name == "PNA":
        pytest.skip("upstream takes no pair")
    make, width = LAYERS[name]
    torch.manual_seed(0)
    module = make().double()
    num_src = SOURCES if is_pair else NODES
    edges = entries(num_src)
    x: Any = quantised(num_src, CHANNELS, dtype=torch.float64)
    x = (x, quantised(NODES, CHANNELS, seed=1, dtype=torch.float64)) if is_pair else x
    shape = (edges.shape[1],) if width is None else (edges.shape[1], width)
    values = quantised(*shape, dtype=torch.float64)
    if layout == "csr" and width is not None:
        more = {"edge_attr": values}  # no sparse CSR matrix of PyG has several values
        graph = matrix(layout, edges, values[:, 0], num_src)
    else:
        more, graph = {}, matrix(layout, edges, values, num_src)
    upstream, ours = _both(On(module, graph), arguments(x, **more))
    assert upstream.step == "end", upstream
    assert difference(upstream, ours) is None
    assert [(row.routed, row.fell_back) for row in fastgraph.status().rows] == [(1, 0)]
    more = {} if width is None else {"edge_attr": values}
    with fastgraph.enabled(min_edges=0):
        plainly = outcome(module, arguments(x, edges, **more))
    torch.testing.assert_close(ours.results[0], plainly.results[0], rtol=0, atol=0)


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_an_edit_between_the_passes(layout: str) -> None:
    edges = entries(NODES)
    graph = matrix(layout, edges, torch.ones(edges.shape[1], dtype=torch.float64), NODES)
    layer = Scaled().double()

    def edited() -> str:
        x = quantised(NODES, CHANNELS, dtype=torch.float64).requires_grad_()
        out = layer(x, graph)
        held = graph._indices() if layout == "coo" else graph.col_indices()
        held.copy_(held.clone())
        try:
            torch.autograd.grad(out.sum(), x)
        except RuntimeError as error:
            return str(error).partition(":")[0]
        return "no error"

    expected = edited()
    with fastgraph.enabled(min_edges=0):
        assert edited() == expected


class Multiplying(Scaled):
    """A layer that multiplies by the matrix."""

    def message_and_aggregate(self, adj_t: Tensor, x: Tensor) -> Tensor:
        return adj_t @ x


def test_what_is_left_to_upstream() -> None:
    edges = entries(NODES)
    ones = torch.ones(edges.shape[1], dtype=torch.float64)
    x = quantised(NODES, CHANNELS, dtype=torch.float64)
    adj = matrix("coo", edges, ones, NODES)
    multiplying = Multiplying().double()
    assert refused(multiplying, x, adj) == "message_and_aggregate is overridden"
    relational, kinds = FastRGCNConv(CHANNELS, 5, 2, aggr="sum").double(), edges[0] % 2
    assert refused(relational, x, adj, kinds) == "types of the edges of a sparse adjacency matrix"
    module = GENConv(CHANNELS, 5, edge_dim=3).double()
    twice = torch.sparse_coo_tensor(edges.flip(0), ones, (NODES, NODES))
    for wrong in (adj.detach().requires_grad_(), twice, matrix("csr", edges, ones, NODES).t()):
        upstream, ours = _both(On(module, wrong), arguments(x))
        assert difference(upstream, ours) is None
        assert fastgraph.status().row("GENConv").routed == 0
    upstream, ours = _both(On(GATConv(CHANNELS, 2, edge_dim=3).double(), adj), arguments(x))
    assert difference(upstream, ours) is None


def test_small_matrices_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTGRAPH_MIN_EDGES")
    edges = entries(NODES)
    adj = matrix("csr", edges, torch.ones(edges.shape[1], dtype=torch.float64), NODES)
    layer, x = Scaled().double(), quantised(NODES, CHANNELS, dtype=torch.float64)
    fastgraph.status().reset()
    with fastgraph.enabled():
        for _ in range(2):
            layer(x, adj)
    row = fastgraph.status().row("Scaled")
    assert (row.routed, row.fell_back) == (0, 2)
    assert all("too few edges" in reason for reason in row.reasons), row.reasons


@pytest.mark.parametrize("is_pair", [False, True], ids=["one tensor", "a pair"])
def test_a_lazy_layer_computes_the_same_bits_in_its_first_call(is_pair: bool) -> None:
    edges = entries(NODES)
    x: Any = torch.randn(NODES, CHANNELS)
    x = (x, torch.randn(NODES, 3)) if is_pair else x
    values = torch.randn(edges.shape[1], 3)
    made = []
    for is_enabled in (False, True):
        torch.manual_seed(0)
        layer = GENConv((-1, -1), 5, "softmax", edge_dim=-1)
        with fastgraph.enabled(min_edges=0) if is_enabled else nullcontext():
            first, second = (layer(x, edges, values) for _ in range(2))
        assert torch.equal(first, second)
        made.append([*layer.parameters(), torch.rand(1)])
    assert all(map(torch.equal, *made))
    row = fastgraph.status().row("GENConv")
    assert (row.routed, row.fell_back) == (2, 0)


class WithoutRoot(GENConv):
    """Does other things behind the message than PyG's class, which may need no more weights."""

    def forward(self, x: Any, edge_index: Any, edge_attr: Any = None) -> Tensor:  # type: ignore[override]
        found: Tensor = self.propagate(edge_index, x=x, edge_attr=edge_attr, size=None)
        return found


def test_weights_that_a_users_class_does_not_ask_for_are_not_made() -> None:
    states = []
    for is_enabled in (False, True):
        torch.manual_seed(0)
        layer = WithoutRoot((5, -1), 5, edge_dim=3)
        x = torch.randn(NODES, 5), torch.randn(NODES, 3)
        with fastgraph.enabled(min_edges=0) if is_enabled else nullcontext():
            layer(x, entries(NODES), torch.randn(entries(NODES).shape[1], 3))
        states.append((hasattr(layer.lin_dst, "_hook"), torch.rand(1)))
    assert states[0] == states[1]
    assert states[0][0]
