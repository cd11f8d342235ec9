"""Sums, products and quotients of matrices, with numbers, vectors and each other."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fastgraph.sparse as fgs
from fastgraph.sparse import SparseMatrix
from tests.sparse.matrices import MATRICES, dense, matrix, pattern, places

FORMS = ("coo", "int32", "csr", "csc", "transposed", "diag")
SHAPE = (5, 7)


def of_form(form: str, heads: int | None, nnz: int, seed: int, distinct: bool) -> SparseMatrix:
    generator = torch.Generator().manual_seed(seed)
    nnz = min(SHAPE) if form == "diag" else nnz
    size = (nnz,) if heads is None else (nnz, heads)
    val = torch.randn(size, dtype=torch.float64, generator=generator).requires_grad_()
    if form == "diag":
        return fgs.diag(val, SHAPE)
    where = places(SHAPE, nnz, distinct=distinct, seed=seed)
    return SparseMatrix(pattern(form, SHAPE, where), val)


def check(
    ours: Callable[..., SparseMatrix],
    theirs: Callable[..., Tensor],
    a: SparseMatrix,
    b: SparseMatrix,
) -> SparseMatrix:
    out = ours(a, b)
    dense_a, dense_b = (dense(m.pattern, m.val) for m in (a, b))
    expected = theirs(dense_a, dense_b)
    torch.testing.assert_close(out.to_dense(), expected)
    weights = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad((out.to_dense() * weights).sum(), [a.val, b.val]),
        torch.autograd.grad((expected * weights).sum(), [a.val, b.val]),
    )
    return out


@pytest.mark.parametrize("first", FORMS)
@pytest.mark.parametrize("second", FORMS)
@pytest.mark.parametrize("heads", [None, 3])
@pytest.mark.parametrize(("nnz1", "nnz2"), [(20, 11), (0, 11), (11, 0), (0, 0)])
def test_sums(first: str, second: str, heads: int | None, nnz1: int, nnz2: int) -> None:
    """Of matrices with duplicates."""
    a = of_form(first, heads, nnz1, 1, False)
    b = of_form(second, heads, nnz2, 2, False)
    out = check(fgs.add, operator.add, a, b)
    assert not out.has_duplicate()
    check(fgs.sub, operator.sub, a, b)
    if first != "diag" or second != "diag":
        assert torch.equal(out.pattern.ascending[0], out.pattern.places)


@pytest.mark.parametrize("first", FORMS)
@pytest.mark.parametrize("second", FORMS)
@pytest.mark.parametrize("heads", [None, 3])
@pytest.mark.parametrize(("nnz1", "nnz2"), [(20, 11), (0, 11), (11, 0), (0, 0)])
def test_products(first: str, second: str, heads: int | None, nnz1: int, nnz2: int) -> None:
    a = of_form(first, heads, nnz1, 1, True)
    b = of_form(second, heads, nnz2, 2, True)
    check(fgs.mul, operator.mul, a, b)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("heads", [None, 3])
@pytest.mark.parametrize("nnz", [20, 1, 0])
def test_quotients(form: str, heads: int | None, nnz: int) -> None:
    a = of_form(form, heads, nnz, 1, True)
    order = torch.randperm(a.nnz)
    val = a.val.detach()[order].requires_grad_()
    b = fgs.spmatrix(a.indices()[:, order], val + 3, a.shape)
    out = fgs.div(a, b)
    assert out.pattern is a.pattern
    back = torch.argsort(order)
    torch.testing.assert_close(out.val, a.val / b.val[back])
    torch.testing.assert_close(
        torch.autograd.grad(out.val.sum(), [a.val, val], retain_graph=True),
        torch.autograd.grad((a.val / b.val[back]).sum(), [a.val, val]),
    )


def test_a_matrix_and_itself() -> None:
    a = matrix("distinct")
    for op in (operator.add, operator.sub, operator.mul):
        torch.testing.assert_close(op(a, a).to_dense(), op(a.to_dense(), a.to_dense()))
    assert torch.equal((a / a).val, torch.ones(a.nnz, dtype=torch.float64))
    doubled = matrix("square")  # has duplicates
    torch.testing.assert_close((doubled + doubled).to_dense(), 2 * doubled.to_dense())
    assert not (doubled + doubled).has_duplicate()


@pytest.mark.parametrize("scalar", [2, 2.5, torch.tensor(2), torch.tensor(2.5)])
def test_numbers(scalar: float | Tensor) -> None:
    a = matrix("square", heads=2)
    a = fgs.val_like(a, a.val.abs() * 10)
    for out, expected in (
        (a * scalar, a.val * scalar),
        (scalar * a, a.val * scalar),
        (fgs.mul(scalar, a), a.val * scalar),
        (a / scalar, a.val / scalar),
        (fgs.div(a, scalar), a.val / scalar),
        (a.long() ** scalar, a.val.long() ** scalar),
        (fgs.power(a.long(), scalar), a.val.long() ** scalar),
        (-a, -a.val),
        (fgs.neg(a), -a.val),
    ):
        assert out.pattern is a.pattern and torch.equal(out.val, expected)


@pytest.mark.parametrize("op", ["__add__", "__sub__", "__truediv__", "__pow__"])
@pytest.mark.parametrize("other", [2, 2.5, torch.tensor(2.0), torch.ones(3)])
def test_what_has_no_meaning_is_a_type_error(op: str, other: float | Tensor) -> None:
    """Numbers and vectors with a matrix, as in DGL."""
    a, name = matrix("square"), op.strip("_")
    function = getattr(operator, name)
    if name in ("add", "sub") or (isinstance(other, Tensor) and other.dim() == 1):
        with pytest.raises(TypeError):
            function(a, other)
    with pytest.raises(TypeError):
        function(other, a)


def test_a_matrix_is_no_exponent() -> None:
    with pytest.raises(TypeError):
        matrix("square") ** matrix("square")


@pytest.mark.parametrize(("name", "form"), MATRICES)
@pytest.mark.parametrize("op", ["add", "sub", "mul", "div"])
@pytest.mark.parametrize("heads", [None, 2])
@pytest.mark.parametrize("of", ["rows", "columns", "vector"])
def test_broadcasts(name: str, form: str, op: str, heads: int | None, of: str) -> None:
    a = matrix(name, form, heads, requires_grad=True)
    n, m = a.shape
    shape = {"rows": (n, 1), "columns": (1, m), "vector": (m,)}[of]
    v = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    out = getattr(fgs, f"sp_{op}_v")(a, v)
    is_of_rows = of == "rows" and not (n == 1 and m == 1)
    number = v.reshape(-1)[(a.row if is_of_rows else a.col).long()]
    expected = getattr(operator, op if op != "div" else "truediv")(
        a.val, number if heads is None else number.unsqueeze(1)
    )
    torch.testing.assert_close(out.val, expected)
    grad = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(out.val, [a.val, v], grad, retain_graph=True),
        torch.autograd.grad(expected, [a.val, v], grad),
    )


A = matrix("wide")  # [3, 9], with duplicates
D = matrix("distinct")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: A + A.T, RuntimeError, "A and B must have one shape"),
        (lambda: A + A.float(), RuntimeError, "A and B must have values of one dtype"),
        (lambda: A * matrix("wide", heads=2), RuntimeError, "as many heads"),
        (lambda: matrix("wide", heads=2) - matrix("wide", heads=3), RuntimeError, "as many heads"),
        (lambda: A * A.coalesce(), RuntimeError, "A must not have duplicate entries in mul"),
        (lambda: A / A, RuntimeError, "A must not have duplicate entries in div"),
        (lambda: D / (D + fgs.identity(D.shape, dtype=D.dtype)), RuntimeError, "entries where A"),
        (lambda: fgs.sp_add_v(A, 1.0), TypeError, "v must be a torch.Tensor, got float"),
        (lambda: fgs.sp_add_v(A, torch.ones(3)), AssertionError, "v must be"),
        (lambda: fgs.sp_add_v(A, torch.ones(9, 1)), AssertionError, "v must be"),
        (lambda: fgs.sp_add_v(A, torch.ones(1, 9, 1)), AssertionError, "v must be"),
        (lambda: A.inv(), AssertionError, "A must be a square diagonal"),
        (lambda: fgs.inv(fgs.diag(torch.ones(3), (3, 4))), AssertionError, "square diagonal"),
        (lambda: fgs.diag(torch.ones(3, 2)).inv(), AssertionError, "square diagonal"),
    ],
)
def test_errors_name_the_argument(
    call: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()


def test_inverse() -> None:
    val = torch.tensor([1.0, 2.0, -4.0])
    inverse = fgs.diag(val).inv()
    assert inverse.is_diag() and torch.equal(inverse.val, 1 / val)
