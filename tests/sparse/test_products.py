"""Products and softmax beside dense matrices, with their gradients of any order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fastgraph.sparse as fgs
from fastgraph.sparse import SparseMatrix
from tests.sparse.matrices import MATRICES, PLACES, dense, matrix, pattern, places

HALF = [torch.bfloat16, torch.float16]


def randn(*size: int, seed: int = 5, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(
        dtype
    )


def check(ours: Callable[..., Tensor], theirs: Callable[..., Tensor], *operands: Tensor) -> None:
    """Equal values and gradients of all operands, in float64."""
    first = [t.detach().clone().requires_grad_() for t in operands]
    second = [t.detach().clone().requires_grad_() for t in operands]
    out, expected = ours(*first), theirs(*second)
    torch.testing.assert_close(out, expected)
    if expected.numel() == 0 or not expected.requires_grad:
        return
    grad = randn(*expected.shape, seed=9)
    torch.testing.assert_close(
        torch.autograd.grad(out, first, grad), torch.autograd.grad(expected, second, grad)
    )


@pytest.mark.parametrize(("name", "form"), MATRICES)
@pytest.mark.parametrize("channels", [None, 0, 1, 5])
def test_spmm(name: str, form: str, channels: int | None) -> None:
    a = matrix(name, form)
    x = randn(a.shape[1]) if channels is None else randn(a.shape[1], channels)
    check(
        lambda val, x: fgs.spmm(fgs.val_like(a, val), x),
        lambda val, x: dense(a.pattern, val) @ x,
        a.val,
        x,
    )


@pytest.mark.parametrize(("name", "form"), MATRICES)
@pytest.mark.parametrize(("channels", "heads"), [(3, 2), (4, 1), (1, 3), (0, 2), (2, 0)])
def test_bspmm(name: str, form: str, channels: int, heads: int) -> None:
    a = matrix(name, form, heads)
    check(
        lambda val, x: fgs.bspmm(fgs.val_like(a, val), x),
        lambda val, x: torch.einsum("nmh,mkh->nkh", dense(a.pattern, val), x),
        a.val,
        randn(a.shape[1], channels, heads),
    )
    assert fgs.bspmm(a, randn(a.shape[1], channels, heads)).is_contiguous()  # as DGL's, for views


@pytest.mark.parametrize(("name", "form"), MATRICES)
@pytest.mark.parametrize("channels", [None, 0, 1, 5])
def test_sddmm(name: str, form: str, channels: int | None) -> None:
    a = matrix(name, form)
    n, m = a.shape
    x1, x2 = (randn(n), randn(m)) if channels is None else (randn(n, channels), randn(channels, m))
    check(
        lambda val, x1, x2: fgs.sddmm(fgs.val_like(a, val), x1, x2).val,
        lambda val, x1, x2: (
            val * (torch.outer(x1, x2) if channels is None else x1 @ x2)[a.row.long(), a.col.long()]
        ),
        a.val,
        x1,
        x2,
    )


@pytest.mark.parametrize(("name", "form"), MATRICES)
@pytest.mark.parametrize(("channels", "heads"), [(3, 2), (4, 1), (0, 2), (2, 0)])
@pytest.mark.parametrize("has_heads", [True, False])
def test_bsddmm(name: str, form: str, channels: int, heads: int, has_heads: bool) -> None:
    a = matrix(name, form, heads if has_heads else None)
    n, m = a.shape

    def upstream(val: Tensor, x1: Tensor, x2: Tensor) -> Tensor:
        dots = torch.einsum("nkh,kmh->nmh", x1, x2)[a.row.long(), a.col.long()]
        return dots * (val if has_heads else val.unsqueeze(1))

    check(
        lambda val, x1, x2: fgs.bsddmm(fgs.val_like(a, val), x1, x2).val,
        upstream,
        a.val,
        randn(n, channels, heads),
        randn(channels, m, heads, seed=6),
    )


@pytest.mark.parametrize(("name", "form"), MATRICES)
@pytest.mark.parametrize("heads", [None, 1, 3, 0])
@pytest.mark.parametrize("dim", [0, 1])
def test_softmax(name: str, form: str, heads: int | None, dim: int) -> None:
    a = matrix(name, form, heads)

    def upstream(val: Tensor) -> Tensor:
        ends = (a.row if dim == 1 else a.col).long()
        exp = val.exp()
        sums = exp.new_zeros(a.shape[1 - dim], *val.shape[1:]).index_add(0, ends, exp)
        return exp / sums[ends]

    check(lambda val: fgs.softmax(fgs.val_like(a, val), dim).val, upstream, a.val)
    assert fgs.softmax(a, dim).pattern is a.pattern


@pytest.mark.parametrize("first", ["coo", "int32", "csr", "csc", "transposed"])
@pytest.mark.parametrize("second", ["coo", "csr", "csc"])
@pytest.mark.parametrize(("nnz1", "nnz2"), [(17, 14), (1, 14), (0, 14), (17, 0)])
def test_spspmm(first: str, second: str, nnz1: int, nnz2: int) -> None:
    a = pattern(first, (5, 6), places((5, 6), nnz1, distinct=True))
    b = pattern(second, (6, 4), places((6, 4), nnz2, distinct=True, seed=3))
    check(
        lambda u, v: (SparseMatrix(a, u) @ SparseMatrix(b, v)).to_dense(),
        lambda u, v: dense(a, u) @ dense(b, v),
        randn(nnz1),
        randn(nnz2),
    )
    product = SparseMatrix(a, randn(nnz1)) @ SparseMatrix(b, randn(nnz2))
    assert not product.has_duplicate() and product.csr()[2] is None
    assert product.nnz == int(((dense(a, torch.ones(nnz1)) @ dense(b, torch.ones(nnz2))) > 0).sum())


@pytest.mark.parametrize("shapes", [((4, 4), (4, 4)), ((3, 5), (5, 4)), ((5, 3), (3, 6))])
def test_spspmm_of_diagonals(shapes: tuple[tuple[int, int], tuple[int, int]]) -> None:
    n, m = shapes
    a, b = fgs.diag(randn(min(n)), n), fgs.diag(randn(min(m)), m)
    product = a @ b
    assert product.is_diag()
    torch.testing.assert_close(product.to_dense(), a.to_dense() @ b.to_dense())


@pytest.mark.parametrize("shape", [(6, 6), (4, 6), (8, 6)])
def test_spspmm_with_one_diagonal(shape: tuple[int, int]) -> None:
    """A diagonal that is not square changes the shape, too."""
    b = SparseMatrix(pattern("coo", (6, 7), places((6, 7), 15, distinct=True)), randn(15))
    d = pattern("coo", shape, torch.stack([torch.arange(min(shape))] * 2))
    diagonal = fgs.diag(randn(min(shape)), shape)
    for left, right in ((diagonal, b), (b.T, diagonal.T)):
        product = left @ right
        expected = left.to_dense() @ right.to_dense()
        assert product.shape == expected.shape
        torch.testing.assert_close(product.to_dense(), expected)
    check(
        lambda u, v: (fgs.diag(u, shape) @ fgs.val_like(b, v)).to_dense(),
        lambda u, v: dense(d, u) @ dense(b.pattern, v),
        diagonal.val,
        b.val,
    )


def second_order(name: str, form: str) -> list[tuple[Callable[..., Tensor], tuple[Tensor, ...]]]:
    a, h = matrix(name, form, seed=2), matrix(name, form, 2, seed=3)
    n, m = a.shape
    return [
        (lambda v, x: fgs.spmm(fgs.val_like(a, v), x), (a.val, randn(m, 3))),
        (lambda v, x: fgs.bspmm(fgs.val_like(a, v), x), (h.val, randn(m, 3, 2))),
        (
            lambda v, x, y: fgs.sddmm(fgs.val_like(a, v), x, y).val,
            (a.val, randn(n, 3), randn(3, m)),
        ),
        (
            lambda v, x, y: fgs.bsddmm(fgs.val_like(a, v), x, y).val,
            (h.val, randn(n, 2, 2), randn(2, m, 2)),
        ),
        (lambda v: fgs.softmax(fgs.val_like(a, v), 1).val, (a.val,)),
        (lambda v: fgs.softmax(fgs.val_like(h, v), 0).val, (h.val,)),
    ]


@pytest.mark.parametrize("which", range(6))
@pytest.mark.parametrize(("name", "form"), [("wide", "coo"), ("tall", "csc"), ("square", "csr")])
def test_gradients_of_gradients(name: str, form: str, which: int) -> None:
    function, operands = second_order(name, form)[which]
    leaves = tuple(t.clone().requires_grad_() for t in operands)
    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


def test_gradients_of_gradients_of_sparse_products() -> None:
    a = pattern("coo", (4, 5), places((4, 5), 9, distinct=True))
    b = pattern("csc", (5, 3), places((5, 3), 8, distinct=True))
    leaves = randn(9).requires_grad_(), randn(8, seed=6).requires_grad_()

    def product(u: Tensor, v: Tensor) -> Tensor:
        return (SparseMatrix(a, u) @ SparseMatrix(b, v)).val

    assert torch.autograd.gradgradcheck(product, leaves)


def test_a_gradient_of_the_third_order() -> None:
    a = matrix("square", requires_grad=True)
    x = randn(6, 2).requires_grad_()
    loss = fgs.spmm(fgs.softmax(a), x).pow(2).sum()
    (first,) = torch.autograd.grad(loss, a.val, create_graph=True)
    (second,) = torch.autograd.grad(first.pow(2).sum(), a.val, create_graph=True)
    (third,) = torch.autograd.grad(second.pow(2).sum(), a.val)

    v = a.val.detach().clone().requires_grad_()
    exp = v.exp()
    soft = exp / torch.zeros(6, dtype=torch.float64).index_add(0, a.row, exp)[a.row]
    loss = (dense(a.pattern, soft) @ x).pow(2).sum()
    (first,) = torch.autograd.grad(loss, v, create_graph=True)
    (second,) = torch.autograd.grad(first.pow(2).sum(), v, create_graph=True)
    torch.testing.assert_close(third, torch.autograd.grad(second.pow(2).sum(), v)[0])


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_narrow_dtypes(dtype: torch.dtype) -> None:
    """Rounded once, from sums in float32 at least."""
    wide = matrix("hub")
    a = wide.to(dtype=dtype)
    x = randn(40, 8, dtype=dtype)
    exact = dense(a.pattern, a.val.double()) @ x.double()
    torch.testing.assert_close(fgs.spmm(a, x), exact.to(dtype))
    x2 = randn(8, 40, dtype=dtype)
    exact = (x.double() @ x2.double())[a.row, a.col]
    ones = fgs.val_like(a, torch.ones_like(a.val))
    torch.testing.assert_close(fgs.sddmm(ones, x, x2).val, exact.to(dtype))
    soft, exact = fgs.softmax(a), fgs.softmax(a.double())
    assert soft.dtype == dtype
    torch.testing.assert_close(soft.val, exact.val.to(dtype))


def test_bits_are_equal_for_any_number_of_threads() -> None:
    indices = places((300, 300), 40_000)
    val = torch.randn(40_000, 2)
    x = torch.randn(300, 8, 2)

    def results() -> list[Tensor]:
        leaf, features = val.clone().requires_grad_(), x.clone().requires_grad_()
        a = fgs.spmatrix(indices, leaf, (300, 300))
        scores = fgs.bsddmm(a, features, features.transpose(0, 1))
        out = fgs.bspmm(fgs.softmax(scores, 0), features)
        sums = [scores.reduce(dim, r) for dim in (0, 1, None) for r in ("sum", "smean", "sprod")]
        (out.sum() + sum(s.sum() for s in sums[:6])).backward()
        b = fgs.spmatrix(indices, val[:, 0].clone().requires_grad_(), (300, 300)).coalesce()
        scaled = fgs.sp_mul_v(b @ b, out[:, 0, 0])
        row = torch.autograd.grad(scaled.val.sum(), [b.val, out])
        assert leaf.grad is not None and features.grad is not None
        return [out, leaf.grad, features.grad, b.val, scaled.val, *row, *sums]

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = results()
        for threads in (2, 3, 5):
            torch.set_num_threads(threads)
            for ours, theirs in zip(results(), expected, strict=True):
                assert torch.equal(ours, theirs)
    finally:
        torch.set_num_threads(before)


def test_operands_in_any_strides() -> None:
    a = matrix("square", "strided")
    x1, x2 = randn(6, 5, 2)[:, ::2, 1], randn(6, 3).T
    torch.testing.assert_close(
        fgs.sddmm(a, x1, x2).val, a.val * (x1 @ x2)[a.row, a.col], rtol=0, atol=1e-12
    )
    x = randn(3, 6).T
    torch.testing.assert_close(a @ x, dense(a.pattern, a.val) @ x)


def test_matmul_of_dense_matrices_is_torchs() -> None:
    x = randn(3, 4)
    assert torch.equal(fgs.matmul(x, x.T), x @ x.T)


A = matrix("wide")  # [3, 9]
H = matrix("wide", heads=2)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: fgs.spmm(A, randn(3, 2)), RuntimeError, "X must be"),
        (lambda: fgs.spmm(A, randn(9, 2, 2)), RuntimeError, "X must be"),
        (lambda: fgs.spmm(A, randn(9, 2, 2, 2)), RuntimeError, "X must be"),
        (lambda: fgs.spmm(H, randn(9, 2)), RuntimeError, "X must be"),
        (lambda: fgs.spmm(H, randn(9, 2, 3)), RuntimeError, "X must be"),
        (lambda: fgs.spmm(A, torch.tensor(1.0)), RuntimeError, "X must be"),
        (lambda: fgs.spmm(A, randn(9, 2).float()), RuntimeError, "X must have the dtype"),
        (lambda: fgs.spmm(A.long(), randn(9, 2).long()), RuntimeError, "X must be one of"),
        (lambda: fgs.spmm(randn(3), randn(9, 2)), AssertionError, "A must be a SparseMatrix"),
        (lambda: fgs.spmm(A, A), AssertionError, "X must be a Tensor"),
        (lambda: fgs.spspmm(A, randn(9)), AssertionError, "B must be a SparseMatrix"),
        (lambda: fgs.matmul(randn(3, 3), A), AssertionError, "B must be a Tensor"),
        (lambda: fgs.matmul(3, A), AssertionError, "A must be a Tensor or a SparseMatrix"),
        (lambda: A @ A, RuntimeError, "B must have as many rows"),
        (lambda: H @ H.T, RuntimeError, "A must have values"),
        (lambda: A.coalesce() @ A.T.float(), RuntimeError, "A and B must have one dtype"),
        (lambda: A @ A.T.coalesce(), RuntimeError, "A must not have duplicate entries in spspmm"),
        (lambda: A.coalesce() @ A.T, RuntimeError, "B must not have duplicate entries in spspmm"),
        (lambda: fgs.sddmm(A, randn(3, 2), randn(3, 9)), RuntimeError, "X1 and X2 must be"),
        (lambda: fgs.sddmm(A, randn(2, 2), randn(2, 9)), RuntimeError, "X1 and X2 must be"),
        (lambda: fgs.sddmm(A, randn(3), randn(2, 9)), RuntimeError, "X1 and X2 must be"),
        (lambda: fgs.sddmm(H, randn(3, 2), randn(2, 9)), RuntimeError, "X1 and X2 must be"),
        (lambda: fgs.sddmm(H, randn(3, 2, 3), randn(2, 9, 3)), RuntimeError, "X1 and X2 must be"),
        (lambda: fgs.sddmm(A, randn(3, 2, 3), randn(2, 9, 4)), RuntimeError, "X1 and X2 must be"),
        (lambda: fgs.sddmm(A, randn(3), randn(9).float()), RuntimeError, "one dtype"),
        (lambda: fgs.sddmm(A, randn(3).long(), randn(9).long()), RuntimeError, "X1 must be one"),
        (lambda: fgs.sddmm(A, 3, randn(9)), AssertionError, "X1 must be a Tensor"),
        (lambda: fgs.softmax(A, 2), ValueError, "dim must be 0 or 1"),
        (lambda: fgs.softmax(A.long()), RuntimeError, "the values must be one of"),
        (lambda: A @ 3, TypeError, "unsupported operand"),
    ],
)
def test_errors_name_the_argument(
    call: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()


def test_one_graph_serves_all_matrices_of_a_pattern() -> None:
    """And their transposes; nothing is sorted twice."""
    a = matrix("square")
    b = fgs.val_like(a, a.val + 1)
    x = randn(6, 2).requires_grad_()
    (a @ x).sum().backward()
    graph = a.pattern._grouped.graph
    assert b.pattern is a.pattern and fgs.sddmm(b, x, x.T).pattern is a.pattern
    assert a.T.T.pattern is a.pattern
    assert (a.T.pattern.edges.index, a.T.pattern.edges.transpose) == (a.pattern.edges.index, True)
    before = graph.by_source
    (b.T @ x).sum().backward()
    assert a.pattern._grouped.graph is graph and graph.by_source is before
    assert PLACES["square"][1].shape[1] == a.nnz


def test_compiled_code_computes_the_same() -> None:
    a = matrix("square")

    def loss(val: Tensor, x: Tensor) -> Tensor:
        b = fgs.val_like(a, val)
        scores = fgs.softmax(fgs.sddmm(b, x, x.T))
        return (scores @ x).pow(2).sum() + fgs.sp_mul_v(b, x[:, 0]).sum(1).sin().sum()

    leaves = a.val.clone().requires_grad_(), randn(6, 3).requires_grad_()
    expected = torch.autograd.grad(loss(*leaves), leaves)
    compiled = torch.compile(loss, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(*leaves), leaves), expected)


def test_a_transform_of_torch_func_is_an_error_and_no_zero() -> None:
    a = matrix("square")
    for loss in (
        lambda x: (a @ x).sum(),
        lambda x: fgs.sddmm(a, x, x.T).val.sum(),
        lambda x: fgs.sp_mul_v(a, x[:, 0]).val.sum(),
        lambda x: fgs.softmax(fgs.val_like(a, x[:, 0][a.row])).val.sum(),
    ):
        with pytest.raises(RuntimeError):
            torch.func.grad(loss)(randn(6, 3))
