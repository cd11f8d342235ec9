"""Calls like a layer's last one are not planned again, unless something has changed in between."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import fastgraph
from fastgraph.pyg import repeated, traced
from fastgraph.routing.switch import SWITCH
from tests.graphs import random_edges
from tests.pyg.traced_layers import CHANNELS, EDGES, NODES, Scaled, Updating, traces, x64

pytestmark = [
    pytest.mark.repeats,  # Plans are made before a backend is asked for anything.
    pytest.mark.filterwarnings("ignore::fastgraph.FallbackWarning"),
    pytest.mark.usefixtures("nothing_known"),
]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """The layers whose calls were planned."""
    found: list[object] = []
    plan = traced._plan

    def counting(module: Any, *arguments: Any) -> Any:
        found.append(module)
        return plan(module, *arguments)

    monkeypatch.setattr(traced, "_plan", counting)
    with fastgraph.enabled(min_edges=0):
        yield found


@contextmanager
def enabled_anew() -> Iterator[None]:
    """Calls are planned, whatever the ones before."""
    before = dict(repeated._LAST)
    repeated._LAST.clear()
    try:
        yield
    finally:
        repeated._LAST.clear()
        repeated._LAST.update(before)


def compared(layer: nn.Module, *arguments: Any) -> Tensor:
    """The result of a layer, which is upstream's, as are the gradients."""
    leaves = [t for t in (*arguments, *layer.parameters()) if isinstance(t, Tensor)]
    leaves = [t for t in leaves if t.requires_grad]

    def run() -> tuple[Tensor, ...]:
        out = layer(*arguments)
        if not out.requires_grad:
            return (out,)
        return out, *torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)

    found = run()
    with SWITCH.suspended():
        expected = run()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    return found[0]


@pytest.mark.parametrize(
    "layer",
    [Scaled(), Scaled("mean"), Scaled("max"), Scaled(["sum", "std"]), Updating()],
    ids=["sum", "mean", "max", "several", "update"],
)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_equal_calls_are_planned_once(
    layer: Scaled, requires_grad: bool, planned: list[object]
) -> None:
    layer = layer.double()
    for number in range(3):
        x = x64().requires_grad_(requires_grad)
        before = fastgraph.status().row(type(layer).__name__).programs
        compared(layer, x, EDGES)
        assert fastgraph.status().row(type(layer).__name__).programs == before + 1
        assert len(planned) == 1, number


def test_pairs_and_missing_features(planned: list[object]) -> None:
    layer = pyg.ResGatedGraphConv((CHANNELS, 3), 2).double()
    edges = random_edges(NODES, 5, 30)
    for _ in range(3):
        compared(layer, (x64(NODES, CHANNELS), x64(5, 3)), edges)
    assert len(planned) == 1
    compared(layer, (x64(NODES, CHANNELS), x64(6, 3)), edges)
    assert len(planned) == 1
    with pytest.raises((IndexError, RuntimeError)):
        layer((x64(NODES, CHANNELS), x64(4, 3)), edges)
    assert len(planned) == 2


def _edges_edited(edges: Tensor) -> None:
    edges[0, 0] = (edges[0, 0] + 1) % NODES


def _edges_edited_unseen(edges: Tensor) -> None:
    edges.numpy()[0, 0] = (edges[0, 0] + 1) % NODES


@pytest.mark.parametrize("edit", [_edges_edited, _edges_edited_unseen])
def test_edges_that_were_edited(edit: Callable[[Tensor], None], planned: list[object]) -> None:
    layer, x, edges = Scaled().double(), x64(), EDGES.clone()
    first = compared(layer, x, edges)
    edit(edges)
    assert not torch.equal(compared(layer, x, edges), first)
    edges[1, 0] = NODES
    with pytest.raises((IndexError, RuntimeError, ValueError)):
        layer(x, edges)
    assert len(planned) == 2  # the last one, which upstream runs


def _hooked(layer: Scaled) -> None:
    layer.register_message_forward_hook(lambda module, given, out: 2 * out)


def _instance_message(layer: Any) -> None:
    layer.message = lambda x_i, x_j: x_i * x_j


def _class_message(layer: Any) -> None:
    type(layer).message = lambda self, x_i, x_j: x_i * x_j


def _attribute(layer: Scaled) -> None:
    layer.scale = 0.75


def _other_flow(layer: Scaled) -> None:
    layer.flow = "target_to_source"


def _other_aggregation(layer: Any) -> None:
    layer.aggr_module = pyg.MeanAggregation()


def _watched_aggregation(layer: Any) -> None:
    layer.aggr_module.register_forward_hook(lambda module, given, out: 2 * out)


def _frozen(layer: Scaled) -> None:
    layer.weight.requires_grad_(False)


def _wider(layer: Scaled) -> None:
    layer.lin = nn.Linear(2 * CHANNELS, 1).double()


@pytest.mark.parametrize(
    "change",
    [
        _hooked,
        _instance_message,
        _class_message,
        _attribute,
        _other_flow,
        _other_aggregation,
        _watched_aggregation,
        _frozen,
        _wider,
    ],
)
def test_a_layer_that_was_changed(change: Callable[[Any], None], planned: list[object]) -> None:
    cls: type[Scaled] = type("Own", (Scaled,), {})
    layer, x = cls().double(), x64().requires_grad_()
    for _ in range(2):
        compared(layer, x, EDGES)
    change(layer)
    compared(layer, x, EDGES)
    assert len(planned) == (1 if change is _frozen else 2)


def test_a_hook_of_all_modules(planned: list[object]) -> None:
    layer, x = Scaled().double(), x64()
    compared(layer, x, EDGES)
    seen: list[object] = []
    handle = register_module_forward_hook(lambda module, given, out: seen.append(module))
    try:
        layer(x, EDGES)
    finally:
        handle.remove()
    assert layer.lin in seen and len(planned) == 2


@pytest.mark.parametrize("arguments", ["nodes", "edges", "channels", "dtype", "index", "both"])
def test_arguments_of_another_kind(arguments: str, planned: list[object]) -> None:
    layer = pyg.GINEConv(nn.Identity())
    x, edges, of_edges = torch.randn(NODES, 4), EDGES, torch.randn(EDGES.shape[1], 4)
    compared(layer, x, edges, of_edges)
    if arguments == "nodes":
        x = torch.randn(NODES + 1, 4)
    elif arguments == "edges":
        edges, of_edges = edges[:, 1:], of_edges[1:]
    elif arguments == "channels":
        x, of_edges = x[:, 1:], of_edges[:, 1:]
    elif arguments == "dtype":
        x = x.double()
    elif arguments == "index":
        edges = edges.int()
    else:  # as many nodes as edges, which tells no more whose features are whose
        edges, of_edges = edges[:, :NODES], of_edges[:NODES]
    for _ in range(2):
        compared(layer, x, edges, of_edges)
    assert len(planned) == (1 if arguments in ("nodes", "edges") else 2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: pyg.GINEConv(nn.Linear(CHANNELS, 3)),
        lambda: pyg.ResGatedGraphConv(CHANNELS, 2, edge_dim=CHANNELS),
        lambda: pyg.GENConv(CHANNELS, CHANNELS),
        lambda: pyg.GINEConv(nn.Identity(), aggr="max"),
    ],
    ids=["GINE", "ResGated", "GEN", "max"],
)
def test_batches_of_all_sizes(make: Callable[[], nn.Module], planned: list[object]) -> None:
    layer, is_alike = make().double(), False
    draw = random.Random(0)
    for number in range(20):
        count, num_edges = draw.randint(1, 9), draw.randint(1, 30)
        edges = random_edges(count, count, num_edges, seed=number)
        x = x64(count, CHANNELS).requires_grad_()
        of_edges = x64(num_edges, CHANNELS).requires_grad_()
        planned.clear()
        found = layer(x, edges, of_edges)
        was_planned = bool(planned)
        with enabled_anew():
            expected = layer(x, edges, of_edges)
        assert planned and torch.equal(found, expected)
        wanted = [t for t in (x, of_edges, *layer.parameters()) if t.requires_grad]
        grads = [
            torch.autograd.grad(out.square().sum(), wanted, allow_unused=True)
            for out in (found, expected)
        ]
        for one, other in zip(*grads, strict=True):
            assert one is other is None or torch.equal(one, other)
        compared(layer, x, edges, of_edges)
        # As many nodes as edges are another kind of call.
        was_alike, is_alike = is_alike, count == num_edges
        assert was_planned is (number == 0 or is_alike is not was_alike)


class Sized(pyg.MessagePassing):
    """A layer that says how many nodes there are, as those of relations do."""

    def forward(self, x: Tensor, edge_index: Tensor, size: Any) -> Tensor:
        return self.propagate(edge_index, x=x, size=size)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j.sin()


@pytest.mark.parametrize("kind", [tuple, list])
def test_sizes_that_are_given(kind: Callable[..., object], planned: list[object]) -> None:
    layer = Sized()
    for number, (num_in, num_out, num_edges) in enumerate(((9, 7, 30), (5, 7, 20), (9, 300, 30))):
        edges, x = random_edges(num_in, num_out, num_edges, seed=number), x64(num_in, CHANNELS)
        for is_known in (number > 0, True):
            planned.clear()
            compared(layer, x, edges, kind((num_in, num_out)))
            assert bool(planned) is not is_known
    odd = ((8, 300), (9, -1), (9, 300, 1), (9,), (9.0, 300), ("9", 300), (9, None))
    for size in (*map(kind, odd), 9):
        found = ended(layer, x, edges, size)
        with SWITCH.suspended():
            expected = ended(layer, x, edges, size)
        assert torch.equal(found, expected) if isinstance(found, Tensor) else found == expected


def ended(layer: nn.Module, *arguments: Any) -> Tensor | str:
    """The result, or the error."""
    try:
        return layer(*arguments)  # type: ignore[no-any-return]
    except Exception as error:
        return repr(error)


def test_sizes_that_do_not_fit_are_planned(planned: list[object]) -> None:
    layer = pyg.GINEConv(nn.Identity())
    x, of_edges = torch.randn(NODES, 4), torch.randn(EDGES.shape[1], 4)
    layer(x, EDGES, of_edges)
    for given in ((x, EDGES[:, 1:], of_edges), (x[1:], EDGES.clamp(max=NODES), of_edges[1:])):
        with pytest.raises((RuntimeError, IndexError, ValueError)) as found:
            layer(*given)
        with SWITCH.suspended(), pytest.raises(found.type) as expected:
            layer(*given)
        assert str(found.value) == str(expected.value)
    with fastgraph.enabled(min_edges=EDGES.shape[1]):
        layer(x, EDGES, of_edges)
        before = fastgraph.status().row("GINEConv").fell_back
        layer(x, EDGES[:, 1:], of_edges[1:])
        assert fastgraph.status().row("GINEConv").fell_back == before + 1


@pytest.mark.parametrize(
    "context",
    [
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: fastgraph.enabled(min_edges=EDGES.shape[1] + 1),
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
    layer, x = Scaled(), torch.randn(NODES, CHANNELS)
    first = layer(x, EDGES)
    with context():
        found = layer(x, EDGES)
        with SWITCH.suspended():
            expected = layer(x, EDGES)
    assert len(planned) == (1 if context is nullcontext else 2)
    assert found.dtype is expected.dtype
    assert found.requires_grad is expected.requires_grad
    # Under autocast upstream rounds what a program does not.
    is_rounded = not torch.allclose(expected, first, atol=1e-5)
    torch.testing.assert_close(found, expected, atol=0.1 if is_rounded else 1e-5, rtol=0.1)
    torch.testing.assert_close(layer(x, EDGES), first)


def test_layers_and_graphs_of_equal_shapes_take_turns(planned: list[object]) -> None:
    layer, x = Scaled().double(), x64()
    other = copy.deepcopy(layer)
    other.weight = nn.Parameter(layer.weight.detach() * 3)
    graphs = [EDGES, EDGES.flip(0), EDGES.t().contiguous().t()]
    for edges in graphs * 2:
        one, three = compared(layer, x, edges), compared(other, x, edges)
        assert not torch.allclose(one, three)
    assert planned == [layer, other]
    parameters = {name: 2 * value for name, value in layer.named_parameters()}
    found = torch.func.functional_call(layer, parameters, (x, EDGES))
    with SWITCH.suspended():
        expected = torch.func.functional_call(layer, parameters, (x, EDGES))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert len(planned) == 2


def test_nothing_is_kept_of_a_layer_that_is_gone(planned: list[object]) -> None:
    layer = Scaled().double()
    number = id(layer)
    compared(layer, x64(), EDGES)
    assert traces(layer) == 1 and number in repeated._LAST
    del layer
    planned.clear()
    gc.collect()
    assert number not in repeated._LAST
