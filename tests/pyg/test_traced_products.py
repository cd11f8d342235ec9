"""Messages with products of a matrix and values of each edge: MLPs, and maps of differences."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.aggr import MultiAggregation

import fastgraph
from fastgraph.edge_programs.trace import Argument, trace
from fastgraph.plugins.refusal import Refusal
from tests.graphs import Case, all_cases, quantised, random_edges
from tests.pyg.traced_layers import refused, second_derivative

pytestmark = [
    pytest.mark.filterwarnings("ignore::fastgraph.FallbackWarning"),
    pytest.mark.usefixtures("nothing_known"),
]

NODES, CHANNELS = 12, 6
EDGES = random_edges(NODES, NODES, 60)


def mlp(*widths: int) -> nn.Sequential:
    """Linear maps with a bend between each two."""
    layers: list[nn.Module] = []
    for width, following in itertools.pairwise(widths):
        layers += [nn.Linear(width, following), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Own(MessagePassing):
    """A user's layer: products with matrices that are no modules, and a difference."""

    def __init__(self, aggr: str, **options: Any) -> None:
        super().__init__(aggr=aggr, **options)
        self.weight = nn.Parameter(torch.randn(CHANNELS, 5))
        self.lin = nn.Linear(3, 5, bias=False)
        self.alone = nn.Linear(5, 1)
        self.wide = nn.Linear(1, 4)

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, pos=pos)

    def message(self, x_i: Tensor, x_j: Tensor, pos_i: Tensor, pos_j: Tensor) -> Tensor:
        both = torch.tanh(x_i * x_j) @ self.weight + self.lin(pos_j - pos_i)
        return self.wide(torch.sigmoid(self.alone(both)))


class Shared(MessagePassing):
    """A map that two values of an edge go through, whose gradient is a sum."""

    def __init__(self, aggr: str) -> None:
        super().__init__(aggr=aggr)
        self.nn = mlp(CHANNELS, 4, 3)

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.nn(x_i * x_j) - self.nn(x_i + x_j).sin()


C = CHANNELS
LAYERS: dict[str, Callable[[str], nn.Module]] = {
    "EdgeConv": lambda aggr: pyg.EdgeConv(mlp(2 * C, C, 5), aggr=aggr),
    "EdgeConv of three maps": lambda aggr: pyg.EdgeConv(mlp(2 * C, 7, C, 5), aggr=aggr),
    "PointNetConv": lambda aggr: pyg.PointNetConv(mlp(C + 3, C, 5), aggr=aggr),
    "PointNetConv of one map": lambda aggr: pyg.PointNetConv(nn.Linear(C + 3, 5), aggr=aggr),
    "PointGNNConv": lambda aggr: pyg.PointGNNConv(
        mlp(C, C, 3), mlp(C + 3, 5, C), mlp(C, C), aggr=aggr
    ),
    "own": Own,
    "shared": Shared,
}


def call(layer: nn.Module, x: Tensor, pos: Tensor, edges: Tensor) -> Tensor:
    """The result of a layer that takes features, and positions if it names them."""
    takes_places = "pos" in type(layer).forward.__code__.co_varnames
    out: Tensor = layer(x, pos, edges) if takes_places else layer(x, edges)
    return out


def agree(layer: nn.Module, x: Tensor, pos: Tensor, edges: Tensor) -> None:
    """Output, all gradients and one of second order are upstream's, by a program."""
    leaves = [tensor.clone().requires_grad_() for tensor in (x, pos)]
    inputs = [*leaves, *layer.parameters()]

    def results() -> list[Tensor]:
        out = call(layer, *leaves, edges)
        grads = torch.autograd.grad(
            (out * out).sum(), inputs, allow_unused=True, materialize_grads=True
        )
        twice = second_derivative(lambda: call(layer, *leaves, edges).sin().sum(), leaves[0])
        return [out.detach(), *grads, twice]

    expected = results()
    fastgraph.status().reset()
    with fastgraph.enabled(min_edges=0):
        found = results()
    row = fastgraph.status().row(type(layer).__name__)
    assert (row.routed > 0, dict(row.reasons)) == (True, {})
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


def at(case: Case, values: Callable[..., Tensor] = quantised) -> tuple[Tensor, Tensor]:
    nodes = max(case.num_src, case.num_dst)
    return values(nodes, CHANNELS, seed=1), values(nodes, 3, seed=2)


@pytest.mark.parametrize("aggr", ["max", "sum", "mean"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, aggr: str) -> None:
    torch.manual_seed(0)
    layer = LAYERS[name](aggr).double()
    agree(layer, torch.randn(NODES, C).double(), torch.randn(NODES, 3).double(), EDGES)


@pytest.mark.parametrize("aggr", ["max", "sum"])
@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_graphs(case: Case, aggr: str) -> None:
    """Empty rows, hubs and duplicates; ties, as numbers and matrices have few values."""
    torch.manual_seed(0)
    layer = pyg.EdgeConv(mlp(2 * C, C, 5), aggr=aggr).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(quantised(*parameter.shape, seed=3))
    agree(layer, *at(case), case.edge_index.long())


def test_several_aggregations() -> None:
    layer = pyg.EdgeConv(mlp(2 * C, C, 5), aggr=MultiAggregation(["max", "mean", "std"])).double()
    agree(layer, torch.randn(NODES, C).double(), torch.randn(NODES, 3).double(), EDGES)


@pytest.mark.parametrize("nns", [False, True], ids=["maps", "MLPs"])
def test_attention_of_positions(nns: bool) -> None:
    """Scores are a map of what a map of the difference gives."""
    torch.manual_seed(0)
    made = (mlp(3, 5, C), mlp(C, 5, C)) if nns else (None, None)
    layer = pyg.PointTransformerConv(C, C, *made, add_self_loops=False).double()
    agree(layer, torch.randn(NODES, C).double(), torch.randn(NODES, 3).double(), EDGES)


def test_both_flows_and_two_kinds_of_nodes() -> None:
    torch.manual_seed(0)
    layer: nn.Module = Own("max", flow="target_to_source").double()
    agree(layer, torch.randn(NODES, C).double(), torch.randn(NODES, 3).double(), EDGES)
    layer = pyg.EdgeConv(mlp(2 * C, C, 5)).double()
    edges = random_edges(9, 7, 40)
    x = (torch.randn(9, C).double(), torch.randn(7, C).double())
    expected = layer(x, edges)
    with fastgraph.enabled(min_edges=0):
        torch.testing.assert_close(layer(x, edges), expected, rtol=1e-12, atol=1e-12)
    assert fastgraph.status().row("EdgeConv").routed > 0


def text(layer: nn.Module) -> str:
    """The program of a layer that was called."""
    with fastgraph.enabled(min_edges=0):
        call(layer, torch.randn(NODES, C), torch.randn(NODES, 3), EDGES)
    return fastgraph.explain(layer)


def test_the_last_product_of_a_sum_is_one_of_the_sum() -> None:
    for aggr in ("sum", "mean"):
        shown = text(pyg.EdgeConv(mlp(2 * C, C, 5), aggr=aggr))
        assert "product" not in shown
        assert "mapped behind it, output 0: by t(nn.2.weight)" in shown
        assert "mapped behind it, output 1: by unsqueeze(nn.2.bias, 0)" in shown
    assert text(pyg.EdgeConv(mlp(2 * C, C, 5))).count("product_t") == 1
    assert text(pyg.EdgeConv(mlp(2 * C, 7, C, 5), aggr="sum")).count("product_t") == 1
    # What is added to a product besides is no bias.
    assert "product_t" in text(pyg.PointNetConv(nn.Linear(C + 3, 5), aggr="sum"))


def test_a_result_that_is_edited_between_the_passes() -> None:
    """As upstream's, whose aggregation keeps no result of a sum."""
    torch.manual_seed(0)
    layer = pyg.EdgeConv(mlp(2 * C, C, 5), aggr="sum").double()

    def gradient() -> Tensor:
        x = torch.ones(NODES, C, dtype=torch.float64, requires_grad=True)
        out = layer(x, EDGES)
        out.mul_(2)
        return torch.autograd.grad(out.sum(), x)[0]

    expected = gradient()
    with fastgraph.enabled(min_edges=0):
        torch.testing.assert_close(gradient(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.repeats
def test_float32_errs_as_much_as_upstream() -> None:
    torch.manual_seed(0)
    layer = pyg.EdgeConv(mlp(2 * C, 64, 33))
    x, pos = torch.randn(200, C), torch.randn(200, 3)
    edges = random_edges(200, 200, 5000)
    theirs = call(layer, x, pos, edges)
    with fastgraph.enabled(min_edges=0):
        ours = call(layer, x, pos, edges)
    exact = call(layer.double(), x.double(), pos.double(), edges)
    errors = [float((found.double() - exact).abs().max()) for found in (ours, theirs)]
    assert errors[0] <= 2 * errors[1]


def several_rows(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
    return self.lin((x_i * x_j).view(-1, 2, 3)).flatten(1)


def matrix_of_each_edge(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
    return torch.matmul((x_i * x_j).view(-1, 1, C), (x_i + x_j).view(-1, C, 1)).view(-1, 1)


@pytest.mark.parametrize(
    ("function", "reason"),
    [(several_rows, "several values of each edge"), (matrix_of_each_edge, "a matrix of each edge")],
)
def test_what_is_left_to_upstream(function: Any, reason: str) -> None:
    function.__name__ = "message"
    layer = type("Left", (Shared,), {"message": function})("sum")
    layer.lin = nn.Linear(3, 5)
    layer.forward = lambda x, edge_index: layer.propagate(edge_index, x=x)
    assert reason in refused(layer, torch.randn(NODES, C), EDGES)


def test_messages_of_half_types_have_no_products() -> None:
    """Which would have to be rounded as upstream's are."""
    half = torch.bfloat16
    rows = {"x_i": Argument("row", (C,), half), "x_j": Argument("gathered", (C,), half)}
    ends = {"pos_i": Argument("row", (3,), half), "pos_j": Argument("gathered", (3,), half)}
    for layer, arguments, reason in (
        (pyg.EdgeConv(mlp(2 * C, C, 5)), rows, "a product of a matrix with values of each edge"),
        (pyg.PointNetConv(mlp(3, 5)), {"x_j": None, **ends}, "of which two products lose digits"),
    ):
        outcome = trace(layer.to(half).message, arguments)
        assert isinstance(outcome, Refusal)
        assert reason in outcome.reason


class Magnified(MessagePassing):
    """A map of nodes beside a larger multiple of differences, where both have many digits."""

    def __init__(self) -> None:
        super().__init__(aggr="max")
        self.lin = nn.Linear(2 * CHANNELS, 5)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.lin(torch.cat([x_i, 1000 * (x_j - x_i)], dim=-1))


def test_a_larger_multiple_of_a_difference_keeps_its_digits() -> None:
    torch.manual_seed(0)
    layer, x = Magnified(), torch.randn(NODES, CHANNELS) + 10_000
    upstream = layer(x, EDGES)
    with fastgraph.enabled(min_edges=0):
        ours = layer(x, EDGES)
    assert fastgraph.status().row("Magnified").routed == 1
    exact = layer.double()(x.double(), EDGES)
    error, allowed = ((out - exact).abs().max() for out in (ours, upstream))
    assert error <= 4 * allowed


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_which_torch_hides_a_batch_or_a_tangent(name: str) -> None:
    """They give a maximum's gradient to the edges that attain it, whatever products round to."""
    torch.manual_seed(0)
    layer, x, pos = LAYERS[name]("max"), torch.randn(NODES, CHANNELS), torch.randn(NODES, 3)
    x.requires_grad_()
    with fastgraph.enabled(min_edges=0, strict=True):
        out = call(layer, x, pos, EDGES)
        grads = torch.randn(3, *out.shape)

        def gradient(grad: Tensor, **options: Any) -> Tensor:
            return torch.autograd.grad(out, x, grad, retain_graph=True, **options)[0]

        each = torch.stack([gradient(grad) for grad in grads])
        torch.testing.assert_close(gradient(grads, is_grads_batched=True), each)
        torch.testing.assert_close(torch.func.vmap(gradient, in_dims=1)(grads.swapdims(0, 1)), each)
        with forward_ad.dual_level():
            dual = forward_ad.unpack_dual(gradient(forward_ad.make_dual(grads[0], grads[1])))
            torch.testing.assert_close(tuple(dual), (each[0], each[1]))
