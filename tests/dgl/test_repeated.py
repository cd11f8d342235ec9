"""Calls of users' functions like an earlier one are planned again only if something changed."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook

import fastgraph
from fastgraph.layers.tracing import Outcomes
from fastgraph.routing.switch import SWITCH
from tests.dgl.graphs import dgl
from tests.dgl.user_functions import CHANNELS, UPDATE, Functions, square_graph

import dgl.function as fn  # isort: skip
from dgl.init import zero_initializer  # isort: skip
from fastgraph.dgl import repeated, traced  # isort: skip

pytestmark = [
    pytest.mark.filterwarnings("ignore:The input graph for the user-defined"),
    pytest.mark.filterwarnings("ignore::fastgraph.FallbackWarning"),
]

FACTOR = 2.0


@pytest.fixture(autouse=True)
def planned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """The calls that were planned."""
    found: list[object] = []
    plan = traced._plan

    def counting(graph: Any, call: Any, functions: Any) -> Any:
        found.append(call)
        return plan(graph, call, functions)

    monkeypatch.setattr(traced, "_plan", counting)
    monkeypatch.setattr(traced, "KNOWN", Outcomes())
    monkeypatch.setattr(repeated, "_LAST", {})
    with fastgraph.enabled(min_edges=0):
        yield found


def x64(rows: int, *channels: int) -> Tensor:
    return torch.randn(rows, *channels, dtype=torch.float64)


def inputs(g: Any, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Features of sources, destinations and edges."""
    rows = (g.num_nodes(), CHANNELS), (g.num_nodes(), CHANNELS), (g.num_edges(), 1)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in rows]


def compared(call: Callable[..., Any], *given: Any, leaves: Any = ()) -> Any:
    """The results of a call, which are upstream's, as are the gradients."""
    wanted = [t for t in (*given, *leaves) if isinstance(t, Tensor) and t.requires_grad]

    def run() -> tuple[Any, ...]:
        out = call(*given)
        some = [t for t in out if t.requires_grad]
        if not some or not torch.is_grad_enabled():
            return (out,)
        total = sum(t.square().sum() for t in some)
        return out, torch.autograd.grad(total, wanted, allow_unused=True)

    found = run()
    with SWITCH.suspended():
        expected = run()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    return found[0]


def updating(message: Any, reduce: Any = None) -> Callable[..., list[Tensor]]:
    """A call of ``update_all`` with features ``h`` of nodes."""

    def call(g: Any, x: Tensor) -> list[Tensor]:
        with g.local_scope():
            g.ndata["h"] = x
            g.update_all(message, fn.sum("m", "out") if reduce is None else reduce)
            return [g.ndata["out"]]

    return call


CASES = {
    "sum": ("gated", fn.sum("m", "out")),
    "mean": ("gated", fn.mean("m", "out")),
    "max": ("tied", fn.max("m", "out")),
    "user's sum": ("gated", "summed"),
    "user's attention": ("scored", "attended"),
    "user's combination": ("gated", "combined"),
    "user's data": ("gated", "with_data"),
    "of edges": ("gated", None),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_equal_calls_are_planned_once(
    name: str, requires_grad: bool, planned: list[object]
) -> None:
    """Once to trace, and once more to keep it."""
    g, layer = square_graph(), Functions(*CASES[name]).double()
    for number in range(4):
        given = [t.requires_grad_(requires_grad) for t in inputs(g)]
        counted = "dgl.apply_edges" if name == "of edges" else UPDATE
        before = fastgraph.status().row(counted).programs
        compared(layer, g, *given, leaves=layer.parameters())
        assert fastgraph.status().row(counted).programs == before + 1
        assert len(planned) == min(number + 1, 2)


def test_values_around_functions(planned: list[object]) -> None:
    """Functions made anew at each call have the same code."""
    g = square_graph()
    x, weight = x64(20, CHANNELS).requires_grad_(), x64(CHANNELS).requires_grad_()

    def call(factor: Any, tensor: Tensor) -> list[Tensor]:
        def message(edges: Any) -> dict[str, Tensor]:
            return {"m": edges.src["h"] * factor * tensor}

        return updating(message)(g, x)

    expected = (2, [(2.0, weight)] * 3), (1, [(3.0, weight)]), (2, [(3.0, x64(120, 1))] * 2)
    for plans, values in expected:
        planned.clear()
        for factor, tensor in values:
            compared(call, factor, tensor, leaves=[x])
        assert len(planned) == plans
    planned.clear()
    compared(call, 2.0, weight, leaves=[x])  # of several in turn
    assert not planned
    compared(call, 0.0, weight)
    compared(call, -0.0, weight)
    assert len(planned) == 2


def _attribute(layer: Any) -> None:
    layer.slope = 0.7


def _wider(layer: Any) -> None:
    layer.att = nn.Linear(2 * CHANNELS, CHANNELS).double()


def _other_values(layer: Any) -> None:
    with torch.no_grad():
        layer.att.weight *= 2


def _replaced(layer: Any) -> None:
    layer.att.weight = nn.Parameter(layer.att.weight.detach() * 2)


def _frozen(layer: Any) -> None:
    layer.att.weight.requires_grad_(False)


def _hooked(layer: Any) -> None:
    layer.att.register_forward_hook(lambda module, given, out: 2 * out)


def _class_method(layer: Any) -> None:
    type(layer).scored = lambda self, edges: {"m": edges.src["h"] * 3, "a": edges.data["w"]}


def _instance_method(layer: Any) -> None:
    layer.scored = lambda edges: {"m": edges.src["h"] * 3, "a": edges.data["w"]}


def _other_activation(layer: Any) -> None:
    layer.activation = torch.tanh


@pytest.mark.parametrize(
    "change",
    [
        *(_attribute, _wider, _other_values, _replaced, _frozen, _hooked),
        *(_class_method, _instance_method, _other_activation),
    ],
)
def test_a_layer_that_was_changed(change: Callable[[Any], None], planned: list[object]) -> None:
    class Own(Functions):
        activation = torch.relu

        def scored(self, edges: Any) -> dict[str, Tensor]:
            both = torch.cat([edges.src["h"], edges.dst["k"]], dim=1)
            scores = F.leaky_relu(self.att(both), self.slope).mean(-1, keepdim=True)
            return {"m": type(self).activation(edges.src["h"]) * self.slope, "a": scores}

        def attended(self, nodes: Any) -> dict[str, Tensor]:
            alpha = torch.softmax(nodes.mailbox["a"], dim=1)
            return {"out": torch.sum(alpha * nodes.mailbox["m"], dim=1)}

    g, layer = square_graph(), Own("scored", "attended").double()
    given = inputs(g)
    for _ in range(3):
        compared(layer, g, *given, leaves=layer.parameters())
    planned.clear()
    if change is _other_activation:
        Own.activation = torch.tanh
    else:
        change(layer)
    compared(layer, g, *given, leaves=layer.parameters())
    assert len(planned) == (change not in (_other_values, _replaced, _frozen))


def test_globals_and_reductions(planned: list[object]) -> None:
    g, x = square_graph(), x64(20, CHANNELS).requires_grad_()

    def message(edges: Any) -> dict[str, Tensor]:
        return {"m": edges.src["h"] * FACTOR, "n": edges.src["h"].sin()}

    global FACTOR
    for FACTOR in (2.0, 3.0, 2.0):  # noqa: B007
        for _ in range(2):
            compared(updating(message), g, x)
    for reduce in (fn.sum("n", "out"), fn.mean("m", "out"), fn.sum("m", "out")):
        compared(updating(message, reduce), g, x)
    with g.local_scope():
        g.ndata["h"] = x
        g.update_all(message, fn.sum("m", "other"))
        assert "other" in g.ndata and "out" not in g.ndata


@pytest.mark.parametrize("what", ["channels", "dtype", "missing", "integers", "subclass", "sparse"])
def test_features_of_another_kind(what: str, planned: list[object]) -> None:
    class Own(Tensor):
        """A tensor that may mean anything."""

    g = square_graph()
    g.edata["w"] = torch.rand(120, 1)
    x = torch.randn(20, CHANNELS)

    def message(edges: Any) -> dict[str, Tensor]:
        m = edges.src["h"] * 0.5 + edges.dst["h"]
        return {"m": m * edges.data["w"].to(m.dtype) if "w" in edges.data else m}

    call = updating(message)
    for _ in range(3):
        compared(call, g, x)
    assert len(planned) == 2
    if what == "channels":
        x = torch.randn(20, CHANNELS + 1)
    elif what == "dtype":
        x, g.edata["w"] = x.double(), g.edata["w"].double()
    elif what == "missing":
        del g.edata["w"]
    elif what == "integers":
        g.edata["w"] = torch.ones(120, 1, dtype=torch.int64)
    elif what == "subclass":
        x = x.as_subclass(Own)
    else:
        g.edata["w"] = torch.rand(120, 1).to_sparse()
        with pytest.raises((RuntimeError, NotImplementedError)):
            call(g, x)
        assert len(planned) == 3
        return
    for _ in range(2):
        found = call(g, x)[0]
        with SWITCH.suspended():
            torch.testing.assert_close(found, call(g, x)[0], rtol=1e-5, atol=1e-5)
    assert len(planned) == 4


def test_features_that_were_given_other_memory(planned: list[object]) -> None:
    """DGL looks at features when they are set: what is done to them later torch or we notice."""
    g, x = square_graph(), torch.randn(20, CHANNELS)

    def message(edges: Any) -> dict[str, Tensor]:
        return {"m": edges.src["h"].cos()}

    call = updating(message)
    for _ in range(3):
        compared(call, g, x)
    g.ndata["h"] = x
    x.data = torch.randn(4, CHANNELS)
    with pytest.raises((RuntimeError, IndexError, dgl.DGLError, ValueError)):
        g.update_all(message, fn.sum("m", "out"))
    assert len(planned) == 3


def test_initialised_nodes(planned: list[object]) -> None:
    g = square_graph()
    layer = Functions("gated", "summed").double()
    given = inputs(g)
    for _ in range(3):
        compared(layer, g, *given)
    assert len(planned) == 2
    g.set_n_initializer(zero_initializer)
    compared(layer, g, *given)
    assert len(planned) == 2
    g.set_n_initializer(lambda shape, dtype, ctx, _: torch.ones(shape, dtype=dtype, device=ctx))
    compared(layer, g, *given)
    assert len(planned) == 3


@pytest.mark.parametrize("name", ["sum", "max", "user's attention", "user's combination"])
def test_batches_of_all_sizes(name: str, planned: list[object]) -> None:
    layer = Functions(*CASES[name]).double()
    draw = random.Random(0)
    for number in range(12):
        count, num_edges = draw.randint(2, 9), draw.randint(1, 30)
        ends = torch.randint(count, (2, num_edges))
        g = dgl.graph(tuple(ends), num_nodes=count)
        if number % 3 == 2:  # of two kinds of nodes
            g = dgl.to_block(g, g.nodes())
        rows = g.num_src_nodes(), g.num_dst_nodes(), num_edges
        widths = CHANNELS, CHANNELS, 1
        given = [x64(n, c).requires_grad_() for n, c in zip(rows, widths, strict=True)]
        compared(layer, g, *given, leaves=layer.parameters())
    assert len(planned) == 2


def test_edges_that_were_edited(planned: list[object]) -> None:
    g, x = square_graph(), x64(20, CHANNELS)

    def message(edges: Any) -> dict[str, Tensor]:
        return {"m": edges.src["h"].cos() * edges.dst["h"]}

    call = updating(message)
    for _ in range(3):
        compared(call, g, x)
    before = compared(call, g, x)[0]
    g.add_edges(3, 4)
    assert not torch.equal(compared(call, g, x)[0], before)
    g.remove_edges([0, 5])
    compared(call, g, x)
    g.add_nodes(2)
    compared(call, g, x64(22, CHANNELS))
    compared(call, dgl.reverse(g), x64(22, CHANNELS))
    assert len(planned) == 2
    empty = dgl.graph(([], []), num_nodes=20)
    call(empty, x)
    assert len(planned) == 3


def test_relations_take_turns(planned: list[object]) -> None:
    """A graph of several relations with the same functions on each."""
    torch.manual_seed(0)
    ends = {(*pair, to): tuple(torch.randint(9, (2, 40))) for *pair, to in ("abc", "cde", "aba")}
    g = dgl.heterograph(ends, dict.fromkeys("ace", 9))
    x = {kind: x64(9, CHANNELS).requires_grad_() for kind in g.ntypes}

    def message(edges: Any) -> dict[str, Tensor]:
        return {"m": edges.src["h"].sin() * edges.dst["h"]}

    def call(*_: Any) -> list[Tensor]:
        with g.local_scope():
            g.ndata["h"] = x
            g.multi_update_all({r: (message, fn.sum("m", "o")) for r in g.canonical_etypes}, "sum")
            return list(g.ndata["o"].values())

    for _ in range(3):
        compared(call, leaves=x.values())
    assert fastgraph.status().row(UPDATE).fell_back == 0


def test_layers_of_equal_shapes_take_turns(planned: list[object]) -> None:
    g = square_graph()
    layers = [Functions("gated", "combined").double() for _ in range(2)]
    given = inputs(g)
    for _ in range(3):
        first, second = (compared(layer, g, *given)[0] for layer in layers)
        assert not torch.allclose(first, second)
    assert len(planned) == 2 * len(layers) - 1  # the second need not be traced
    layer = layers[0]
    parameters = {name: 2 * value for name, value in layer.named_parameters()}

    def call(*given: Any) -> Any:
        return torch.func.functional_call(layer, parameters, given)

    compared(call, g, *given)


@pytest.mark.parametrize(
    "context",
    [
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: fastgraph.enabled(min_edges=121),
        lambda: fastgraph.enabled(min_edges=0, backend="reference"),
        torch.no_grad,
        torch.inference_mode,
        nullcontext,
    ],
    ids=["autocast", "min_edges", "backend", "no_grad", "inference", "none"],
)
def test_surroundings(
    context: Callable[[], AbstractContextManager[object]], planned: list[object]
) -> None:
    g, layer = square_graph(), Functions("gated", "summed")
    given = inputs(g, torch.float32)
    for _ in range(3):
        first = layer(g, *given)[0]
    planned.clear()
    with context():
        found = layer(g, *given)[0]
        with SWITCH.suspended():
            expected = layer(g, *given)[0]
    assert len(planned) == (context is not nullcontext)
    assert (found.dtype, found.requires_grad) == (expected.dtype, expected.requires_grad)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer(g, *given)[0], first)


def test_a_default_dtype(planned: list[object]) -> None:
    g, x = square_graph(), torch.randn(20, CHANNELS)

    def message(edges: Any) -> dict[str, Tensor]:
        return {"m": edges.src["h"] * torch.where(edges.dst["h"] > 0, 0.1, 0.3)}

    call = updating(message)
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            for _ in range(2):
                found = call(g, x)[0]
                with SWITCH.suspended():
                    torch.testing.assert_close(found, call(g, x)[0])
        finally:
            torch.set_default_dtype(torch.float32)


def test_a_hook_of_all_modules(planned: list[object]) -> None:
    g, layer = square_graph(), Functions("gated", "summed").double()
    given = inputs(g)
    for _ in range(3):
        compared(layer, g, *given)
    seen: list[object] = []
    handle = register_module_forward_hook(lambda module, given, out: seen.append(module))
    try:
        layer(g, *given)
    finally:
        handle.remove()
    assert layer.gate in seen and len(planned) == 3


def test_no_layer_is_kept(planned: list[object]) -> None:
    g, layer = square_graph(), Functions("gated", "summed").double()
    given = inputs(g)
    for _ in range(3):
        layer(g, *given)
    gone, index = ref(layer), ref(g._graph)
    del layer, g
    planned.clear()
    gc.collect()
    assert gone() is None and index() is None
