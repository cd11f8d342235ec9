"""Messages that reduce, normalise, cut and join channels of each edge, or work in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import FeaStConv, MessagePassing, PPFConv

import fastgraph
from tests.graphs import Case, quantised, random_edges, square_cases
from tests.pyg.traced_layers import refused, with_message, x64

NODES, C = 12, 6
EDGES = random_edges(NODES, NODES, 60)
EDGES = EDGES[:, EDGES[0] != EDGES[1]]  # whose differences are not zero


class Layer(MessagePassing):
    """A layer of any message, with what a message may need."""

    def __init__(self, function: Callable[..., Tensor], aggr: str = "sum") -> None:
        super().__init__(aggr=aggr, node_dim=0)
        self.function = function
        self.lin = nn.Linear(2 * C, 2 * C)
        self.norm = nn.LayerNorm(C)
        self.batch = nn.BatchNorm1d(C)
        self.prelu = nn.PReLU(C)
        self.mlp = nn.Sequential(
            nn.Linear(2 * C, C), nn.LayerNorm(C), nn.ReLU(inplace=True), nn.Linear(C, C), nn.PReLU()
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.function(self, x_i, x_j)


def heads(x: Tensor) -> Tensor:
    return x.view(-1, 2, C // 2)


def halves(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
    gate, value = self.lin(torch.cat([x_i, x_j], -1)).chunk(2, dim=-1)
    return torch.sigmoid(gate) * value


def pieces(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
    a, b, c = (x_i * x_j).split([1, 2, 3], dim=1)
    return torch.cat([a * b, c.narrow(1, 1, 2), b[:, 1:] + c[:, :1]], -1)


def unbound(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
    first, second = heads(x_i - x_j).sin().unbind(1)
    return torch.stack([first, first * second, second], 2)


def edited(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
    h = x_i + x_j
    h += x_i
    h.mul_(0.5).clamp_(-1, 1)
    x_j *= 2
    return F.leaky_relu_(h * x_j, 0.1)


def edited_view(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
    h = x_i * x_j
    heads(h).relu_()
    return h + x_i


def corner(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
    a, b = heads(x_i), heads(x_j)
    return torch.cross(a, a - b, dim=2).norm(dim=-1)


MESSAGES: dict[str, Callable[..., Tensor]] = {
    "softmax": lambda self, x_i, x_j: (x_i - x_j).softmax(-1) * x_j,
    "softmax of heads": lambda self, x_i, x_j: heads(x_i * x_j).softmax(-1).flatten(1),
    "log_softmax": lambda self, x_i, x_j: F.log_softmax(x_i + x_j.sin(), dim=1),
    "logsumexp": lambda self, x_i, x_j: torch.logsumexp(x_i * x_j, -1, keepdim=True) * x_i,
    "amax": lambda self, x_i, x_j: (x_i - x_j).amax(-1, keepdim=True) * x_j,
    "amin of heads": lambda self, x_i, x_j: heads(x_i + x_j).amin(-1),
    "max": lambda self, x_i, x_j: (x_i - x_j).max(dim=-1, keepdim=True).values * x_i,
    "min": lambda self, x_i, x_j: x_i * (x_i * x_j).min(dim=1)[0].unsqueeze(-1),
    "maximum": lambda self, x_i, x_j: torch.max(x_i, x_j) - torch.min(x_i, 2 * x_j),
    "mean": lambda self, x_i, x_j: (x_i * x_j).mean(-1, keepdim=True) + x_j * x_i,
    "norm": lambda self, x_i, x_j: x_j * (x_i - x_j).norm(dim=-1, keepdim=True),
    "norms": lambda self, x_i, x_j: (
        x_j * ((x_i - x_j).norm(1, -1, True) + (x_i - x_j).norm(float("inf"), -1, True))
    ),
    "normalize": lambda self, x_i, x_j: F.normalize(x_i - x_j, dim=-1),
    "distance": lambda self, x_i, x_j: F.pairwise_distance(x_i, x_j).unsqueeze(-1) * x_j,
    "cosine": lambda self, x_i, x_j: F.cosine_similarity(x_i, x_j, -1).unsqueeze(-1) * x_j,
    "var": lambda self, x_i, x_j: (x_i * x_j).var(-1, keepdim=True) * x_j,
    "std": lambda self, x_i, x_j: (x_i * x_j).std(-1, keepdim=True) * x_j,
    "layer norm": lambda self, x_i, x_j: self.norm(x_i + x_j * x_i),
    "rms norm": lambda self, x_i, x_j: F.rms_norm(x_i - x_j, (C,), self.norm.weight, 1e-3),
    "group norm": lambda self, x_i, x_j: F.group_norm(x_i - x_j * x_i, 2, self.norm.bias),
    "prelu": lambda self, x_i, x_j: self.prelu(x_i - x_j),
    "prelu of heads": lambda self, x_i, x_j: F.prelu(heads(x_i - x_j), self.prelu.weight[:2]).sum(
        1
    ),
    "glu": lambda self, x_i, x_j: F.glu(x_i - x_j, -1),
    "cross": lambda self, x_i, x_j: torch.cross(heads(x_i), heads(x_j), dim=-1).flatten(1),
    "corner": corner,
    "atan2": lambda self, x_i, x_j: torch.atan2(x_i * x_j + 1.5, x_j + 2),
    "halves": halves,
    "pieces": pieces,
    "unbound": unbound,
    "a concatenation": lambda self, x_i, x_j: torch.cat([x_i, x_j, x_i * x_j], -1),
    "concatenated heads": lambda self, x_i, x_j: torch.cat([heads(x_i), heads(x_j).exp()], 1),
    "stacked products": lambda self, x_i, x_j: torch.stack([x_i * x_j, x_i - x_j], 1),
    "one channel": lambda self, x_i, x_j: (x_i * x_j)[..., 3:4] * x_j,
    "a channel of heads": lambda self, x_i, x_j: heads(x_i * x_j)[:, :, -1],
    "an mlp": lambda self, x_i, x_j: self.mlp(torch.cat([x_i, x_j - x_i], -1)),
    "edited": edited,
    "an edited view": edited_view,
}


def results(layer: Any, x: Tensor, edges: Tensor) -> list[Tensor]:
    """The output, all gradients, and one of second order."""
    leaf = x.clone().requires_grad_()
    out = layer(leaf, edges)
    inputs = [leaf, *layer.parameters()]
    options: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
    grads = torch.autograd.grad((out * out + out).sum(), inputs, create_graph=True, **options)
    twice = torch.autograd.grad((grads[0] * x.cos()).sum(), leaf, **options)
    return [out.detach(), *(grad.detach() for grad in grads), *twice]


def agree(layer: Any, x: Tensor, edges: Tensor, *, has_second: bool = True) -> None:
    """Outputs and gradients are upstream's, of second order where upstream's are numbers."""
    expected = results(layer, x, edges.long())  # whose gradients are wrong for int32
    fastgraph.status().reset()
    with fastgraph.enabled(min_edges=0):
        found = results(layer, x, edges)
    row = fastgraph.status().row(type(layer).__name__)
    assert (row.routed, dict(row.reasons)) == (1, {})
    # Upstream has NaN for the second derivative of the norm of zeros; ours is finite there.
    found[-1] = found[-1].where(expected[-1].isfinite(), expected[-1])
    for ours, theirs in list(zip(found, expected, strict=True))[: len(found) - (not has_second)]:
        finite = theirs[theirs.isfinite()].abs()
        atol = 1e-11 * max(1.0, float(finite.max()) if finite.numel() else 0.0)
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=atol, equal_nan=True)


@pytest.mark.parametrize("aggr", ["sum", "max"])
@pytest.mark.parametrize("name", MESSAGES)
def test_messages(name: str, aggr: str) -> None:
    torch.manual_seed(0)
    layer = Layer(MESSAGES[name], aggr).double()
    agree(layer, torch.randn(NODES, C).double(), EDGES)


@pytest.mark.parametrize("case", square_cases(), ids=str)
@pytest.mark.parametrize("name", ["softmax", "amax", "max", "norm", "std", "prelu", "pieces"])
def test_graphs_and_ties(name: str, case: Case) -> None:
    torch.manual_seed(0)
    layer = Layer(MESSAGES[name]).double()
    # At 0 torch's second derivative of PReLU is not that of its first one.
    has_second = name != "prelu"
    agree(layer, quantised(case.num_src, C, seed=1), case.edge_index, has_second=has_second)


@pytest.mark.parametrize("mean", [False, True])
def test_fea_st_conv(mean: bool) -> None:
    torch.manual_seed(0)
    agree(FeaStConv(C, 4, heads=3, bias=mean).double(), x64(NODES, C), EDGES)


@pytest.mark.parametrize("aggr", ["max", "sum"])
def test_ppf_conv(aggr: str) -> None:
    torch.manual_seed(0)
    conv = PPFConv(nn.Sequential(nn.Linear(C + 4, 8), nn.ReLU(), nn.Linear(8, 5))).double()
    conv.aggr, conv.aggr_module = aggr, type(Layer(MESSAGES["mean"], aggr).aggr_module)()
    x, places, normals = (x64(NODES, n).requires_grad_() for n in (C, 3, 3))
    normals = F.normalize(normals)
    inputs = [x, places, *conv.parameters()]

    def outcome() -> list[Tensor]:
        out = conv(x, places, normals, EDGES)
        return [out, *torch.autograd.grad(out.square().sum(), inputs, retain_graph=True)]

    expected = outcome()
    with fastgraph.enabled(min_edges=0):
        found = outcome()
    assert fastgraph.status().row("PPFConv").routed == 1
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.repeats
@pytest.mark.parametrize("name", ["softmax", "layer norm", "corner", "max", "an mlp"])
def test_float32_errs_as_much_as_upstream(name: str) -> None:
    torch.manual_seed(0)
    layer = Layer(MESSAGES[name])
    x, edges = torch.randn(200, C), random_edges(200, 200, 3000)
    edges = edges[:, edges[0] != edges[1]]
    theirs = results(layer, x, edges)[:-1]
    with fastgraph.enabled(min_edges=0):
        ours = results(layer, x, edges)[:-1]
    exact = results(layer.double(), x.double(), edges)[:-1]
    for found, upstream, truth in zip(ours, theirs, exact, strict=True):
        own, other = ((t.double() - truth).abs().max() for t in (found, upstream))
        assert own <= 2 * other + 1e-6 * truth.abs().max()


@pytest.mark.repeats
@pytest.mark.parametrize("name", ["softmax", "max", "pieces", "layer norm"])
def test_bits_for_any_number_of_threads(name: str) -> None:
    layer, x = Layer(MESSAGES[name], "max"), torch.randn(500, C)
    edges, found = random_edges(500, 500, 20_000), []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            with fastgraph.enabled(min_edges=0):
                found.append(results(layer, x, edges))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_batch_norm_in_evaluation() -> None:
    torch.manual_seed(0)
    layer = Layer(lambda self, x_i, x_j: self.batch(x_i * x_j)).double()
    layer(torch.randn(NODES, C).double(), EDGES)
    agree(layer.eval(), x64(NODES, C), EDGES)


def _edits_edges(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
    self.weight.mul_(1)
    return x_i * x_j


def _edits_what_is_needed(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
    h = (x_i * x_j).exp()
    g = h * 2
    h.relu_()
    return g + h


REFUSED: dict[str, tuple[Callable[..., Tensor], str]] = {
    "all edges": (lambda self, x_i, x_j: (x_i * x_j).softmax(0), "across edges"),
    "some edges": (lambda self, x_i, x_j: (x_i * x_j).split(51, 0)[0], "across edges"),
    "an exponent": (lambda self, x_i, x_j: (x_i - x_j).norm(3, -1, True) * x_i, "exponent 3"),
    "places": (lambda self, x_i, x_j: x_i * (x_i - x_j).max(-1)[1].view(-1, 1), "places"),
    "strides": (lambda self, x_i, x_j: (x_i * x_j)[:, ::2], "no neighbours"),
    "heads": (lambda self, x_i, x_j: (x_i * x_j).view(-1, 2, 2).amax(1), "between other"),
    "an edited parameter": (_edits_edges, "changes"),
}


@pytest.mark.filterwarnings("ignore::fastgraph.FallbackWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_left_to_upstream(name: str) -> None:
    function, reason = REFUSED[name]
    layer = with_message(function)()
    with torch.no_grad():
        assert reason in refused(layer, torch.randn(12, 4), EDGES)


def test_an_edit_of_what_a_gradient_needs_is_upstreams_error() -> None:
    layer, x = Layer(_edits_what_is_needed).double(), x64(NODES, C).requires_grad_()
    for min_edges in (1000, 0):  # upstream, ours
        with fastgraph.enabled(min_edges=min_edges), pytest.raises(RuntimeError, match="inplace"):
            layer(x, EDGES).sum().backward()
