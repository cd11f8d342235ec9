"""Layers that routes compute by edge programs as a whole, beside DGL's own code."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastgraph
from tests.ab import arguments, assert_same
from tests.dgl.graphs import BLOCKS, ORDINARY, block, dgl, graph, of_case
from tests.graphs import Case, random_edges

import dgl.nn as dglnn  # isort: skip

IN, EDGES, OUT = 6, 4, 5
HAS_GATED = hasattr(dglnn, "GatedGCNConv")

gated_only = pytest.mark.skipif(not HAS_GATED, reason="this DGL has no GatedGCNConv")


def matrices(rows: int = IN, columns: int = OUT) -> nn.Module:
    return nn.Sequential(nn.Linear(EDGES, 3), nn.ReLU(), nn.Linear(3, rows * columns))


def gated(**options: Any) -> nn.Module:
    return dglnn.GatedGCNConv(IN, EDGES, OUT, **options)


NN: dict[str, Callable[[], nn.Module]] = {
    "NNConv": lambda: dglnn.NNConv(IN, OUT, matrices()),
    "NNConv sum, residual": lambda: dglnn.NNConv(
        IN, OUT, nn.Linear(EDGES, IN * OUT), "sum", residual=True
    ),
    "NNConv same size": lambda: dglnn.NNConv(IN, IN, matrices(IN, IN), residual=True, bias=False),
}

OF_FEATURES: dict[str, Callable[[], nn.Module]] = {
    **NN,
    "CFConv": lambda: dglnn.CFConv(IN, EDGES, 8, OUT),
    **(
        {
            "GatedGCNConv": gated,
            "GatedGCNConv plain": lambda: gated(batch_norm=False, activation=None),
            "GatedGCNConv residual": lambda: dglnn.GatedGCNConv(IN, IN, IN, dropout=0.5),
        }
        if HAS_GATED
        else {}
    ),
}


def features_of(name: str, num_edges: int) -> Tensor:
    return torch.randn(num_edges, IN if name == "GatedGCNConv residual" else EDGES)


def agree(module: nn.Module, *args: Any, **options: Any) -> None:
    """In float32 with four times upstream's own error, as sums are taken in another order."""
    assert_same(module, arguments(*args), factor=4.0, **options)


@pytest.mark.parametrize("name", OF_FEATURES)
@pytest.mark.parametrize("case", [case for case in BLOCKS if case.num_src > 1], ids=str)
def test_layers_with_features_of_edges(name: str, case: Case) -> None:
    module = OF_FEATURES[name]().double()
    if case.num_edges == 1 and hasattr(module, "bn_node"):
        module.batch_norm = False  # there is no variance of a single value
    few = case.num_edges < case.num_src
    reason = "more memory than its matrices" if few and name in NN else None
    x, e = torch.randn(case.num_src, IN), features_of(name, case.num_edges)
    agree(module, of_case(case), x.double(), e.double(), reason=reason)


@pytest.mark.parametrize("name", OF_FEATURES)
def test_in_single_precision(name: str) -> None:
    agree(OF_FEATURES[name](), of_case(ORDINARY), torch.randn(30, IN), features_of(name, 150))


@pytest.mark.parametrize("name", [*NN, "CFConv"])
@pytest.mark.parametrize("case", BLOCKS[:4], ids=str)
def test_blocks_and_pairs(name: str, case: Case) -> None:
    mfg = block(case)
    x, e = torch.randn(mfg.num_src_nodes(), IN), torch.randn(mfg.num_edges(), EDGES)
    agree(OF_FEATURES[name]().double(), mfg, x.double(), e.double())
    pair = x.double(), torch.randn(mfg.num_dst_nodes(), IN).double()
    agree(OF_FEATURES[name]().double(), mfg, pair, e.double())


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_matrices_between_two_kinds_of_nodes(reduce: str) -> None:
    g = graph(random_edges(20, 9, 80), 20, 9)
    pair = torch.randn(20, IN).double(), torch.randn(9, 4).double()
    module = dglnn.NNConv((IN, 4), OUT, matrices(), reduce, residual=True).double()
    agree(module, g, pair, torch.randn(80, EDGES).double())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("heads", [1, 3])
def test_attention_with_new_features_of_edges(heads: int, bias: bool) -> None:
    g = dgl.add_self_loop(of_case(ORDINARY))
    module = dglnn.EGATConv(IN, EDGES, 2, 5, heads)
    if not bias:
        module.bias = None
    x, e = torch.randn(30, IN), torch.randn(g.num_edges(), EDGES)
    agree(module, g, x, e)
    agree(module.double(), g, x.double(), e.double())


def test_attention_between_two_kinds_of_nodes() -> None:
    edges = torch.cat([random_edges(20, 9, 80), torch.arange(9).expand(2, -1)], 1)
    g = graph(edges, 20, 9)
    pair = torch.randn(20, IN).double(), torch.randn(9, 4).double()
    module = dglnn.EGATConv((IN, 4), EDGES, 2, 5, 3).double()
    agree(module, g, pair, torch.randn(89, EDGES).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", [case for case in BLOCKS if case.num_src > 1], ids=str)
def test_maxima_of_differences(case: Case, dtype: torch.dtype) -> None:
    module = dglnn.EdgeConv(IN, OUT, allow_zero_in_degree=True).to(dtype)
    agree(module, of_case(case), torch.randn(case.num_src, IN).to(dtype))


@pytest.mark.parametrize("case", BLOCKS[:4], ids=str)
def test_maxima_of_blocks_and_pairs(case: Case) -> None:
    mfg = block(case)
    module = dglnn.EdgeConv(IN, OUT).double()
    x = torch.randn(mfg.num_src_nodes(), IN).double()
    agree(module, mfg, x)
    agree(module, mfg, (x, torch.randn(mfg.num_dst_nodes(), IN).double()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ties_go_to_whom_dgl_gives_them(dtype: torch.dtype) -> None:
    module = dglnn.EdgeConv(2, 2, allow_zero_in_degree=True).to(dtype)
    with torch.no_grad():
        for linear in (module.theta, module.phi):
            linear.weight.copy_(torch.eye(2))
    x = torch.randint(1, 3, (30, 2)).to(dtype)  # many are equal
    agree(module, of_case(ORDINARY), x)


@pytest.mark.parametrize("edge_size", [0, EDGES])
@pytest.mark.parametrize("hidden", [3, 16])
def test_equivariant_messages(hidden: int, edge_size: int) -> None:
    """Without self-loops, whose gradients are NaN in DGL."""
    g = dgl.remove_self_loop(of_case(ORDINARY))
    g = dgl.add_nodes(g, 2)  # which have no edges
    module = dglnn.EGNNConv(IN, hidden, OUT, edge_size).double()
    more = [torch.randn(g.num_edges(), edge_size).double()] if edge_size else []
    agree(module, g, torch.randn(32, IN).double(), torch.randn(32, 3).double(), *more)


class OtherMessages(dglnn.EGNNConv):
    """A subclass whose ``forward`` is that of its base."""

    def message(self, edges: Any) -> dict[str, Tensor]:
        found: dict[str, Tensor] = super().message(edges)
        return {name: 2 * values for name, values in found.items()}


class Multiplied(dglnn.EGNNConv):
    """A subclass that has nothing to do with messages."""


def test_subclasses() -> None:
    g = dgl.remove_self_loop(of_case(ORDINARY))
    given = g, torch.randn(30, IN).double(), torch.randn(30, 3).double()
    agree(OtherMessages(IN, 4, OUT).double(), *given, reason="message is overridden")
    agree(Multiplied(IN, 4, OUT).double(), *given)


def hooked(module: Any, name: str) -> nn.Module:
    getattr(module, name).register_forward_hook(lambda *_: None)
    return module  # type: ignore[no-any-return]


def with_hooked_edges(module: Any) -> nn.Module:
    hooked(module.project_edge, "0")
    return module  # type: ignore[no-any-return]


Left = tuple[str, Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]


def ordinary(*sizes: int) -> tuple[Any, ...]:
    rows = (30, 150)
    shapes = zip(rows, sizes, strict=False)
    return of_case(ORDINARY), *(torch.randn(row, size) for row, size in shapes)


LEFT: list[Left] = [
    ("maxima", lambda: dglnn.NNConv(IN, OUT, matrices(), "max"), lambda: ordinary(IN, EDGES)),
    (
        "edge_func.0 has hooks",
        lambda: dglnn.NNConv(IN, OUT, hooked(matrices(), "0")),
        lambda: ordinary(IN, EDGES),
    ),
    ("channels for", lambda: dglnn.NNConv(IN, OUT, matrices()), lambda: ordinary(3, EDGES)),
    (
        "efeat of shape",
        lambda: dglnn.NNConv(IN, OUT, matrices()),
        lambda: (*ordinary(IN)[:2], torch.randn(150)),
    ),
    (
        "project_edge.0 has hooks",
        lambda: with_hooked_edges(dglnn.CFConv(IN, EDGES, 8, OUT)),
        lambda: ordinary(IN, EDGES),
    ),
    ("batch statistics", lambda: dglnn.EdgeConv(IN, OUT, True, True), lambda: ordinary(IN)),
    (
        "which the layer does not allow",
        lambda: dglnn.EGATConv(IN, EDGES, 2, 5, 3),
        lambda: (graph(torch.tensor([[0], [1]]), 2), torch.randn(2, IN), torch.randn(1, EDGES)),
    ),
    (
        "attention that is returned",
        lambda: dglnn.EGATConv(IN, EDGES, 2, 5, 3),
        lambda: (*ordinary(IN, EDGES), None, True),
    ),
    ("coordinates", lambda: dglnn.EGNNConv(IN, 4, OUT), lambda: (*ordinary(IN), torch.randn(3, 3))),
]


@pytest.mark.parametrize(("reason", "make", "given"), LEFT, ids=lambda value: str(value)[:20])
def test_calls_left_to_dgl(reason: str, make: Any, given: Any) -> None:
    module = make()
    with fastgraph.enabled(min_edges=0), contextlib.suppress(RuntimeError, dgl.DGLError):
        module(*given())
    row = fastgraph.status().row(type(module).__name__)
    assert row.routed == 0 and any(reason in r for r in row.reasons), dict(row.reasons)


def test_small_graphs_and_slow_gradients_are_left_to_dgl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTGRAPH_MIN_EDGES")
    ends = torch.arange(200_000)
    small, many = (dgl.graph((ends[:n] * 7 % 20, ends[:n] % 20)) for n in (150, 200_000))
    module = dglnn.CFConv(IN, EDGES, 8, OUT)
    for g, is_recorded, routed in ((small, False, 0), (many, True, 0), (many, False, 1)):
        fastgraph.status().reset()
        with fastgraph.enabled(strict=True), torch.set_grad_enabled(is_recorded):
            module(g, torch.randn(20, IN), torch.randn(g.num_edges(), EDGES))
        row = fastgraph.status().row("CFConv")
        assert (row.routed, row.fell_back) == (routed, 1 - routed)


@gated_only
def test_gates_of_blocks_are_dgls_business() -> None:
    mfg = block(ORDINARY)
    module, e = gated(), torch.randn(mfg.num_edges(), EDGES)
    with fastgraph.enabled(min_edges=0), contextlib.suppress(AssertionError):
        module(mfg, torch.randn(mfg.num_src_nodes(), IN), e)
    assert any("two kinds" in reason for reason in fastgraph.status().row("GatedGCNConv").reasons)
