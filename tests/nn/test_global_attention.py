"""Global attention beside its equations on dense matrices, and beside the derived gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fastgraph.sparse as fgs
from fastgraph.nn import GlobalAGNN, GlobalGAT, GlobalVA
from fastgraph.sparse import SparseMatrix

NODES = 7
MISSING = float("-inf")


def graph(weighted: bool) -> SparseMatrix:
    """A directed graph with a node without neighbours and one that is nobody's neighbour."""
    torch.manual_seed(0)
    places = (torch.rand(NODES, NODES) < 0.4).index_fill(0, torch.tensor([2]), False)
    indices = places.index_fill(1, torch.tensor([4]), False).nonzero().T
    indices = indices[:, torch.randperm(indices.shape[1])]
    val = torch.ones(indices.shape[1], dtype=torch.float64)
    return fgs.spmatrix(indices, val + torch.rand_like(val) if weighted else val, (NODES, NODES))


def dense(layer: nn.Module, a: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """The scores and the result, with whole matrices."""
    w = layer.weight
    if isinstance(layer, GlobalVA):
        psi = a * (h @ h.T)
    elif isinstance(layer, GlobalAGNN):
        n = h.norm(dim=1)
        product = torch.outer(n, n)
        psi = torch.where(product == 0, 0, a * (h @ h.T) / torch.where(product == 0, 1, product))
    else:
        u = h @ w
        c = (u @ layer.att_row).unsqueeze(1) + (u @ layer.att_col).unsqueeze(0)
        scores = a * nn.functional.leaky_relu(c, layer.negative_slope)
        psi = torch.where(a != 0, scores, MISSING).softmax(1).nan_to_num()  # of an empty row
    return psi, psi @ h @ w


LAYERS = [GlobalVA, GlobalAGNN, GlobalGAT]


@pytest.mark.parametrize("make", LAYERS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("sizes", [(5, 3), (3, 5), (4, 4)])
@pytest.mark.parametrize("with_zeros", [False, True])
def test_the_equation(
    make: type[nn.Module], weighted: bool, sizes: tuple[int, int], with_zeros: bool
) -> None:
    """Values and gradients of all operands, those of the matrix, too."""
    layer, a = make(*sizes).double(), graph(weighted)
    val = a.val.requires_grad_()
    h = torch.randn(NODES, sizes[0], dtype=torch.float64)
    if with_zeros and make is not GlobalGAT:  # the norm has no gradient there, and the cosine is 0
        h[3] = 0
    h.requires_grad_()
    out = layer(a, h)
    _, expected = dense(layer, a.to_dense(), h)
    torch.testing.assert_close(out, expected)
    grad, leaves = torch.randn_like(expected), [val, h, *layer.parameters()]
    torch.testing.assert_close(
        torch.autograd.grad(out, leaves, grad, retain_graph=True),
        torch.autograd.grad(expected, leaves, grad),
    )
    assert torch.equal(out[2], torch.zeros(sizes[1], dtype=torch.float64))


def gradients(layer: nn.Module, a: Tensor, h: Tensor, g: Tensor) -> list[Tensor]:
    """Those of the features and of all parameters, as the paper derives them."""
    w = layer.weight.detach()
    psi, _ = dense(layer, a, h)
    m = g @ w.T
    if isinstance(layer, GlobalVA):
        n = a * (m @ h.T)
        return [(n + n.T) @ h + (a.T * (h @ h.T)) @ m, h.T @ (a.T * (h @ h.T)) @ g]
    if isinstance(layer, GlobalAGNN):
        norm = h.norm(dim=1, keepdim=True)
        unit, n = h / norm, a * (m @ h.T)
        r = (n + n.T) @ unit
        return [psi.T @ m + (r - (r * unit).sum(1, keepdim=True) * unit) / norm, (psi @ h).T @ g]
    u = h @ w
    c = (u @ layer.att_row).unsqueeze(1) + (u @ layer.att_col).unsqueeze(0)
    p = a * (g @ u.T)
    slope = torch.where(c > 0, 1.0, layer.negative_slope)
    dc = psi * (p - (psi * p).sum(1, keepdim=True)) * slope
    du = psi.T @ g + torch.outer(dc.sum(1), layer.att_row) + torch.outer(dc.sum(0), layer.att_col)
    return [du @ w.T, h.T @ du, u.T @ dc.sum(1), u.T @ dc.sum(0)]


@pytest.mark.parametrize("make", LAYERS)
@pytest.mark.parametrize("sizes", [(5, 3), (3, 5)])
def test_the_derived_gradients(make: type[nn.Module], sizes: tuple[int, int]) -> None:
    layer, a = make(*sizes).double(), graph(make is not GlobalGAT)
    h = torch.randn(NODES, sizes[0], dtype=torch.float64, requires_grad=True)
    out = layer(a, h)
    g = torch.randn_like(out)
    ours = torch.autograd.grad(out, [h, *layer.parameters()], g)
    with torch.no_grad():
        expected = gradients(layer, a.to_dense(), h, g)
    torch.testing.assert_close([*ours], expected)


@pytest.mark.parametrize("make", LAYERS)
def test_gradients_of_gradients(make: type[nn.Module]) -> None:
    layer, a = make(3, 2).double(), graph(True)
    h = torch.randn(NODES, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda h: layer(a, h), h)


@pytest.mark.parametrize("make", LAYERS)
def test_parameters_are_drawn_anew(make: type[nn.Module]) -> None:
    torch.manual_seed(1)
    layer = make(3, 2)
    before = [p.clone() for p in layer.parameters()]
    layer.reset_parameters()
    assert all(not torch.equal(p, q) for p, q in zip(before, layer.parameters(), strict=True))
    torch.manual_seed(1)
    again = make(3, 2)
    assert all(map(torch.equal, before, again.parameters()))
    assert repr(layer).endswith("(3, 2)")
