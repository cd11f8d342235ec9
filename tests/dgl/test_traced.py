"""Message passing by functions of users, which edge programs compute, against DGL."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastgraph
from tests.ab import arguments, assert_same, double, run
from tests.dgl.graphs import ALL, ORDINARY, block, dgl, of_case
from tests.dgl.user_functions import (
    APPLY,
    CHANNELS,
    UPDATE,
    Functions,
    both,
    square_graph,
)
from tests.graphs import Case, quantised

import dgl.function as fn  # isort: skip
import dgl.nn as dglnn  # isort: skip
from fastgraph.dgl import traced  # isort: skip

# Of functions of users in general, by DGL.
pytestmark = pytest.mark.filterwarnings("ignore:The input graph for the user-defined")

WITH_EDGES = [case for case in ALL if case.num_edges > 0]
REDUCED = {
    "sum": ("gated", fn.sum("m", "out")),
    "mean": ("gated", fn.mean("m", "out")),
    "max": ("tied", fn.max("m", "out")),
    "min": ("tied", fn.min("m", "out")),
    "one of several": ("scored", fn.sum("m", "out")),
    "one number": ("one_number", fn.max("m", "out")),
    "user's sum": ("gated", "summed"),
    "user's attention": ("scored", "attended"),
    "user's extrema": ("tied", "extrema"),
    "user's combination": ("gated", "combined"),
    "user's data": ("gated", "with_data"),
    "copied": ("", "extrema"),
}


def features(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Of sources, destinations and edges, with many ties."""
    return (
        quantised(case.num_src, CHANNELS, seed=1, dtype=torch.float32),
        quantised(case.num_dst, CHANNELS, seed=2, dtype=torch.float32) - 1,
        quantised(case.num_edges, 1, seed=3, dtype=torch.float32),
    )


class Copied(Functions):
    """A layer with a message of DGL's and its own reduction."""

    def forward(self, g: Any, x: Tensor, y: Tensor, w: Tensor) -> list[Tensor]:
        with g.local_scope():
            g.srcdata["h"] = x
            g.update_all(fn.copy_u("h", "m"), self.extrema)
            return [g.dstdata["out"], g.dstdata["more"]]


def made(name: str) -> Functions:
    torch.manual_seed(4)
    kind = Copied if name == "copied" else Functions
    return kind(*REDUCED[name])


@pytest.mark.parametrize("case", WITH_EDGES, ids=str)
@pytest.mark.parametrize("name", REDUCED)
def test_values_and_gradients(name: str, case: Case) -> None:
    """In float64, where ties have gradients of one edge or of all, as upstream has them."""
    call = double(arguments(of_case(case), *features(case)))
    module = made(name).double()
    expected = run(module, call)
    fastgraph.status().reset()
    with fastgraph.enabled(min_edges=0):
        found = run(module, call)
    row = fastgraph.status().row(UPDATE)
    assert (row.routed, row.programs, dict(row.reasons)) == (1, 1, {})
    for position, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(
            ours, theirs, rtol=1e-9, atol=1e-9, msg=lambda m, k=position: f"result {k}: {m}"
        )


@pytest.mark.parametrize("name", ["max", "min", "user's extrema", "user's attention"])
def test_ties_in_float32(name: str) -> None:
    """Other libraries compute DGL's extrema of float32, and take another of equal ones."""
    case = ORDINARY
    assert_same(made(name), arguments(of_case(case), *features(case)), layer=UPDATE, factor=4.0)


@pytest.mark.parametrize("message", ["gated", "scored", "one_number"])
@pytest.mark.parametrize("case", WITH_EDGES, ids=str)
def test_features_of_edges(message: str, case: Case) -> None:
    torch.manual_seed(4)
    module = Functions(message, None)
    assert_same(module, arguments(of_case(case), *features(case)), layer=APPLY, factor=4.0)


@pytest.mark.parametrize("name", ["sum", "user's attention", "user's extrema"])
def test_blocks_and_small_numbers_of_edges(name: str) -> None:
    for g in (block(ORDINARY), of_case(ORDINARY).int(), dgl.reverse(of_case(ORDINARY))):
        x = torch.randn(g.num_src_nodes(), CHANNELS)
        y = torch.randn(g.num_dst_nodes(), CHANNELS)
        w = torch.rand(g.num_edges(), 1)
        assert_same(made(name), arguments(g, x, y, w), layer=UPDATE, factor=4.0)


@pytest.mark.parametrize("name", ["sum", "user's attention", "user's combination", "max"])
def test_second_derivatives(name: str) -> None:
    module = made(name).double()
    _, y, w = double(features(ORDINARY))
    g, x = of_case(ORDINARY), torch.randn(30, CHANNELS, dtype=torch.float64)

    def second() -> Tensor:
        leaf = x.clone().requires_grad_()
        loss = sum(out.sin().sum() for out in module(g, leaf, y, w))
        (first,) = torch.autograd.grad(loss, leaf, create_graph=True)
        return torch.autograd.grad(first.square().sum(), leaf)[0]

    expected, found, row = both(second)
    assert row.programs == 1
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_variables_around_a_function() -> None:
    """Tensors, a layer and numbers that a function takes from where it is made."""
    g, layer = square_graph(), nn.Linear(4, 4)
    x = torch.randn(20, 4, requires_grad=True)
    scale = torch.randn(4, requires_grad=True)
    of_edges = torch.randn(120, 1, requires_grad=True)

    def call(factor: float, offset: Tensor) -> tuple[Tensor, ...]:
        def message(edges: Any, power: int = 2) -> dict[str, Tensor]:
            value = layer(edges.src["h"]) * scale + factor * edges.dst["h"] * of_edges
            return {"m": torch.tanh(value) ** power + offset}

        with g.local_scope():
            g.ndata["h"] = x
            g.update_all(message, lambda nodes: {"out": nodes.mailbox["m"].sum(1) * scale})
            out = g.ndata["out"]
        leaves = x, scale, of_edges, *layer.parameters()
        return out, *torch.autograd.grad(out.cos().sum(), leaves)

    for factor, offset in ((0.5, torch.ones(4)), (0.5, torch.zeros(4)), (-2.0, torch.ones(1, 4))):
        expected, found, row = both(lambda f=factor, o=offset: call(f, o))
        assert (row.programs, dict(row.reasons)) == (1, {})
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_functions_of_nodes_that_follow() -> None:
    """They see all features of a node, new ones instead of old ones."""
    g = square_graph()
    g.ndata["h"], g.ndata["out"] = torch.randn(20, 4), torch.randn(20, 4)

    def call() -> Tensor:
        with g.local_scope():
            g.update_all(
                lambda edges: {"m": edges.src["h"].abs()},
                fn.max("m", "out"),
                lambda nodes: {"out": nodes.data["out"].clamp(-9, 9) + nodes.data["h"]},
            )
            return g.ndata["out"]

    expected, found, row = both(call)
    assert row.programs == 1
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("across", ["sum", "max", "stack"])
def test_several_relations(across: str) -> None:
    """Nodes that have no edge of one relation have infinity, of which the others know."""
    generator = torch.Generator().manual_seed(0)
    ends = {
        ("a", name, "b"): (
            torch.randint(9, (40,), generator=generator),
            torch.randint(low, low + 6, (40,), generator=generator),
        )
        for name, low in (("one", 0), ("two", 5))
    }
    g = dgl.heterograph(ends, num_nodes_dict={"a": 9, "b": 12})
    g.nodes["a"].data["h"] = torch.randn(9, 4)
    g.nodes["b"].data["h"] = torch.randn(12, 4)

    def message(edges: Any) -> dict[str, Tensor]:
        return {"m": -(edges.src["h"] + edges.dst["h"]).abs()}

    def call() -> Tensor:
        with g.local_scope():
            reduce = fn.max("m", "out")
            g.multi_update_all({"one": (message, reduce), "two": (message, reduce)}, across)
            g["two"].update_all(message, fn.mean("m", "more"))
            return torch.cat([g.nodes["b"].data["out"].flatten(1), g.nodes["b"].data["more"]], 1)

    expected, found, row = both(call)
    assert (row.programs, dict(row.reasons)) == (3, {})
    torch.testing.assert_close(found, expected)


def test_pull_and_send() -> None:
    g = square_graph()
    g.ndata["h"] = torch.randn(20, 4)

    def call() -> Tensor:
        with g.local_scope():
            g.ndata["out"] = torch.zeros(20, 4)
            g.pull([3, 7], lambda edges: {"m": edges.src["h"] + edges.dst["h"]}, fn.sum("m", "out"))
            g.send_and_recv(
                torch.arange(9),
                lambda edges: {"m": edges.src["h"] * edges.dst["h"]},
                lambda nodes: {"out": nodes.mailbox["m"].mean(1)},
            )
            return g.ndata["out"]

    expected, found, row = both(call)
    assert (row.programs, dict(row.reasons)) == (2, {})
    torch.testing.assert_close(found, expected)


def test_features_may_be_edited_afterwards() -> None:
    """DGL gathers features, so that their owner may edit them before the backward pass."""
    g = square_graph()

    def call() -> Tensor:
        x = torch.linspace(-1, 1, 80).view(20, 4).requires_grad_()
        y = x * 1
        with g.local_scope():
            g.ndata["h"] = y
            g.update_all(lambda edges: {"m": edges.src["h"] * edges.dst["h"]}, fn.sum("m", "out"))
            out = g.ndata["out"]
        with torch.no_grad():
            y.mul_(3)
        return torch.autograd.grad(out.sum(), x)[0]

    expected, found, row = both(call)
    assert row.programs == 1
    torch.testing.assert_close(found, expected)


def test_explanations() -> None:
    g = square_graph()
    g.ndata["h"] = torch.randn(20, 4)
    layer = Functions("tied", None)

    def message(edges: Any) -> dict[str, Tensor]:
        return {"m": torch.exp(edges.src["h"]) * edges.dst["h"]}

    with fastgraph.enabled(min_edges=0):
        g.update_all(message, fn.sum("m", "out"))
        g.apply_edges(lambda edges: {"m": edges.src["h"].round()})
        g.ndata["k"] = g.ndata["h"]
        g.apply_edges(layer.tied)
    text = fastgraph.explain(message)
    assert "edge program, reduced by sum" in text
    assert "dst_h = row 4" in text and "exp(src_h)" in text
    assert "edge program, reduced by edge" in fastgraph.explain(layer)
    assert fastgraph.explain(layer.tied) == fastgraph.explain(layer).replace("Functions:", "tied:")
    assert "no message was traced" in fastgraph.explain(lambda: None)


LAYERS: dict[str, tuple[nn.Module, bool]] = {
    "PNAConv": (dglnn.PNAConv(6, 4, ["mean", "max", "min", "std"], ["identity"], 2.5), False),
    "PNAConv, scalers": (
        dglnn.PNAConv(
            6,
            4,
            ["sum", "var"],
            ["amplification", "attenuation"],
            1.7,
            num_towers=2,
            edge_feat_size=6,
        ),
        True,
    ),
    "GINEConv": (dglnn.GINEConv(nn.Linear(6, 3)), True),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    module, takes_edges = LAYERS[name]
    for g in (square_graph(), of_case(ORDINARY)):
        x = torch.randn(g.num_nodes(), 6)
        edges = (torch.randn(g.num_edges(), 6),) if takes_edges else ()
        assert_same(module, arguments(g, x, *edges), layer=UPDATE, factor=6.0)


def test_one_layer_is_traced_once() -> None:
    traced.KNOWN.clear()
    layer = Functions("scored", "attended").double()
    call = double(arguments(of_case(ORDINARY), *features(ORDINARY)))
    with fastgraph.enabled(min_edges=0):
        for _ in range(3):
            layer(*call[0])
        assert traced.KNOWN.count(layer) == 1
        layer.slope = 0.7
        changed = layer(*call[0])
        assert traced.KNOWN.count(layer) == 2
    for ours, theirs in zip(changed, layer(*call[0]), strict=True):
        torch.testing.assert_close(ours, theirs)
