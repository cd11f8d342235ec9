"""Edge programs in half types, of several dtypes and under autocast: as exact as upstream."""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.aggr import PowerMeanAggregation
from torch_geometric.utils import softmax

import fastgraph
from tests.graphs import hub_edges, random_edges
from tests.pyg.traced_layers import (
    CHANNELS,
    EDGES,
    Scaled,
    refused,
    routed,
    traces,
    with_message,
    x64,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::fastgraph.FallbackWarning"),
    pytest.mark.usefixtures("nothing_known"),
]

ROWS, WIDTH, FEATURES = 60, 16, 4
GRAPH = torch.cat([random_edges(ROWS, ROWS - 5, 700), hub_edges(ROWS, 250)], dim=1)
"""With a hub, duplicates and rows of no edges."""

HALVES = [torch.bfloat16, torch.float16]


class Own(MessagePassing):
    """A user's layer, whose message gets its parameters and a weight of each edge."""

    def __init__(self, message: Callable[..., Tensor], aggr: Any = "sum") -> None:
        super().__init__(aggr=aggr)
        self.own = message
        self.lin = nn.Linear(2 * WIDTH, WIDTH)
        self.att = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, edge_index: Tensor, weight: Any = None) -> Tensor:
        return self.propagate(edge_index, x=x, weight=weight)

    def message(self, x_i: Tensor, x_j: Tensor, weight: Any, index: Tensor) -> Tensor:
        return self.own(self, x_i, x_j, weight, index)


def gated(self: Any, x_i: Tensor, x_j: Tensor, weight: Any, index: Tensor) -> Tensor:
    return torch.sigmoid(self.lin(torch.cat([x_i, x_j], dim=-1))) * F.leaky_relu(x_j, 0.2)


def weighted(self: Any, x_i: Tensor, x_j: Tensor, weight: Any, index: Tensor) -> Tensor:
    return (x_i - x_j).tanh() * weight


def attending(self: Any, x_i: Tensor, x_j: Tensor, weight: Any, index: Tensor) -> Tensor:
    return softmax(((x_i + x_j) * self.att).sum(-1, keepdim=True), index) * x_j


def attending_in_float32(self: Any, x_i: Tensor, x_j: Tensor, weight: Any, index: Tensor) -> Tensor:
    scores = (x_i * x_j).sum(-1, keepdim=True).float() / 4
    return softmax(scores, index).to(x_j.dtype) * x_j


def of_two_layers(self: Any, x_i: Tensor, x_j: Tensor, weight: Any, index: Tensor) -> Tensor:
    return F.relu(self.lin(torch.cat([x_i, x_j - x_i], dim=-1)))


def masked(self: Any, x_i: Tensor, x_j: Tensor, weight: Any, index: Tensor) -> Tensor:
    return (x_i > x_j).to(x_j.dtype) * x_j.float() * self.att


PNA = {
    "aggregators": ["mean", "min", "max", "std"],
    "scalers": ["identity", "amplification"],
    "deg": torch.bincount(torch.bincount(GRAPH[1], minlength=ROWS)),
}

Features = tuple[int, ...]

# By name: the layer, and the shape of its features of edges if it has some.
LAYERS: dict[str, tuple[Callable[[], nn.Module], Features | None]] = {
    "gated": (lambda: Own(gated), None),
    "gated max": (lambda: Own(gated, "max"), None),
    "gated mean, max and std": (lambda: Own(gated, ["mean", "max", "std"]), None),
    "weighted": (lambda: Own(weighted), (1,)),
    "attending": (lambda: Own(attending), None),
    "attending in float32": (lambda: Own(attending_in_float32), None),
    "a layer of both": (lambda: Own(of_two_layers, "min"), None),
    "masked": (lambda: Own(masked), None),
    "ResGatedGraphConv": (lambda: pyg.ResGatedGraphConv(WIDTH, WIDTH), None),
    "GINEConv": (lambda: pyg.GINEConv(nn.Linear(WIDTH, 8), edge_dim=FEATURES), (FEATURES,)),
    "CGConv": (lambda: pyg.CGConv(WIDTH, FEATURES), (FEATURES,)),
    "FiLMConv": (lambda: pyg.FiLMConv(WIDTH, 8), None),
    "GENConv of a power": (
        lambda: pyg.GENConv(WIDTH, WIDTH, PowerMeanAggregation(learn=True, channels=WIDTH)),
        None,
    ),
    "GENConv of a softmax": (
        lambda: pyg.GENConv(WIDTH, WIDTH, aggr="softmax", t=0.1, learn_t=True, norm="layer"),
        None,
    ),
    "GENConv max": (lambda: pyg.GENConv(WIDTH, WIDTH, aggr="max", norm="layer"), None),
    "PNAConv": (lambda: pyg.PNAConv(WIDTH, WIDTH, edge_dim=FEATURES, **PNA), (FEATURES,)),
    "AGNNConv": (pyg.AGNNConv, None),
}


def results(
    layer: nn.Module, x: Tensor, edge_attr: Tensor | None, autocast: torch.dtype | None = None
) -> list[Tensor]:
    """The output and the gradients of features and parameters, of a copy of a layer."""
    layer = copy.deepcopy(layer)
    given = [t.clone().requires_grad_() for t in (x, edge_attr) if t is not None]
    context = torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext()
    with context:
        out = layer(given[0], GRAPH, *given[1:])
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    leaves = [*given, *layer.parameters()]
    found = torch.autograd.grad(out, leaves, cotangent.bfloat16().to(out.dtype), allow_unused=True)
    return [out.detach(), *(torch.zeros(()) if g is None else g for g in found)]


def as_exact_as_upstream(
    layer: nn.Module,
    x: Tensor,
    edge_attr: Tensor | None = None,
    autocast: torch.dtype | None = None,
) -> None:
    """A layer is routed, its results have upstream's dtypes, and errors no larger than upstream's.

    Errors are those of float64, relative to the size of all values. Of single values the largest
    tell of a maximum, or a number near a bound, on which side of another rounding puts it.
    """
    upstream = results(layer, x, edge_attr, autocast)
    x_64, edge_attr_64 = x.double(), None if edge_attr is None else edge_attr.double()
    exact = results(copy.deepcopy(layer).double(), x_64, edge_attr_64)
    fastgraph.status().reset()
    with fastgraph.enabled(min_edges=0):
        ours = results(layer, x, edge_attr, autocast)
    row = fastgraph.status().row(type(layer).__name__)
    assert (row.routed, dict(row.reasons)) == (1, {})
    eps = torch.finfo(autocast or x.dtype).eps
    for number, (own, theirs, truth) in enumerate(zip(ours, upstream, exact, strict=True)):
        assert own.dtype is theirs.dtype and own.shape == theirs.shape, number
        error, allowed = ((t.double() - truth).norm() for t in (own, theirs))
        assert error <= 2 * allowed + eps / 2 * truth.norm(), (number, error, allowed)


def made(name: str, dtype: torch.dtype) -> tuple[nn.Module, Tensor, Tensor | None]:
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    edge_attr = None if shape is None else torch.randn(GRAPH.shape[1], *shape).to(dtype)
    return make().to(dtype), torch.randn(ROWS, WIDTH).to(dtype), edge_attr


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_a_half_type(name: str, dtype: torch.dtype) -> None:
    as_exact_as_upstream(*made(name, dtype))


@pytest.mark.repeats  # kernels are given the same types as of layers of a half type
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_under_autocast(name: str, dtype: torch.dtype) -> None:
    as_exact_as_upstream(*made(name, torch.float32), autocast=dtype)


def test_one_layer_has_a_program_for_each_autocast() -> None:
    layer, x = Scaled(), x64().float()
    contexts = [contextlib.nullcontext(), *(torch.autocast("cpu", half) for half in HALVES)]
    expected = []
    for context in contexts:
        with context:
            expected.append(layer(x, EDGES))
    with fastgraph.enabled(min_edges=0):
        for context, truth in [*zip(contexts, expected, strict=True)] * 2:
            with context:
                found = layer(x, EDGES)
            assert found.dtype is truth.dtype
            torch.testing.assert_close(found, truth, rtol=2e-2, atol=2e-2)
    assert traces(layer) == 3 and fastgraph.status().row("Scaled").routed == 6


def test_threads_have_their_own_autocast() -> None:
    layer, x = Scaled(), x64().float()
    barrier = threading.Barrier(4)

    def call(number: int) -> Tensor:
        barrier.wait()
        with torch.autocast("cpu", torch.bfloat16, enabled=number % 2 == 1):
            return [layer(x, EDGES) for _ in range(5)][-1].detach()

    expected = layer(x, EDGES)
    with fastgraph.enabled(min_edges=0), ThreadPoolExecutor(4) as pool:
        found = list(pool.map(call, range(4)))
    for number, out in enumerate(found):
        assert torch.equal(out, found[number % 2])
    torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1], expected, rtol=2e-2, atol=2e-2)
    assert fastgraph.status().row("Scaled").routed == 20


def test_autocast_beside_a_profiler() -> None:
    layer, x = with_message(lambda self, x_i, x_j: self.lin(x_j) * x_i)(), x64().float()
    layer.lin = nn.Linear(CHANNELS, CHANNELS)
    with torch.autocast("cpu", torch.bfloat16), fastgraph.enabled(min_edges=0):
        sys.setprofile(lambda *_: None)
        try:
            layer(x, EDGES)
        finally:
            sys.setprofile(None)
        assert "_to_copy(x_j, dtype=torch.bfloat16)" in str(fastgraph.explain(layer))


def test_values_that_are_left_have_the_dtype_of_upstream() -> None:
    layer, x = pyg.FAConv(CHANNELS), x64().float()
    with torch.autocast("cpu", torch.bfloat16):
        expected, (_, theirs) = layer(x, x, EDGES, return_attention_weights=True)
        with fastgraph.enabled(min_edges=0):
            found, (_, ours) = layer(x, x, EDGES, return_attention_weights=True)
            assert fastgraph.status().row("FAConv").routed == 1
    assert (found.dtype, ours.dtype) == (expected.dtype, theirs.dtype)
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def test_equal_values_of_a_half_type_share_the_gradient_as_upstream() -> None:
    """Of values that only rounding makes equal."""
    layer = with_message(lambda self, x_i, x_j: (x_j + 1) * self.weight)(aggr="max").bfloat16()
    with torch.no_grad():
        layer.weight.fill_(1)
    x = torch.tensor([[0.001] * CHANNELS, [0.0005] * CHANNELS, [-1.0] * CHANNELS])
    x = x.bfloat16().requires_grad_()
    edges = torch.tensor([[0, 1], [2, 2]])
    (expected,) = torch.autograd.grad(layer(x, edges).sum(), x)
    with fastgraph.enabled(min_edges=0):
        (found,) = torch.autograd.grad(layer(x, edges).sum(), x)
        assert fastgraph.status().row(type(layer).__name__).routed == 1
    assert torch.equal(found, expected) and (found[:2] == 0.5).all()


def of_a_concatenation(self: Any, x_i: Tensor, x_j: Tensor, weight: Any, index: Tensor) -> Tensor:
    return self.lin(torch.cat([x_i, weight], dim=-1)) * x_j


def of_a_sum(self: Any, x_i: Tensor, x_j: Tensor, weight: Any, index: Tensor) -> Tensor:
    return F.linear(2 * x_j - weight, self.lin.weight[:, :WIDTH]).sigmoid()


def of_both(self: Any, x_i: Tensor, x_j: Tensor, weight: Any, index: Tensor) -> Tensor:
    return self.lin(torch.cat([weight + x_i, (x_i > x_j) * weight], dim=-1))


@pytest.mark.parametrize("is_wide", [True, False])
@pytest.mark.parametrize("message", [of_a_concatenation, of_a_sum, of_both])
def test_linear_maps_of_values_of_several_dtypes(message: Any, is_wide: bool) -> None:
    """Sums and concatenations take the widest dtype, which their parts must have, too."""
    torch.manual_seed(0)
    layer, x = Own(message).double(), torch.randn(ROWS, WIDTH)
    weight = torch.randn(GRAPH.shape[1], WIDTH).double()
    if not is_wide:
        x, weight = x.double(), weight.float()
    leaves = [x.requires_grad_(), weight.requires_grad_(), *layer.lin.parameters()]

    def results() -> list[Tensor]:
        out = layer(x, GRAPH, weight)
        return [out, *torch.autograd.grad(out.sin().sum(), leaves, materialize_grads=True)]

    expected = results()
    with fastgraph.enabled(min_edges=0):
        found = results()
        assert fastgraph.status().row("Own").routed == 1
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype is theirs.dtype
        # In float32 they are sums over up to 250 edges, in another order.
        bound = 1e-11 if theirs.dtype is torch.float64 else 1e-6
        assert (ours - theirs).abs().max() <= bound * theirs.abs().max()


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_checkpoints(use_reentrant: bool, autocast: torch.dtype | None) -> None:
    layers = nn.ModuleList([Scaled(), Scaled("max")])
    x = x64().float().requires_grad_()

    def both(x: Tensor) -> Tensor:
        return layers[1](layers[0](x, EDGES).relu(), EDGES)

    leaves = [x, *layers.parameters()]

    def grads(is_checkpointed: bool) -> list[Tensor]:
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
            out = checkpoint(both, x, use_reentrant=use_reentrant) if is_checkpointed else both(x)
        for leaf in leaves:
            leaf.grad = None
        out.sin().sum().backward()
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    with fastgraph.enabled(min_edges=0):
        expected = grads(is_checkpointed=False)
        found = grads(is_checkpointed=True)
    assert all(map(torch.equal, found, expected))
    row = fastgraph.status().row("Scaled")
    assert (row.routed, dict(row.reasons)) == (6, {})


def test_parameters_that_are_computed() -> None:
    of_weights, of_spectrum, of_moving = Scaled().double(), Scaled().double(), Scaled().double()
    parametrizations.weight_norm(of_weights.lin)
    parametrizations.spectral_norm(of_spectrum.lin)
    parametrizations.spectral_norm(of_moving.lin)
    for layer in (of_weights, of_spectrum.eval()):
        x, leaves = x64().requires_grad_(), list(layer.parameters())
        with parametrize.cached():
            expected = torch.autograd.grad(layer(x, EDGES).sin().sum(), [x, *leaves])
        found = torch.autograd.grad(routed(layer, x).sin().sum(), [x, *leaves])
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs)
    state = copy.deepcopy(of_moving.state_dict())
    of_moving(x64(), EDGES)
    moved = copy.deepcopy(of_moving.state_dict())
    of_moving.load_state_dict(state)
    with fastgraph.enabled(min_edges=0):
        of_moving(x64(), EDGES)
    reasons = fastgraph.status().row("Scaled").reasons
    assert any("it works in place" in reason for reason in reasons)
    for ours, theirs in zip(of_moving.state_dict().values(), moved.values(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_other_parameters_for_one_call() -> None:
    layer, x = Scaled().double(), x64()
    own = {n: (2 * p.detach()).requires_grad_() for n, p in layer.named_parameters()}

    def grads() -> tuple[Tensor, ...]:
        out = torch.func.functional_call(layer, own, (x, EDGES))
        return torch.autograd.grad(out.sin().sum(), list(own.values()))

    expected = grads()
    with fastgraph.enabled(min_edges=0):
        found = grads()
        assert fastgraph.status().row("Scaled").routed == 1
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_transforms_and_quantised_layers_are_left_to_upstream() -> None:
    layer, x = Scaled().double(), x64()
    for transformed in (
        lambda x: torch.func.grad(lambda x: layer(x, EDGES).sin().sum())(x),
        lambda x: torch.func.vmap(lambda s: layer(x * s, EDGES))(torch.arange(3.0).double()),
        lambda x: torch.func.jvp(lambda x: layer(x, EDGES), (x,), (x,)),
    ):
        expected = transformed(x)
        fastgraph.status().reset()
        with fastgraph.enabled(min_edges=0):
            found = transformed(x)
        assert set(fastgraph.status().row("Scaled").reasons) == {"inside a torch.func transform"}
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    quantised = torch.ao.quantization.quantize_dynamic(Scaled(), {nn.Linear})
    assert "ScriptObject" in refused(quantised, x.float(), EDGES)


def test_the_default_dtype_is_seen() -> None:
    layer = with_message(lambda self, x_i, x_j: (x_i > x_j) * 0.5 * x_j)()
    x = x64().float()
    with fastgraph.enabled(min_edges=0):
        assert layer(x, EDGES).dtype is torch.float32
        torch.set_default_dtype(torch.float64)
        try:
            assert layer(x, EDGES).dtype is torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        assert fastgraph.status().row(type(layer).__name__).routed == 2


@pytest.mark.parametrize(
    "setting",
    [
        torch.is_grad_enabled,
        torch.is_autocast_enabled,
        torch.are_deterministic_algorithms_enabled,
        torch.get_float32_matmul_precision,
        lambda: torch.get_autocast_dtype("cpu"),
    ],
)
def test_messages_that_look_at_settings_are_left_to_upstream(setting: Callable[[], Any]) -> None:
    layer = with_message(lambda self, x_i, x_j: 2 * x_j if setting() else 3 * x_j)()
    assert "a setting of torch" in refused(layer, x64().float(), EDGES)


def test_errors_of_upstream_stay_its_errors() -> None:
    x = x64()
    filling = with_message(lambda self, x_i, x_j: x_j.masked_fill(x_i > 0, -1e9))()
    with fastgraph.enabled(min_edges=0):
        with pytest.raises(RuntimeError, match="must have the same dtype"):
            Scaled()(x.bfloat16(), EDGES)
        with pytest.raises(RuntimeError, match="overflow"):
            filling(x.half(), EDGES)
    routed(filling.double(), x)


def test_a_rounding_of_its_own_is_left_to_upstream() -> None:
    layer = with_message(lambda self, x_i, x_j: (x_i * x_j).half().float() + x_j)()
    assert "it rounds values of edges to torch.float16" in refused(layer, x64().float(), EDGES)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_edges_of_types_and_of_matrices(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH)
    kinds = torch.randint(3, (GRAPH.shape[1],))
    mapped = pyg.NNConv(WIDTH, 6, nn.Linear(FEATURES, 6 * WIDTH))
    edge_attr = torch.randn(GRAPH.shape[1], FEATURES)
    for layer, given in ((pyg.FastRGCNConv(WIDTH, 6, 3), kinds), (mapped, edge_attr)):
        wide = given.double() if given.is_floating_point() else given
        exact = copy.deepcopy(layer).double()(x.double(), GRAPH, wide)
        for autocast in (None, dtype):
            own = copy.deepcopy(layer).to(torch.float32 if autocast else dtype)
            narrow = given.to(own.bias.dtype) if given.is_floating_point() else given
            with torch.autocast("cpu", dtype, enabled=autocast is not None):
                upstream = own(x.to(own.bias.dtype), GRAPH, narrow)
                with fastgraph.enabled(min_edges=0):
                    ours = own(x.to(own.bias.dtype), GRAPH, narrow)
            assert ours.dtype is upstream.dtype
            error, allowed = ((t.double() - exact).norm() for t in (ours, upstream))
            assert error <= 2 * allowed + torch.finfo(dtype).eps / 2 * exact.norm()


def test_compiled_code_has_no_program_of_another_state() -> None:
    layer, x = Scaled().double(), x64()
    compiled = torch.compile(layer, backend="eager")
    with fastgraph.enabled(min_edges=0):
        for layer.scale in (0.5, 2.0):
            torch.testing.assert_close(compiled(x, EDGES), layer(x, EDGES))
    assert fastgraph.status().row("Scaled").routed == 2  # those that are not compiled


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8])
def test_features_of_edges_that_are_no_floating_point_numbers(dtype: torch.dtype) -> None:
    """They are joined with others, which converts them, and multiplied by a matrix."""
    torch.manual_seed(0)
    layer = pyg.ResGatedGraphConv(CHANNELS, 5, edge_dim=3)
    x, features = torch.randn(30, CHANNELS), torch.randint(2, (EDGES.shape[1], 3)).to(dtype)
    expected = layer(x, EDGES, features)
    with fastgraph.enabled(min_edges=0):
        torch.testing.assert_close(layer(x, EDGES, features), expected)
