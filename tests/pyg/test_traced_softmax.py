"""Messages with a softmax over neighbours: the same numbers by one program, or a reason."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
import torch_geometric.utils
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric import seed_everything
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.aggr import PowerMeanAggregation, SoftmaxAggregation
from torch_geometric.utils import softmax

import fastgraph
from fastgraph.pyg.softmax import known_softmax
from tests.ab import Arguments, arguments, assert_same
from tests.graphs import Case, all_cases, hub_edges, quantised, random_edges
from tests.outcomes import differences
from tests.pyg.traced_layers import (
    CHANNELS,
    EDGES,
    NODES,
    Scaled,
    refused,
    routed,
    second_derivative,
    traces,
    with_message,
    x64,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::fastgraph.FallbackWarning"),
    pytest.mark.usefixtures("nothing_known"),
]


HEADS = 2


class Attending(MessagePassing):
    """A layer with attention as users write it, whose message is to be given."""

    def __init__(self, aggr: str = "sum", **options: Any) -> None:
        super().__init__(aggr=aggr, node_dim=0, **options)
        self.lin = nn.Linear(CHANNELS, HEADS * CHANNELS)
        self.att = nn.Parameter(torch.randn(1, HEADS, CHANNELS))
        self.mix = nn.Parameter(torch.randn(CHANNELS, CHANNELS))
        self.p = 0.0

    def forward(self, x: Any, edge_index: Tensor, e: Any = None) -> Tensor:
        if isinstance(x, Tensor):
            x = self.lin(x).view(-1, HEADS, CHANNELS)
        else:
            x = tuple(self.lin(part).view(-1, HEADS, CHANNELS) for part in x)
        return self.propagate(edge_index, x=x, e=e)


def attending(function: Any) -> type[Attending]:
    function.__name__ = "message"
    return type("Own", (Attending,), {"message": function})


class Heads(Attending):
    """Scores of heads, of both ends, with dropout: PyG's usual form."""

    def message(
        self, x_i: Tensor, x_j: Tensor, e: Any, index: Tensor, ptr: Any, size_i: Any
    ) -> Tensor:
        alpha = F.leaky_relu((x_i * x_j * self.att).sum(dim=-1), 0.2)
        if e is not None:
            alpha = alpha + e
        alpha = softmax(alpha, index, ptr, size_i)
        alpha = F.dropout(alpha, p=self.p, training=self.training)
        return x_j * alpha.unsqueeze(-1)


def of_channels(
    self: Any, x_i: Tensor, x_j: Tensor, e: Any, index: Tensor, dim_size: Any
) -> Tensor:
    """A score for each channel, which features of edges weigh, too."""
    alpha = torch_geometric.utils.softmax(x_i + x_j, index, num_nodes=dim_size, dim=-3)
    return alpha * (x_j - x_i) if e is None else e.unsqueeze(-1) * (x_j * alpha)


def of_edges(self: Any, x_i: Tensor, x_j: Tensor, e: Any, edge_index_i: Tensor) -> Tensor:
    """One score for each edge, of all heads, by one call of another."""
    alpha = one_softmax((x_i * x_j).sum((1, 2)), edge_index_i)
    return alpha.view(-1, 1, 1) * x_j


def proportional(self: Any, x_i: Tensor, x_j: Tensor, e: Any, index: Tensor) -> Tensor:
    """Multiples and sums of what the same weights weigh."""
    alpha = softmax((x_i * x_j).sum(-1), index).unsqueeze(-1).expand_as(x_j)
    other = alpha.broadcast_to(x_j.shape).view_as(x_i)[:, :, :, None].squeeze(-1)
    out = (alpha * x_j / 4 - (-other * x_i)) * 3 + self.mix[0] * (2 * alpha)
    return out.reshape(-1, HEADS, 2, CHANNELS // 2).sum(-1) * x_j[..., :2]


def of_nothing_else(self: Any, x_i: Tensor, x_j: Tensor, e: Any, index: Tensor) -> Tensor:
    return softmax((x_i * x_j).sum(-1), index)


def of_rows(self: Any, x_i: Tensor, x_j: Tensor, e: Any, index: Tensor) -> Tensor:
    """Equal scores of all neighbours: their mean."""
    return x_j * softmax(x_i, index)


one_softmax = functools.partial(softmax, ptr=None)

MESSAGES: dict[str, type[Attending]] = {
    "heads": Heads,
    **{
        function.__name__: attending(function)
        for function in (of_channels, of_edges, proportional, of_nothing_else, of_rows)
    },
}


def gen(aggr: Any = "softmax", **options: Any) -> nn.Module:
    return pyg.GENConv(CHANNELS, CHANNELS, aggr=aggr, msg_norm=True, norm="layer", **options)


Made = tuple[Callable[[], nn.Module], bool, bool]

# By name: the layer, and whether it takes two kinds of nodes and features of edges.
LAYERS: dict[str, Made] = {
    "AGNNConv": (pyg.AGNNConv, False, False),
    "AGNNConv of fixed beta": (
        lambda: pyg.AGNNConv(requires_grad=False, add_self_loops=False),
        False,
        False,
    ),
    "SuperGATConv": (lambda: pyg.SuperGATConv(CHANNELS, 3, heads=2).eval(), False, False),
    "SuperGATConv SD": (
        lambda: pyg.SuperGATConv(
            CHANNELS, 3, heads=3, concat=False, attention_type="SD", dropout=0.5
        ).eval(),
        False,
        False,
    ),
    "GeneralConv": (lambda: pyg.GeneralConv(CHANNELS, 3, attention=True, heads=2), True, False),
    "GeneralConv with edges": (
        lambda: pyg.GeneralConv(CHANNELS, 3, HEADS, attention=True, directed_msg=False),
        True,
        True,
    ),
    "GeneralConv of products": (
        lambda: pyg.GeneralConv(CHANNELS, 3, attention=True, attention_type="dot_product", heads=2),
        True,
        False,
    ),
    "GENConv": (lambda: pyg.GENConv(CHANNELS, 3), True, False),
    "GENConv of learnt t": (lambda: gen(t=0.5, learn_t=True, learn_msg_scale=True), True, False),
    "GENConv of t": (lambda: gen(t=2), True, False),
    "GENConv of t for each channel": (
        lambda: gen(SoftmaxAggregation(learn=True, channels=CHANNELS)),
        True,
        False,
    ),
    "GENConv powermean": (lambda: gen("powermean", p=3), True, False),
    "GENConv powermean of learnt p": (lambda: gen("powermean", p=1, learn_p=True), True, False),
    "GENConv powermean for each channel": (
        lambda: gen(PowerMeanAggregation(1.5, True, CHANNELS, clamp_max=None)),
        True,
        False,
    ),
    "GENConv of several": (
        lambda: gen(["softmax", SoftmaxAggregation(2.0, True), "powermean", "mean", "std"]),
        True,
        False,
    ),
    "SAGEConv softmax": (lambda: pyg.SAGEConv(CHANNELS, 3, aggr="softmax"), True, False),
    "a user's gate": (lambda: Scaled("softmax"), True, False),
    "a user's gate backwards": (lambda: Scaled("softmax", flow="target_to_source"), False, False),
    **{f"a user's {name}": (cls, True, False) for name, cls in MESSAGES.items()},
    "a user's heads with edges": (Heads, True, True),
    "a user's of_channels with edges": (MESSAGES["of_channels"], True, True),
    "a user's heads backwards": (lambda: Heads(flow="target_to_source"), False, True),
}


def features(case: Case, takes_two: bool) -> Any:
    x = quantised(case.num_src, CHANNELS)
    if case.num_src == case.num_dst:
        return x
    return (x, quantised(case.num_dst, CHANNELS, seed=1)) if takes_two else None


def calls_of(takes_two: bool, takes_edges: bool) -> dict[str, Arguments]:
    """The calls on all graphs but those of which upstream's gradients are wrong, or less exact."""
    found = {}
    for case in all_cases():
        x = features(case, takes_two)
        if x is not None and case.name not in ("int32", "hub"):
            edges = [quantised(case.num_edges, HEADS, seed=2)] if takes_edges else []
            found[case.name] = arguments(x, case.edge_index, *edges)
    return found


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_what_they_are_upstream(name: str) -> None:
    torch.manual_seed(0)
    make, takes_two, takes_edges = LAYERS[name]
    layer, calls = make().double(), calls_of(takes_two, takes_edges)
    assert differences(layer, calls) == {}
    (row,) = fastgraph.status().rows
    assert not row.reasons and row.routed == row.programs == len(calls)


def test_float32_is_as_exact_as_upstream() -> None:
    torch.manual_seed(0)
    call = arguments(torch.randn(NODES, CHANNELS), EDGES)
    assert_same(pyg.AGNNConv(), call)
    assert_same(pyg.SuperGATConv(CHANNELS, 3, heads=2), call, training=False)


def test_super_gat_in_training_has_its_attention_loss() -> None:
    layer, x = pyg.SuperGATConv(CHANNELS, 3, heads=2).double(), x64()

    def losses() -> list[Tensor]:
        seed_everything(3)
        out = layer(x, EDGES)
        loss = layer.get_attention_loss()
        leaves = list(layer.parameters())
        return [out, loss, *torch.autograd.grad(out.square().sum() + loss, leaves)]

    expected = losses()
    with fastgraph.enabled(min_edges=0):
        found = losses()
    row = fastgraph.status().row("SuperGATConv")
    assert (row.programs, dict(row.reasons)) == (1, {})
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def test_rows_of_many_edges() -> None:
    torch.manual_seed(0)
    layer, x = Heads().double(), quantised(40, CHANNELS).requires_grad_()
    edges = hub_edges(40, 12_000)
    leaves = [x, *(p for name, p in layer.named_parameters() if name != "mix")]
    expected = layer(x, edges)
    grads = torch.autograd.grad(expected.sin().sum(), leaves)
    with fastgraph.enabled(min_edges=0):
        found = layer(x, edges)
    # Sums of thousands of weights, in another order.
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(
        torch.autograd.grad(found.sin().sum(), leaves), grads, rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize(
    "make",
    [Heads, MESSAGES["of_channels"], lambda: gen(t=0.5, learn_t=True), lambda: gen("powermean")],
)
def test_second_derivatives(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    layer = make().double()
    x = quantised(NODES + 1, CHANNELS).add(0.25).requires_grad_()  # one without edges

    def loss() -> Tensor:
        return layer(x, EDGES).square().sum()

    expected = second_derivative(loss, x)
    with fastgraph.enabled(min_edges=0):
        found = second_derivative(loss, x)
    assert fastgraph.status().rows[0].programs == 1
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def results(layer: nn.Module, edges: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(NODES, CHANNELS, requires_grad=True)
    out = layer(x, edges)
    leaves = [x, *(p for name, p in layer.named_parameters() if name != "mix")]
    return [out, *torch.autograd.grad(out.sin().sum(), leaves)]


@pytest.mark.parametrize("make", [Heads, lambda: Scaled(SoftmaxAggregation(learn=True))])
def test_bits_for_any_number_of_threads_and_for_int32(
    make: Callable[[], nn.Module], restore_threads: None
) -> None:
    layer, edges = make(), random_edges(NODES, NODES, 3000)
    found = []
    with fastgraph.enabled(min_edges=0):
        for threads, index in ((1, edges), (2, edges), (2, edges.int())):
            torch.set_num_threads(threads)
            found.append(results(layer, index))
    assert fastgraph.status().rows[0].programs == 3
    for others in found[1:]:
        torch.testing.assert_close(others, found[0], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["heads", "of_edges"])
def test_features_and_results_may_be_edited_before_the_backward_pass(name: str) -> None:
    layer = MESSAGES[name]().double()
    layer.lin = nn.Flatten()  # no copy of the features

    def gradients() -> list[Tensor]:
        x = x64(NODES, HEADS * CHANNELS).requires_grad_()
        features = x * 1
        out = layer(features, EDGES)
        features += 1
        out += features.view_as(out)
        out.view(-1)[0] = 3
        return list(torch.autograd.grad(out.square().sum(), x))

    torch.manual_seed(0)
    expected = gradients()
    with fastgraph.enabled(min_edges=0):
        torch.manual_seed(0)
        found = gradients()
    assert fastgraph.status().rows[0].programs == 1
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_dropout_of_weights() -> None:
    layer, x = Heads().double(), x64()
    whole = routed(layer, x)
    layer.p = 0.5
    assert not torch.equal(routed(layer, x), whole)
    assert torch.equal(routed(layer.eval(), x), whole)
    assert traces(layer) == 3


def test_a_name_that_is_bound_to_another_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = Heads().double(), x64()
    first = routed(layer, x)
    monkeypatch.setitem(globals(), "softmax", doubled)
    assert "it takes the number of nodes" in refused(layer, x, EDGES)
    monkeypatch.undo()
    torch.testing.assert_close(routed(layer, x), first)


def doubled(src: Tensor, index: Tensor, ptr: Any, num_nodes: int) -> Tensor:
    return 2 * src * num_nodes


def test_explained() -> None:
    layer = Heads().double()
    routed(layer, x64())
    text = fastgraph.explain(layer)
    assert text.startswith("Heads: edge program, reduced by sum:\n")
    assert "\n  softmax x_j t" in text
    assert "edge program" in str(fastgraph.status())


def test_upstreams_softmax_computes_numbers_meanwhile() -> None:
    """That of other threads, whose code is the same."""
    code, signature = softmax.__code__, inspect.signature(softmax)
    scores, index = x64(8, 3), torch.tensor([0, 2, 2, 1, 0, 0, 2, 1])
    expected = softmax(scores, index, num_nodes=4)
    with known_softmax():
        assert softmax.__code__ is not code
        assert inspect.signature(softmax) == signature
        assert torch.equal(softmax(scores, index, num_nodes=4), expected)
        by_ptr = softmax(scores, ptr=torch.tensor([0, 3, 8]))
    assert softmax.__code__ is code
    assert torch.equal(by_ptr, softmax(scores, ptr=torch.tensor([0, 3, 8])))
    with pytest.raises(KeyError), known_softmax():
        raise KeyError
    assert softmax.__code__ is code
    layer = attending(lambda self, x_i, x_j, index: x_j.missing)()
    with fastgraph.enabled(min_edges=0), pytest.raises(AttributeError):
        layer(torch.randn(NODES, CHANNELS), EDGES)
    assert softmax.__code__ is code


def weights(self: Any, x_i: Tensor, x_j: Tensor, index: Tensor) -> Tensor:
    """Of heads, with a dimension for channels."""
    return softmax((x_i * x_j).sum(-1, keepdim=True), index)


FACTOR = "its softmax over neighbours is no factor of its message"
OTHERS = "it has a softmax over others than the edges of a node"

REFUSED: dict[str, tuple[Callable[..., Tensor], str]] = {
    "a square": (lambda self, x_i, x_j, index: weights(self, x_i, x_j, index) ** 2 * x_j, FACTOR),
    "a product of two": (
        lambda self, x_i, x_j, index: (w := weights(self, x_i, x_j, index)) * (w * x_j),
        FACTOR,
    ),
    "a term": (lambda self, x_i, x_j, index: weights(self, x_i, x_j, index) + x_j, FACTOR),
    "terms of different weights": (
        lambda self, x_i, x_j, index: (
            weights(self, x_i, x_j, index) * x_j + weights(self, x_i, 2 * x_j, index) * x_i
        ),
        FACTOR,
    ),
    "a divisor": (lambda self, x_i, x_j, index: x_j / weights(self, x_i, x_j, index), FACTOR),
    "a function": (
        lambda self, x_i, x_j, index: (weights(self, x_i, x_j, index) * x_j).relu(),
        FACTOR,
    ),
    "a mask": (
        lambda self, x_i, x_j, index: x_j * (weights(self, x_i, x_j, index) > 0.1).to(x_j.dtype),
        FACTOR,
    ),
    "a linear map": (
        lambda self, x_i, x_j, index: (weights(self, x_i, x_j, index) * x_j) @ self.mix,
        FACTOR,
    ),
    "a concatenation": (
        lambda self, x_i, x_j, index: torch.cat([weights(self, x_i, x_j, index) * x_j, x_j], -1),
        FACTOR,
    ),
    "a part": (
        lambda self, x_i, x_j, index: weights(self, x_i, x_j, index)[:, :1] * x_j,
        FACTOR,
    ),
    "a sum of different weights": (
        lambda self, x_i, x_j, index: (softmax(x_i + x_j, index) * x_j).sum(-1),
        "it sums over channels that softmaxes over neighbours weigh differently",
    ),
    "a sum over heads": (
        lambda self, x_i, x_j, index: (weights(self, x_i, x_j, index) * x_j).sum(1),
        "it sums over channels that softmaxes over neighbours weigh differently",
    ),
    "weights of channels for all heads": (
        lambda self, x_i, x_j, index: (
            softmax((x_i * x_j).sum(1, keepdim=True).exp() * x_i[:, :1], index) * x_j
        ),
        "it sums over channels that softmaxes over neighbours weigh differently",
    ),
    "a softmax of a softmax": (
        lambda self, x_i, x_j, index: softmax(weights(self, x_i, x_j, index), index) * x_j,
        "it has a softmax over neighbours of another",
    ),
    "no gradients": (
        lambda self, x_i, x_j, index: weights(self, x_i, x_j, index).detach() * x_j,
        "it stops gradients",
    ),
    "the other end": (
        lambda self, x_i, x_j, edge_index_j: softmax(x_i + x_j, edge_index_j) * x_j,
        OTHERS,
    ),
    "a number of gathered nodes": (
        lambda self, x_i, x_j, index, size_j: softmax(x_i + x_j, index, None, size_j) * x_j,
        OTHERS,
    ),
    "a number": (
        lambda self, x_i, x_j, index: softmax(x_i + x_j, index, None, NODES) * x_j,
        OTHERS,
    ),
    "another dimension": (lambda self, x_i, x_j, index: softmax(x_j, index, dim=1) * x_j, OTHERS),
    "parameters": (
        lambda self, x_i, x_j, index: softmax(self.att[0], index) * x_j,
        "it has a softmax over neighbours of what is no value of edges",
    ),
    "the graph": (
        lambda self, x_i, x_j, index: weights(self, x_i, x_j, index) * x_j * index.view(-1, 1, 1),
        "it takes index, which is of the graph",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_messages_that_are_left_to_upstream(name: str) -> None:
    function, reason = REFUSED[name]
    layer, x = attending(function)().double(), x64()
    try:
        layer(x, EDGES)
    except (IndexError, RuntimeError) as error:  # upstream's own, which is also ours
        with fastgraph.enabled(min_edges=0), pytest.raises(type(error)):
            layer(x, EDGES)
        (found,) = fastgraph.status().rows[0].reasons
    else:
        found = refused(layer, x, EDGES)
    assert reason in found


@pytest.mark.parametrize("aggr", ["mean", "max", "min"])
def test_other_reductions_are_left_to_upstream(aggr: str) -> None:
    reason = "what its softmax over neighbours weighs is not summed"
    assert reason in refused(Heads(aggr).double(), x64(), EDGES)


def test_temperatures_are_looked_up_at_each_call() -> None:
    layer, x = Scaled("softmax").double(), x64()
    first = routed(layer, x)
    layer.aggr_module.t = 3.0
    assert not torch.allclose(first, routed(layer, x))
    layer.aggr_module.t = torch.tensor(2.0, dtype=torch.float64)
    assert refused(layer, x, EDGES) == "SoftmaxAggregation with t that is no number"
    layer.aggr_module = SoftmaxAggregation(learn=True).double()
    second = routed(layer, x)
    torch.testing.assert_close(second, first)
    with torch.no_grad():
        layer.aggr_module.t.mul_(4)
    count = traces(layer)
    assert not torch.allclose(second, routed(layer, x))
    assert traces(layer) == count == 3
    powers = Scaled("powermean").double()
    third = routed(powers, x)
    powers.aggr_module.p = 2
    fourth = routed(powers, x)
    powers.aggr_module.max_value = 0.5
    fifth = routed(powers, x)
    assert not torch.allclose(third, fourth) and not torch.allclose(fourth, fifth)


def test_weighted_aggregations_that_are_left_to_upstream() -> None:
    x = x64()
    semi = Scaled(SoftmaxAggregation(semi_grad=True)).double()
    assert refused(semi, x, EDGES) == "a softmax aggregation with semi-gradients"
    hooked = Scaled("powermean").double()
    hooked.aggr_module.register_forward_hook(lambda *_: None)
    assert refused(hooked, x, EDGES) == "the aggregation is replaced or has hooks"
    reason = "what its softmax over neighbours weighs is not summed"
    assert reason in refused(attending(of_edges)("softmax").double(), x, EDGES)
    for aggr in (SoftmaxAggregation(1.0, True, False, 2), PowerMeanAggregation(1.0, True, 2)):
        layer = with_message(lambda self, x_i, x_j: (x_i * x_j).view(-1, 2, 2))(aggr, node_dim=0)
        with fastgraph.enabled(min_edges=0), pytest.raises(ValueError, match="two-dimensional"):
            layer.double()(x, EDGES)
    bare = Scaled(PowerMeanAggregation(2.0, clamp_min=None, clamp_max=None)).double()
    with fastgraph.enabled(min_edges=0), pytest.raises(RuntimeError, match="must not be None"):
        bare(x, EDGES)
