"""Reductions beside those of torch, and the groups that compute them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fastgraph.sparse as fgs
from fastgraph.sparse import SparseMatrix
from fastgraph.sparse.groups import REDUCTIONS, Groups
from tests.sparse.matrices import MATRICES, matrix

OF_TORCH = {"sum": "sum", "smin": "amin", "smax": "amax", "smean": "mean", "sprod": "prod"}


def upstream(a: SparseMatrix, val: Tensor, dim: int | None, rtype: str) -> Tensor:
    """``dgl.sparse`` calls these functions of torch."""
    if dim is None:
        out: Tensor = getattr(val, OF_TORCH[rtype])(0)
        return out
    index = (a.row if dim == 1 else a.col).long().view(-1, *[1] * (val.dim() - 1)).expand_as(val)
    zeros = val.new_zeros(a.shape[1 - dim], *val.shape[1:])
    return zeros.scatter_reduce(0, index, val, OF_TORCH[rtype], include_self=False)


@pytest.mark.parametrize(("name", "form"), MATRICES)
@pytest.mark.parametrize("rtype", REDUCTIONS)
@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize("heads", [None, 3, 0])
def test_values_and_gradients(
    name: str, form: str, rtype: str, dim: int | None, heads: int | None
) -> None:
    a = matrix(name, form, heads, requires_grad=True)
    val = a.val.detach().clone().requires_grad_()
    if a.nnz == 0 and dim is None and rtype in ("smax", "smin"):
        with pytest.raises(IndexError):
            a.reduce(dim, rtype)
        return
    out, expected = a.reduce(dim, rtype), upstream(a, val, dim, rtype)
    torch.testing.assert_close(out, expected, equal_nan=True)
    assert torch.equal(getattr(fgs, rtype)(a, dim), out) or out.isnan().all()
    grad = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(out, a.val, grad), torch.autograd.grad(expected, val, grad)
    )


@pytest.mark.parametrize("rtype", ["smax", "smin", "sprod"])
@pytest.mark.parametrize("dim", [0, 1, None])
def test_ties_zeros_and_nans_as_upstream(rtype: str, dim: int | None) -> None:
    """The zero of an empty row shares in an extremum of 0, as in ``scatter_reduce``."""
    a = matrix("square")
    val = torch.tensor([0.0, 1.0, -1.0, 1.0, 0.0] * 4, dtype=torch.float64)
    for values in (val, -val, val.abs(), val.clone().index_fill_(0, torch.tensor([3]), torch.nan)):
        ours, theirs = values.clone().requires_grad_(), values.clone().requires_grad_()
        out = fgs.val_like(a, ours).reduce(dim, rtype)
        expected = upstream(a, theirs, dim, rtype)
        torch.testing.assert_close(out, expected, equal_nan=True)
        grad = torch.randn_like(expected)
        first, second = (
            torch.autograd.grad(o, v, grad)[0] for o, v in ((out, ours), (expected, theirs))
        )
        if rtype == "sprod":  # where torch divides by a NaN, here it is left out of the product
            first = torch.where(values.isnan() & second.isnan(), torch.nan, first)
        torch.testing.assert_close(first, second, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rtype", REDUCTIONS)
@pytest.mark.parametrize("dim", [0, 1, None])
def test_dtypes(dtype: torch.dtype, rtype: str, dim: int | None) -> None:
    a = matrix("square", dtype=torch.float64)
    val = (a.val * 3).round().to(dtype)
    a = fgs.val_like(a, val)
    if val.is_floating_point():
        expected = upstream(a, val.double(), dim, rtype).to(dtype)
        torch.testing.assert_close(a.reduce(dim, rtype), expected)
    elif rtype == "smean" and dim is None:
        with pytest.raises(RuntimeError):  # as in torch
            a.reduce(dim, rtype)
    else:
        assert torch.equal(a.reduce(dim, rtype), upstream(a, val, dim, rtype))
        assert a.reduce(dim, rtype).dtype == upstream(a, val, dim, rtype).dtype


@pytest.mark.parametrize("rtype", REDUCTIONS)
@pytest.mark.parametrize("dim", [0, 1, None])
def test_gradients_of_gradients(rtype: str, dim: int | None) -> None:
    a = matrix("tall", heads=2, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda val: fgs.val_like(a, val).reduce(dim, rtype), a.val)


def test_products_of_rows_with_several_zeros_have_gradients_of_any_order() -> None:
    """Torch has none for ``scatter_reduce`` then."""
    val = torch.tensor([0.0, 2.0, 0.0, 3.0, 0.0], dtype=torch.float64, requires_grad=True)
    a = fgs.from_coo(torch.tensor([0, 0, 0, 1, 1]), torch.arange(5), val)
    assert a.sprod(1).tolist() == [0, 0]
    assert torch.autograd.gradgradcheck(lambda val: fgs.val_like(a, val).sprod(1), val)


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, 8, 9, 100])
def test_products_of_groups_of_any_size(rows: int) -> None:
    index = torch.cat([torch.full((rows,), 2), torch.tensor([0, 4, 4])])
    index = index[torch.randperm(len(index))]
    x = torch.randn(len(index), 2, dtype=torch.float64)
    expected = torch.stack(
        [x[index == g].prod(0) if (index == g).any() else x.new_zeros(2) for g in range(6)]
    )
    torch.testing.assert_close(Groups(index, 6).reduce(x, "sprod"), expected)


def test_a_gather_and_a_sum_are_each_others_gradients() -> None:
    groups = Groups(torch.tensor([3, 0, 3, 1]), 5)
    x = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.equal(groups.gather(x), x[groups.index])
    assert torch.autograd.gradgradcheck(lambda x: groups.gather(x).pow(3), x)
    y = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda y: groups.sum(y).pow(3), y)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [((2, "sum"), ValueError, "dim must be 0, 1 or None"),
     ((-1, "sum"), ValueError, "dim must be 0, 1 or None"),
     ((0, "max"), RuntimeError, "rtype must be one of"),
     ((None, "max"), RuntimeError, "rtype must be one of")],
)  # fmt: skip
def test_errors(arguments: tuple[int | None, str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        matrix("square").reduce(*arguments)
