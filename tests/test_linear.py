"""Dense products in huge pages are torch's own in every other respect."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch_geometric.nn import (
    GATConv,
    GATv2Conv,
    GCNConv,
    GraphConv,
    Linear,
    MessagePassing,
    SAGEConv,
    TransformerConv,
)

import fastgraph
from fastgraph.layers import linear as layers_linear
from fastgraph.layers import modules
from fastgraph.layers.linear import add_linear, linear, with_linear_of_first
from fastgraph.machine import memory, native
from fastgraph.pyg import propagate
from tests.ab import arguments, assert_same
from tests.graphs import random_edges


@pytest.fixture(autouse=True)
def _everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (layers_linear, memory):
        monkeypatch.setattr(module, "LARGE", 1)
    monkeypatch.setattr(layers_linear, "_LEAST_OF_ROWS", 1)


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The tensors whose memory was asked to be of huge pages."""
    found: list[Tensor] = []
    library = native.library()

    def prefer_huge_pages(tensor: Tensor) -> None:
        library.prefer_huge_pages(tensor)
        found.append(tensor)

    stand_in = SimpleNamespace(prefer_huge_pages=prefer_huge_pages)
    monkeypatch.setattr(native, "library", lambda: stand_in)
    return found


def _operands(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (11, 5), (7, 5), (7,)
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("learned", ["xwb", "x", "w", "b", "wb", ""])
def test_values_and_gradients_are_torchs(
    dtype: torch.dtype, has_bias: bool, learned: str, advised: list[Tensor]
) -> None:
    def run(function: Any) -> list[Tensor | None]:
        x, weight, bias = _operands(dtype)
        for letter, leaf in zip("xwb", (x, weight, bias), strict=True):
            leaf.requires_grad_(letter in learned)
        out = function(x, weight, bias if has_bias else None)
        if out.requires_grad:
            out.backward(torch.arange(77, dtype=dtype).view(11, 7) / 50)
        return [out.detach(), x.grad, weight.grad, bias.grad]

    ours, theirs = run(linear), run(torch.nn.functional.linear)
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        assert a is None or b is None or torch.equal(a, b)
    assert len(advised) == 1 + (ours[1] is not None)


def test_second_derivatives() -> None:
    x, weight, bias = _operands(torch.float64)
    assert torch.autograd.gradgradcheck(linear, (x, weight, bias))


def test_inputs_that_are_not_contiguous(advised: list[Tensor]) -> None:
    x, weight, bias = (leaf.detach() for leaf in _operands())
    wide = torch.stack([x, x], dim=-1)[..., 0].requires_grad_()
    by_column = weight.t().contiguous().t()
    out = linear(wide, by_column, bias)
    assert advised and torch.equal(out, torch.nn.functional.linear(wide, by_column, bias))
    out.sum().backward()  # an expanded gradient
    torch.testing.assert_close(wide.grad, weight.sum(0).expand(11, 5))


def test_what_is_left_to_torch() -> None:
    x, weight, bias = (leaf.detach() for leaf in _operands())
    assert linear(x.view(1, 11, 5), weight, bias).shape == (1, 11, 7)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight, bias).dtype == torch.bfloat16
    compiled = torch.compile(linear, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, weight, bias), linear(x, weight, bias))
    batched = torch.func.vmap(linear, in_dims=(0, None, None))(x.view(1, 11, 5), weight, bias)
    torch.testing.assert_close(batched[0], linear(x, weight, bias))
    for wrong in (x.double(), torch.ones(11, 4)):
        with pytest.raises(RuntimeError):
            linear(wrong, weight, bias)


@pytest.mark.parametrize(
    "conv",
    [
        GCNConv(5, 6),
        SAGEConv(5, 6, project=True),
        SAGEConv(5, 6, aggr="max", normalize=True),
        GraphConv(5, 6),
        GATConv(5, 3, heads=2, residual=True),
        GATv2Conv(5, 3, heads=2, residual=True),
        TransformerConv(5, 3, heads=2),
    ],
    ids=lambda conv: type(conv).__name__,
)
def test_layers(conv: MessagePassing) -> None:
    """Every product of a layer, unless somebody watches it."""
    x, edges = torch.randn(11, 5), random_edges(11, 11, 40)
    assert_same(conv, arguments(x, edges))
    made: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch, fastgraph.enabled(min_edges=0):
        for room in (modules, propagate, layers_linear):
            patch.setattr(room, "linear", lambda *given: made.append(linear(*given)) or made[-1])
        conv(x, edges)
        products = {m for m in conv.modules() if isinstance(m, Linear)}
        assert len(made) == len(products)
        made.clear()
        for module in products:
            module.register_forward_hook(lambda *_: None)
        conv(x, edges)
        assert not made


@pytest.mark.parametrize("large", [1, 1 << 40])
def test_a_product_added_to_what_is_there(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers_linear, "LARGE", large)
    base, x, weight = (torch.randn(shape).double() for shape in ((11, 7), (11, 5), (7, 5)))
    leaves = [leaf.requires_grad_() for leaf in (base, x, weight)]
    kept = base * 1
    out = add_linear(kept, x, weight)
    assert out.data_ptr() == kept.data_ptr()
    torch.testing.assert_close(out, base + x @ weight.t())
    assert torch.autograd.gradcheck(lambda b, *rest: add_linear(b * 1, *rest), leaves)
    assert torch.autograd.gradgradcheck(lambda b, *rest: add_linear(b * 1, *rest), leaves)


@pytest.mark.parametrize("num_rows", [0, 3, 11])
@pytest.mark.parametrize("learned", ["xwb", "x", "xw", "wb"])
def test_a_product_of_first_rows_shares_the_gradient(num_rows: int, learned: str) -> None:
    x, weight, bias = _operands(torch.float64)
    for letter, leaf in zip("xwb", (x, weight, bias), strict=True):
        leaf.requires_grad_(letter in learned)

    def function(*leaves: Tensor) -> Tensor:
        whole, product = with_linear_of_first(leaves[0], num_rows, *leaves[1:])
        return (whole * 3).sin().sum() + (product**3).sum()

    def expected(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        product = torch.nn.functional.linear(x[:num_rows], weight, bias)
        return (x * 3).sin().sum() + (product**3).sum()

    leaves = x, weight, bias
    given = [leaf for leaf in leaves if leaf.requires_grad]
    ours, theirs = (torch.autograd.grad(f(*leaves), given) for f in (function, expected))
    torch.testing.assert_close(ours, theirs)
    assert torch.autograd.gradgradcheck(function, leaves)
    with torch.no_grad():
        assert with_linear_of_first(x, num_rows, weight, bias)[0] is x


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("reduce", ["mean", "sum", "max"])
@pytest.mark.parametrize("layer", [SAGEConv, GraphConv])
def test_rows_behind_the_last_edge(
    layer: type[MessagePassing],
    reduce: str,
    has_bias: bool,
    flow: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sampler's leaves are not multiplied, forward and backward."""
    conv = layer(12, 7, aggr=reduce, bias=has_bias, flow=flow)
    edges = random_edges(11, 6, 40)  # to the first six of eleven nodes
    edges = edges if flow == "source_to_target" else edges.flip(0)
    assert_same(conv, arguments(torch.randn(11, 12), edges))
    rows: list[int] = []
    multiply = layers_linear._multiply

    def counted(out: Tensor, a: Tensor, *given: Any) -> Tensor:
        rows.append(len(a))
        return multiply(out, a, *given)

    monkeypatch.setattr(layers_linear, "_multiply", counted)
    with fastgraph.enabled(min_edges=0):
        conv(torch.randn(11, 12), edges)
    assert rows == [6, 11]  # and what nodes have of their own


def test_second_derivatives_of_first_rows() -> None:
    x, weight, bias = _operands(torch.float64)

    def product(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        empty = x.new_zeros(4, 5)
        return layers_linear._LinearOfFirst.apply(torch.cat([x, empty]), 11, weight, bias)

    assert torch.autograd.gradcheck(product, (x, weight, bias))
    assert torch.autograd.gradgradcheck(product, (x, weight, bias))


@pytest.mark.parametrize("name", ["linear", "add_linear", "first rows"])
def test_transformed_gradients(name: str) -> None:
    """Those of a batch at once, as for a Jacobian, and their own derivatives forward."""
    leaves = x, weight, bias = _operands(torch.float64)
    out = {
        "linear": lambda: linear(x, weight, bias),
        "add_linear": lambda: add_linear(bias.expand(11, 7) * 1, x, weight),
        "first rows": lambda: layers_linear._LinearOfFirst.apply(x, 4, weight, bias),
    }[name]()
    grads = torch.randn(3, 11, 7, dtype=torch.float64)
    expected = [torch.autograd.grad(out, leaves, grad, retain_graph=True) for grad in grads]
    together = torch.autograd.grad(out, leaves, grads, retain_graph=True, is_grads_batched=True)
    for ours, theirs in zip(together, zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(ours, torch.stack(theirs))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(grads[0], grads[1])
        found = torch.autograd.grad(out, leaves, dual)
        for ours, *theirs in zip(found, *expected[:2], strict=True):
            torch.testing.assert_close(tuple(forward_ad.unpack_dual(ours)), tuple(theirs))


def test_no_row_has_an_edge() -> None:
    conv, edges = SAGEConv(5, 7), torch.empty(2, 0, dtype=torch.long)
    assert_same(conv, arguments(torch.randn(11, 5), edges))
