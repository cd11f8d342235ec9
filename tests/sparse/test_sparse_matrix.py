"""How matrices are made, seen, printed, converted and copied, and what they share."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import Tensor
from torch_geometric import EdgeIndex

import fastgraph.sparse as fgs
from fastgraph.graphs.memo import MEMO
from fastgraph.sparse import SparseMatrix
from tests.sparse.matrices import FORMS, MATRICES, PLACES, dense, matrix, pattern


@pytest.mark.parametrize(("name", "form"), MATRICES)
@pytest.mark.parametrize("heads", [None, 2])
def test_views(name: str, form: str, heads: int | None) -> None:
    """By row and by column, each entry with its value."""
    a = matrix(name, form, heads)
    expected = dense(a.pattern, a.val)
    for transposed in (False, True):
        b = a.T if transposed else a
        n, m = b.shape
        row, col = b.coo()
        assert torch.equal(b.indices(), torch.stack([row, col]))
        assert row.dtype == b.csr()[0].dtype == b.csr()[1].dtype == b.csc()[1].dtype
        for (ptr, other, numbers), of, near, far in (
            (b.csr(), n, row, col),
            (b.csc(), m, col, row),
        ):
            assert len(ptr) == of + 1
            order = torch.arange(b.nnz) if numbers is None else numbers
            ends = torch.repeat_interleave(torch.arange(of), ptr.diff().long())
            assert torch.equal(near[order].long(), ends)
            assert torch.equal(far[order], other)
        torch.testing.assert_close(
            b.to_dense(), expected.transpose(0, 1) if transposed else expected
        )
    assert a.shape == PLACES[name][0] and a.nnz == PLACES[name][1].shape[1]
    assert (a.dtype, a.device) == (torch.float64, torch.device("cpu"))


@pytest.mark.parametrize(("name", "form"), MATRICES)
@pytest.mark.parametrize("heads", [None, 2])
def test_coalesce(name: str, form: str, heads: int | None) -> None:
    a = matrix(name, form, heads, requires_grad=True)
    b = a.coalesce()
    places = a.row.long() * a.shape[1] + a.col.long()
    assert torch.equal(b.row.long() * a.shape[1] + b.col.long(), places.unique())
    assert a.has_duplicate() == a.T.has_duplicate() == (b.nnz < a.nnz)
    assert not b.has_duplicate()
    expected = dense(a.pattern, a.val)
    torch.testing.assert_close(dense(b.pattern, b.val), expected)
    if a.nnz:
        grad = torch.randn_like(expected)
        torch.testing.assert_close(
            torch.autograd.grad(b.to_dense(), a.val, grad, retain_graph=True),
            torch.autograd.grad(expected, a.val, grad),
        )
    assert fgs.val_like(a, a.val * 2).coalesce().pattern is b.pattern


def test_coalesced_integers_and_half_precision_are_exact() -> None:
    where = torch.tensor([[0, 0, 1], [1, 1, 0]])
    assert fgs.spmatrix(where, torch.tensor([3, 4, 5])).coalesce().val.tolist() == [7, 5]
    half = fgs.spmatrix(where, torch.tensor([256.0, 1, 5], dtype=torch.bfloat16))
    assert half.coalesce().val.tolist() == [256, 5]  # 257 is rounded once


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_default_values_have_the_default_dtype(dtype: torch.dtype) -> None:
    """So that ``spmatrix(...) + identity(...)`` is possible whatever it is."""
    ptr, index = torch.tensor([0, 1, 2]), torch.tensor([1, 0])
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        made = [
            fgs.spmatrix(torch.stack([index, index])),
            fgs.from_csr(ptr, index),
            fgs.from_csc(ptr, index),
            fgs.from_edge_index(torch.stack([index, index])),
            fgs.spmatrix(torch.stack([index, index])) + fgs.identity((2, 2)),
        ]
    finally:
        torch.set_default_dtype(before)
    assert [m.dtype for m in made] == 5 * [dtype]


def test_smallest_shapes_and_ones() -> None:
    row, col = torch.tensor([3, 1]), torch.tensor([0, 6])
    a = fgs.from_coo(row, col)
    assert (a.shape, a.val.tolist(), a.dtype) == ((4, 7), [1, 1], torch.float32)
    ptr, indices = torch.tensor([0, 1, 1, 2]), torch.tensor([4, 0])
    assert fgs.from_csr(ptr, indices).shape == (3, 5)
    assert fgs.from_csc(ptr, indices).shape == (5, 3)
    assert fgs.from_csc(ptr, indices, shape=(9, 3)).shape == (9, 3)


def test_printing() -> None:
    a = fgs.from_coo(torch.tensor([1, 1, 3]), torch.tensor([2, 1, 3]), torch.ones(3, 2))
    assert str(a) == (
        "SparseMatrix(indices=tensor([[1, 1, 3],\n"
        "                             [2, 1, 3]]),\n"
        "             values=tensor([[1., 1.],\n"
        "                            [1., 1.],\n"
        "                            [1., 1.]]),\n"
        "             shape=(4, 4), nnz=3, val_size=(2,))"
    )


def test_diagonals() -> None:
    a = fgs.diag(torch.tensor([1.0, 2.0]), (2, 3))
    assert a.is_diag() and a.T.is_diag() and a.T.shape == (3, 2)
    assert not fgs.from_coo(*a.coo(), a.val).is_diag()
    assert torch.equal(a.to_dense(), torch.tensor([[1.0, 0, 0], [0, 2, 0]]))
    assert torch.equal(fgs.identity((3, 3), dtype=torch.float64).to_dense(), torch.eye(3).double())
    assert fgs.identity((3, 4), 2).val.shape == (3, 2)
    assert fgs.val_like(a, a.val + 1).is_diag() and a.double().is_diag()


def test_conversions_share_what_they_can() -> None:
    a = matrix("square", "int32")
    assert a.to() is a and a.cpu() is a and a.double() is a
    for name, dtype in (("float", torch.float32), ("long", torch.int64), ("int", torch.int32)):
        b = getattr(a, name)()
        assert b.dtype == dtype and b.pattern is a.pattern
        assert torch.equal(b.val, a.val.to(dtype))
    moved = a.to(device="meta", dtype=torch.float32)
    assert (moved.device.type, moved.shape, moved.dtype) == ("meta", a.shape, torch.float32)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("heads", [None, 2])
@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
def test_matrices_of_torch(form: str, heads: int | None, layout: str) -> None:
    """There and back, with gradients; torch's CSR has no duplicates, in ascending order."""
    where = pattern(form, (5, 6), PLACES["square"][1][:, :4].clamp(max=4).unique(dim=1))
    size = (where.nnz,) if heads is None else (where.nnz, heads)
    a = SparseMatrix(where, torch.randn(size, dtype=torch.float64, requires_grad=True))
    theirs = getattr(fgs, f"to_torch_sparse_{layout}")(a)
    assert str(theirs.layout) == f"torch.sparse_{layout}"
    torch.testing.assert_close(theirs.detach().to_dense(), a.to_dense().detach())
    back = fgs.from_torch_sparse(theirs.coalesce() if layout == "coo" else theirs)
    torch.testing.assert_close(back.to_dense(), a.to_dense())
    torch.testing.assert_close(
        torch.autograd.grad(back.to_dense().pow(2).sum(), a.val, retain_graph=True),
        torch.autograd.grad(a.to_dense().pow(2).sum(), a.val),
    )


def test_edge_index() -> None:
    """Row ``i`` has the edges to node ``i``."""
    edge_index, val = torch.tensor([[0, 0, 3], [1, 2, 1]]), torch.tensor([5.0, 6, 7])
    expected = torch.zeros(4, 4)
    expected[edge_index[1], edge_index[0]] = val
    assert torch.equal(fgs.from_edge_index(edge_index, val).to_dense(), expected)
    assert torch.equal(fgs.from_edge_index(edge_index, val, (4, 3)).to_dense(), expected[:3])
    assert fgs.from_edge_index(edge_index, num_nodes=9).shape == (9, 9)
    index = EdgeIndex(edge_index, sparse_size=(5, 4))
    assert fgs.from_edge_index(index).shape == (4, 5)
    assert type(fgs.from_edge_index(index).indices()) is Tensor
    assert fgs.from_edge_index(EdgeIndex(edge_index)).shape == (4, 4)
    assert fgs.from_edge_index(edge_index[:, :0]).shape == (0, 0)


@pytest.mark.parametrize("form", [*FORMS, "diag"])
@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda a: pickle.loads(pickle.dumps(a))])
def test_copies(form: str, is_used: bool, copied: Callable[[SparseMatrix], SparseMatrix]) -> None:
    a = fgs.diag(torch.ones(3)) if form == "diag" else matrix("square", form)
    if is_used:
        a.T @ torch.ones(a.shape[0], dtype=a.dtype)
        a.coalesce(), a.csr(), a.sum(0)
    b = copied(a)
    assert b.pattern is not a.pattern and b.is_diag() == a.is_diag() and b.shape == a.shape
    assert torch.equal(b.indices(), a.indices()) and torch.equal(b.val, a.val)


def test_matrices_that_were_used_in_inference_mode_serve_training() -> None:
    val, x = torch.ones(20, dtype=torch.float64), torch.ones(6, dtype=torch.float64)
    a = matrix("square")
    with torch.inference_mode():
        fgs.softmax(a, 0), a @ x, a.sum(0), a.coalesce(), a.csr(), a.csc(), a.T.coo()
    b = fgs.val_like(a, val.requires_grad_())
    (fgs.softmax(b, 0).coalesce() @ x + b.sum(0)).sum().backward()
    assert val.grad is not None
    with torch.inference_mode():
        c = fgs.spmatrix(PLACES["square"][1].clone(), shape=(6, 6))
        c @ torch.ones(6)
    assert torch.equal((c @ torch.ones(6)), c.to_dense().sum(1))


@pytest.mark.parametrize("form", ["coo", "csr", "csc"])
def test_an_edit_of_its_indices_is_an_error(form: str) -> None:
    a = matrix("square", form)
    x = torch.ones(6, dtype=torch.float64)
    a @ x, a.sum(0), a.csr(), a.csc()
    given = {"coo": lambda: a.row, "csr": lambda: a.csr()[1], "csc": lambda: a.csc()[1]}[form]()
    given[0] = 3
    for use in (lambda: a @ x, lambda: a.T @ x, a.coalesce, a.coo, a.csr, lambda: a.sum(0)):
        with pytest.raises(RuntimeError, match="edited in place"):
            use()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "view", [SparseMatrix.csr, SparseMatrix.csc, SparseMatrix.indices, SparseMatrix.coo]
)
def test_an_edit_of_what_it_gave_out_is_an_error_or_of_no_effect(
    form: str, view: Callable[[SparseMatrix], Tensor | tuple[Tensor, ...]]
) -> None:
    x = torch.rand(6, dtype=torch.float64)
    uses: list[Callable[[SparseMatrix], Tensor]] = [
        lambda a: a @ x,
        lambda a: a.T @ x,
        lambda a: a.sum(1),
        lambda a: fgs.sp_mul_v(a, x).val,
        lambda a: fgs.sp_mul_v(a.T, x).val,
        lambda a: a.index_select(0, torch.tensor([2, 0])).to_dense(),
        lambda a: a.range_select(1, slice(1, 5)).to_dense(),
        lambda a: a.coalesce().val,
        SparseMatrix.to_dense,
    ]
    for is_used_before in (True, False):
        a = matrix("square", form)
        expected = [use(matrix("square", form)) for use in uses]
        if is_used_before:  # what is made may share memory with what is given out
            for use in uses:
                use(a)
        found = view(a)
        (found if isinstance(found, Tensor) else found[1])[0] = 0
        with pytest.raises(RuntimeError, match="edited in place"):
            view(a)
        for use, value in zip(uses, expected, strict=True):
            with suppress(RuntimeError):
                assert torch.equal(use(a), value)


USES: dict[str, Callable[[SparseMatrix, Tensor], Tensor]] = {
    "product": lambda a, x: a @ x,
    "product of the transpose": lambda a, x: a.T @ x,
    "sddmm": lambda a, x: fgs.sddmm(a, x, x.T).val,
    "softmax": lambda a, x: a.softmax().val + a.softmax(0).val,
    **{
        f"{name} along {dim}": lambda a, x, name=name, dim=dim: a.reduce(dim, name)
        for name in ("sum", "smean", "smax", "sprod")
        for dim in (0, 1)
    },
    "a number of each column": lambda a, x: fgs.sp_mul_v(a, x[:, 0]).val,
    "a number of each row": lambda a, x: fgs.sp_add_v(a, x[:, :1]).val,
    "a diagonal": lambda a, x: (a.coalesce() @ fgs.diag(x[:, 0])).val,
    "no entries of a diagonal": lambda a, x: (a.coalesce() + fgs.diag(x[:, 0])).val,
    "rows": lambda a, x: a.index_select(0, torch.tensor([1, 1, 4])).val,
    "columns": lambda a, x: a.range_select(1, slice(1, 4)).val,
    "a sparse product": lambda a, x: (a.coalesce() @ a.T.coalesce()).val,
    "the dense matrix": lambda a, x: a.to_dense(),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("form", ["coo", "csr", "csc"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_an_edit_before_the_backward_pass_changes_no_gradient(
    form: str, dtype: torch.dtype, use: str
) -> None:
    """Gradients are those of the matrix that was used, or there are none."""

    def gradients(edit: Callable[[Tensor], object]) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        near, far = torch.tensor([[0, 0, 1, 2, 4, 5], [5, 2, 1, 2, 0, 1]], dtype=dtype)
        val, x = torch.rand(6, requires_grad=True), torch.rand(6, 4, requires_grad=True)
        if form == "coo":
            indices = torch.stack([far, near])
            a = fgs.spmatrix(indices, val, (6, 6))
        else:
            indices = far
            ptr = torch.tensor([0, 2, 3, 4, 4, 5, 6], dtype=dtype)
            a = (fgs.from_csr if form == "csr" else fgs.from_csc)(ptr, indices, val, (6, 6))
        out = USES[use](a, x)
        edit(indices)
        found = torch.autograd.grad(out.square().sum(), (val, x), materialize_grads=True)
        return found[0], found[1]

    expected = gradients(lambda indices: None)
    for edit in (Tensor.zero_, lambda indices: indices.copy_(indices.flip(-1))):
        with suppress(RuntimeError):
            found = gradients(edit)
            assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_nothing_of_a_matrix_stays_behind() -> None:
    MEMO.clear()
    a = matrix("square", requires_grad=True)
    (fgs.softmax(a) @ torch.ones(6, dtype=torch.float64)).sum().backward()
    a.sum(0), a.coalesce()
    assert len(MEMO) == 0


INDICES = torch.tensor([[0, 1], [2, 3]])
PTR = torch.tensor([0, 1, 2])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: fgs.spmatrix(INDICES.float()), RuntimeError, "indices must be int64 or int32"),
        (lambda: fgs.spmatrix(INDICES[0]), RuntimeError, r"indices must be \[2, nnz\]"),
        (lambda: fgs.spmatrix(INDICES[:1]), RuntimeError, r"indices must be \[2, nnz\]"),
        (lambda: fgs.spmatrix(INDICES[:, :0]), RuntimeError, "shape must be given"),
        (lambda: fgs.spmatrix(INDICES, shape=(2, 3, 4)), RuntimeError, "shape must have two"),
        (lambda: fgs.spmatrix(INDICES, shape=(2, -3)), RuntimeError, "sizes >= 0"),
        (lambda: fgs.spmatrix(INDICES, shape=(1, 4)), IndexError, "hold row 1"),
        (lambda: fgs.spmatrix(INDICES, shape=(2, 3)), IndexError, "hold column 3"),
        (lambda: fgs.spmatrix(-INDICES, shape=(2, 3)), IndexError, "hold row -1"),
        (lambda: fgs.spmatrix(INDICES, torch.ones(3)), RuntimeError, "a value for each of 2"),
        (lambda: fgs.spmatrix(INDICES, torch.ones(2, 3, 1)), AssertionError, "val must be"),
        (lambda: fgs.spmatrix(INDICES, torch.tensor(1.0)), AssertionError, "val must be"),
        (lambda: fgs.from_coo(PTR, PTR[:2]), AssertionError, "row and col must have one shape"),
        (lambda: fgs.from_csr(PTR, PTR[:1]), RuntimeError, "indptr must rise"),
        (lambda: fgs.from_csr(PTR.flip(0), PTR[:2]), RuntimeError, "indptr must rise"),
        (lambda: fgs.from_csr(PTR, PTR[1:], shape=(3, 3)), RuntimeError, "must have 4 elements"),
        (lambda: fgs.from_csr(PTR, PTR[1:], shape=(2, 2)), IndexError, "hold column 2"),
        (lambda: fgs.from_csr(PTR[:0], PTR[:0], shape=(0, 2)), RuntimeError, "no elements"),
        (lambda: fgs.from_csr(PTR[:1], PTR[:0]), RuntimeError, "shape must be given"),
        (lambda: fgs.from_csc(PTR, PTR[1:], shape=(3, 3)), RuntimeError, "must have 4 elements"),
        (lambda: fgs.from_csc(PTR, PTR[1:], shape=(2, 2)), IndexError, "hold row 2"),
        (lambda: fgs.val_like(matrix("one"), torch.ones(2)), RuntimeError, "each of 1 entries"),
        (lambda: fgs.spmatrix([[0], [1]]), TypeError, "indices must be a torch.Tensor, got list"),
        (lambda: fgs.spmatrix(INDICES, [1.0, 2.0]), TypeError, "val must be a torch.Tensor"),
        (lambda: fgs.spmatrix(INDICES, shape=4), RuntimeError, "shape must have two sizes"),
        (lambda: fgs.from_csr([0, 1], PTR[:1]), TypeError, "indptr must be a torch.Tensor"),
        (lambda: fgs.val_like(matrix("one"), 1.0), TypeError, "val must be a torch.Tensor"),
        (lambda: fgs.diag(3), TypeError, "val must be a torch.Tensor, got int"),
        (lambda: fgs.diag(torch.ones(3), (2, 4)), AssertionError, "val must be"),
        (lambda: fgs.diag(torch.ones(3, 1, 1)), AssertionError, "val must be"),
        (lambda: fgs.from_torch_sparse(torch.ones(2, 2)), AssertionError, "in COO, CSR or CSC"),
    ],
)
def test_errors_name_the_argument(
    call: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()


def test_a_gradient_that_torch_does_not_give_away_is_an_error() -> None:
    theirs = torch.sparse_coo_tensor(INDICES, torch.ones(2), (2, 4)).requires_grad_()
    with pytest.raises(RuntimeError, match="torch_sparse_tensor must be coalesced"):
        fgs.from_torch_sparse(theirs)
