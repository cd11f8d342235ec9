"""Messages of layers and of users, traced: their programs are equal to themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.nn import functional as F

from fastgraph import ops
from fastgraph.edge_programs.node_counts import NUM_ROWS
from fastgraph.edge_programs.program import Place
from fastgraph.edge_programs.trace import trace
from fastgraph.edge_programs.traced import Argument, Index, Reduction, Traced
from tests.graphs import quantised, random_edges

NUM_IN, NUM_OUT = 40, 30
EDGES = torch.cat([random_edges(NUM_IN, NUM_OUT - 3, 200), random_edges(NUM_IN, 1, 60)], dim=1)
"""Between two kinds of nodes, with duplicates, a row of many edges and rows of none."""


def of(place: Place, *channels: int) -> Argument:
    return Argument(place, channels, torch.float64)


INDEX = Index("row")
X_I, X_J, E = of("row", 8), of("gathered", 8), of("edge", 8)


class Message(NamedTuple):
    """A message that is an edge program.

    Attributes:
        make: the layer whose message it is, or the function.
        arguments: of the message.
        operands: those of the program, by their places.
    """

    make: Callable[[], Any]
    arguments: dict[str, object]
    operands: dict[str, int]


def dot(q_i: Tensor, k_j: Tensor, v_j: Tensor) -> Tensor:
    return ((q_i * k_j).sum(-1, keepdim=True) / 2).sigmoid() * v_j


def masked(x_i: Tensor, x_j: Tensor) -> Tensor:
    gap = (x_i - x_j).clamp(-1, 1)
    return torch.where(x_i > x_j, gap.abs(), 0.5 * gap**2) * (x_j >= 0).to(x_j.dtype)


def all_functions(x_i: Tensor, x_j: Tensor, e: Tensor) -> Tensor:
    a, b = x_i + x_j, x_i * e
    out = F.elu(a) + F.leaky_relu(b, 0.1) + F.silu(a) + F.gelu(b) + F.softplus(a) + F.relu6(b)
    out = out + a.sin() * b.cos() - a.erf().expm1() + (2 + b.square()).log().rsqrt().tanh()
    out = torch.maximum(out, a) - torch.minimum(b, a) + (2 - a) / (3 + b.abs()) + a.sign()
    return (-out).masked_fill(a.eq(b), 0.25) + (a * a + 1).sqrt().reciprocal().log1p()


def of_heads(x_j: Tensor, w: Tensor, a: Tensor, bias: Tensor) -> Tensor:
    """A number of each head, and one of each channel for all heads."""
    return (x_j * w.view(-1, 2, 1) * a).mean(-1).unsqueeze(-1).expand(-1, 2, 4) + bias


def over_heads(x_i: Tensor, x_j: Tensor, w: Tensor) -> Tensor:
    """A mean over heads of what some of them have in common."""
    heads = x_i.sigmoid() * (x_j * w).expand(-1, 4, 2)
    return (heads.view(-1, 4, 1, 2) * w.unsqueeze(1)).mean(1).squeeze(1) + heads.sum(1)


def two(a: int, b: int) -> nn.Module:
    return nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, b))


MESSAGES = {
    "GENConv": Message(
        lambda: pyg.GENConv(8, 8), {"x_j": X_J, "edge_attr": E}, {"gathered": 1, "edge": 1}
    ),
    "GENConv of projected edges": Message(
        lambda: pyg.GENConv(8, 8, edge_dim=3),
        {"x_j": X_J, "edge_attr": of("edge", 3)},
        {"gathered": 1, "edge": 1},
    ),
    "GINEConv": Message(
        lambda: pyg.GINEConv(nn.Linear(8, 8), edge_dim=3),
        {"x_j": X_J, "edge_attr": of("edge", 3)},
        {"gathered": 1, "edge": 1},
    ),
    "ResGatedGraphConv": Message(
        lambda: pyg.ResGatedGraphConv(8, 8),
        {"k_i": X_I, "q_j": X_J, "v_j": X_J, "edge_attr": None},
        {"row": 1, "gathered": 2},
    ),
    "ResGatedGraphConv with edges": Message(
        lambda: pyg.ResGatedGraphConv(8, 8, edge_dim=3),
        {"k_i": X_I, "q_j": X_J, "v_j": X_J, "edge_attr": of("edge", 3)},
        {"row": 1, "gathered": 2, "edge": 3},
    ),
    "FiLMConv": Message(
        lambda: pyg.FiLMConv(8, 8),
        {"x_j": X_J, "beta_i": X_I, "gamma_i": X_I},
        {"row": 2, "gathered": 1},
    ),
    "CGConv": Message(
        lambda: pyg.CGConv(8, 3),
        {"x_i": X_I, "x_j": X_J, "edge_attr": of("edge", 3)},
        {"row": 2, "gathered": 2, "edge": 2},
    ),
    "FAConv": Message(
        lambda: pyg.FAConv(8),
        {
            "x_j": X_J,
            "alpha_j": of("gathered", 1),
            "alpha_i": of("row", 1),
            "edge_weight": of("edge"),
        },
        {"row": 1, "gathered": 2, "edge": 1},
    ),
    "EdgeConv of one linear map": Message(
        lambda: pyg.EdgeConv(nn.Sequential(nn.Linear(16, 5), nn.ReLU())),
        {"x_i": X_I, "x_j": X_J},
        {"row": 1, "gathered": 1},
    ),
    "PDNConv": Message(
        lambda: pyg.PDNConv(8, 8, 3, 4),
        {"x_j": X_J, "edge_weight": of("edge")},
        {"gathered": 1, "edge": 1},
    ),
    "LEConv": Message(
        lambda: pyg.LEConv(8, 8),
        {"a_j": X_J, "b_i": X_I, "edge_weight": of("edge")},
        {"row": 1, "gathered": 1, "edge": 1},
    ),
    "GeneralConv": Message(
        lambda: pyg.GeneralConv(8, 8),
        {"x_i": X_I, "x_j": X_J, "edge_index_i": INDEX, "size_i": NUM_ROWS, "edge_attr": None},
        {"gathered": 1},
    ),
    "PointNetConv of positions": Message(
        lambda: pyg.PointNetConv(),
        {"x_j": None, "pos_i": of("row", 3), "pos_j": of("gathered", 3)},
        {"row": 1, "gathered": 1},
    ),
    "HypergraphConv": Message(
        lambda: pyg.HypergraphConv(8, 8),
        {"x_j": X_J, "norm_i": of("row"), "alpha": None},
        {"row": 1, "gathered": 1},
    ),
    "GATConv after its softmax": Message(
        lambda: pyg.GATConv(8, 4, heads=2),
        {"x_j": of("gathered", 2, 4), "alpha": of("edge", 2)},
        {"gathered": 1, "edge": 1},
    ),
    "a dot product": Message(
        lambda: dot,
        {"q_i": of("row", 2, 4), "k_j": of("gathered", 2, 4), "v_j": of("gathered", 2, 4)},
        {"row": 1, "gathered": 2},
    ),
    "comparisons": Message(lambda: masked, {"x_i": X_I, "x_j": X_J}, {"row": 1, "gathered": 1}),
    "all functions": Message(
        lambda: all_functions,
        {"x_i": X_I, "x_j": X_J, "e": E},
        {"row": 1, "gathered": 1, "edge": 1},
    ),
    "heads": Message(
        lambda: of_heads,
        {
            "x_j": of("gathered", 2, 4),
            "w": of("edge", 2),
            "a": of("parameter", 1, 2, 4),
            "bias": of("parameter", 4),
        },
        {"gathered": 1, "edge": 1, "parameter": 2},
    ),
    "a linear map of nodes through torch": Message(
        lambda: lambda x_i, x_j, w: torch.tanh((x_j @ w).softmax(-1) * x_i.relu()),
        {"x_i": X_I, "x_j": X_J, "w": of("parameter", 8, 8)},
        {"row": 1, "gathered": 1},
    ),
    "norms, extrema and parts of nodes": Message(
        lambda: (
            lambda x_i, x_j: (
                x_i / x_i.norm(dim=-1, keepdim=True) * x_j[:, 2:3] - x_j.amax(-1, keepdim=True)
            )
        ),
        {"x_i": X_I, "x_j": X_J},
        {"row": 1, "gathered": 2},
    ),
    "PNAConv": Message(
        lambda: pyg.PNAConv(8, 4, ["mean"], ["identity"], torch.ones(3)),
        {"x_i": of("row", 1, 8), "x_j": of("gathered", 1, 8), "edge_attr": None},
        {"row": 1, "gathered": 1},
    ),
    "PNAConv of towers with edges": Message(
        lambda: pyg.PNAConv(8, 4, ["mean"], ["identity"], torch.ones(3), edge_dim=3, towers=2),
        {
            "x_i": of("row", 2, 8),
            "x_j": of("gathered", 2, 8),
            "edge_attr": of("edge", 3),
        },
        {"row": 1, "gathered": 1, "edge": 1},
    ),
    "sums over heads": Message(
        lambda: over_heads,
        {"x_i": of("row", 4, 1), "x_j": of("gathered", 1, 2), "w": of("edge", 1, 2)},
        {"row": 1, "gathered": 1, "edge": 1},
    ),
    "GMMConv": Message(
        lambda: pyg.GMMConv(8, 5, dim=3, kernel_size=4),
        {"x_j": of("gathered", 20), "edge_attr": of("edge", 3)},
        {"gathered": 1, "edge": 1, "parameter": 2},
    ),
    "a linear map of heads": Message(
        lambda: lambda x_i, x_j, w: torch.cat([x_i, x_j], -1) @ w,
        {"x_i": of("row", 2, 4), "x_j": of("gathered", 2, 4), "w": of("parameter", 8, 3)},
        {"row": 1, "gathered": 1},
    ),
    "linear maps that are stacked": Message(
        lambda: (
            lambda x_i, x_j, v, w: (
                torch.stack(
                    [torch.cat([torch.cat([x_i, x_j], -1), x_i], -1) @ m for m in (v, w)], 1
                )
                + x_i.view(-1, 1, 4).repeat(1, 2, 1)
            )
        ),
        {
            "x_i": of("row", 4),
            "x_j": of("gathered", 4),
            "v": of("parameter", 12, 4),
            "w": of("parameter", 12, 4),
        },
        {"row": 2, "gathered": 1},
    ),
    "parts of concatenated heads": Message(
        lambda: (
            lambda x_i, x_j, w: (
                torch.cat([x_i, torch.cat([x_j, x_i], -1)], -1)[:, 1] @ w + x_j.select(1, -1)
            )
        ),
        {"x_i": of("row", 2, 4), "x_j": of("gathered", 2, 4), "w": of("parameter", 12, 4)},
        {"row": 1, "gathered": 2},
    ),
    "two linear maps without a bend": Message(
        lambda: pyg.EdgeConv(nn.Sequential(nn.Linear(16, 6), nn.Linear(6, 5, bias=False))),
        {"x_i": X_I, "x_j": X_J},
        {"row": 1, "gathered": 1},
    ),
}


def aggregated(message: Tensor, reduction: str) -> Tensor:
    flat = message.reshape(message.shape[0], -1)
    out = flat.new_zeros(NUM_OUT, flat.shape[1])
    if reduction == "sum":
        return out.index_add(0, EDGES[1], flat)
    index = EDGES[1].unsqueeze(-1).expand_as(flat)
    return out.scatter_reduce(0, index, flat, f"a{reduction}", include_self=False)


@pytest.mark.parametrize("name", MESSAGES)
@pytest.mark.parametrize("reduction", ["sum", "max"])
def test_a_traced_message_is_the_message(name: str, reduction: str) -> None:
    torch.manual_seed(0)
    made, arguments, places = MESSAGES[name]
    layer = made()
    is_layer = isinstance(layer, nn.Module)
    message = layer.double().message if is_layer else layer
    traced = trace(message, arguments, [Reduction(reduction)])
    assert isinstance(traced, Traced), traced
    found = [operand.place for operand in traced.program.operands]
    assert {place: found.count(place) for place in found} == places

    rows = {"row": NUM_OUT, "gathered": NUM_IN, "edge": EDGES.shape[1]}
    own = {
        key: quantised(*([rows[a.place]] if a.place in rows else []), *a.channels, seed=k)
        for k, (key, a) in enumerate(arguments.items())
        if isinstance(a, Argument)
    }
    own = {key: tensor.requires_grad_() for key, tensor in own.items()}
    state = dict(layer.named_parameters()) if is_layer else {}
    ends = {"gathered": EDGES[0], "row": EDGES[1]}
    given = dict(arguments) | {
        key: tensor[ends[a.place]] if (a := arguments[key]).place in ends else tensor
        for key, tensor in own.items()
    }
    theirs = aggregated(message(**given), reduction)
    operands = traced.operands(own | state)
    ours, *left = ops.edge_program(traced.program, operands, EDGES, num_in=NUM_IN, num_out=NUM_OUT)
    assert len(left) == len(traced.kept)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    leaves = [*own.values(), *state.values()]
    grad = quantised(*theirs.shape, seed=99)
    grads = [
        torch.autograd.grad(out, leaves, grad, allow_unused=True, materialize_grads=True)
        for out in (ours, theirs)
    ]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_tracing_restores_the_layer_and_draws_nothing() -> None:
    layer = pyg.FAConv(8)
    arguments = {
        name: Argument(a.place, a.channels)
        for name, a in MESSAGES["FAConv"].arguments.items()
        if isinstance(a, Argument)
    }
    attributes, parameters = dict(layer.__dict__), dict(layer.named_parameters())
    torch.manual_seed(3)
    traced = trace(layer.message, arguments)
    assert isinstance(traced, Traced)
    assert [(str(kept), kept.channels) for kept in traced.kept] == [("_alpha", ())]
    assert layer._alpha is None
    assert layer.__dict__.keys() == attributes.keys()
    assert all(layer.__dict__[key] is value for key, value in attributes.items())
    assert all(layer.get_parameter(key) is p for key, p in parameters.items())
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(1))


def test_what_evaluation_switches_off_is_no_obstacle() -> None:
    layer = pyg.FAConv(8, dropout=0.5).double().eval()
    assert isinstance(trace(layer.message, MESSAGES["FAConv"].arguments), Traced)


def test_equal_messages_are_one_program() -> None:
    first, second = (
        trace(pyg.CGConv(8, 3).double().message, MESSAGES["CGConv"].arguments) for _ in range(2)
    )
    assert first == second
