"""Rows and columns by number, by range and by chance, and without the empty ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import fastgraph.sparse as fgs
from fastgraph.sparse import SparseMatrix
from tests.sparse.matrices import MATRICES, dense, matrix


def same(ours: SparseMatrix, a: SparseMatrix, expected: torch.Tensor) -> None:
    """Equal dense matrices, and gradients of the values."""
    torch.testing.assert_close(dense(ours.pattern, ours.val), expected)
    weights = torch.randn_like(expected)
    gradients = [
        torch.autograd.grad((out * weights).sum(), a.val, allow_unused=True, retain_graph=True)
        for out in (ours.to_dense(), expected)
    ]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(("name", "form"), MATRICES)
@pytest.mark.parametrize("heads", [None, 2])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("index", [[], [0], [2, 0, 2, 1, 0]])
def test_index_select(name: str, form: str, heads: int | None, dim: int, index: list[int]) -> None:
    a = matrix(name, form, heads, requires_grad=True)
    numbers = torch.tensor(index, dtype=torch.int64).clamp(max=a.shape[dim] - 1)
    expected = dense(a.pattern, a.val).index_select(dim, numbers)
    same(a.index_select(dim, numbers), a, expected)
    same(a.index_select(dim, numbers.int()), a, expected)


@pytest.mark.parametrize(("name", "form"), MATRICES)
@pytest.mark.parametrize("heads", [None, 2])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("index", [slice(None), slice(0, 2), slice(1, -1), slice(-2, None, 1)])
def test_range_select(name: str, form: str, heads: int | None, dim: int, index: slice) -> None:
    a = matrix(name, form, heads, requires_grad=True)
    size = a.shape[dim]
    start, stop, _ = index.indices(size)
    index = slice(start, max(start, stop)) if size < 3 else index  # outside it is an error
    whole = dense(a.pattern, a.val)
    same(a.range_select(dim, index), a, whole[index] if dim == 0 else whole[:, index])


@pytest.mark.parametrize(("name", "form"), MATRICES)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("leading", [None, [], [2], [2, 0], [1, 2, 1]])
def test_compact(name: str, form: str, dim: int, leading: list[int] | None) -> None:
    a = matrix(name, form, requires_grad=True)
    given = None
    if leading is not None:
        given = torch.tensor(leading, dtype=torch.int64).clamp(max=a.shape[dim] - 1)
    compacted, kept = a.compact(dim, given)
    first = [] if given is None else list(dict.fromkeys(given.tolist()))
    others = sorted({*(a.row if dim == 0 else a.col).tolist()} - {*first})
    assert kept.tolist() == first + others
    same(compacted, a, dense(a.pattern, a.val).index_select(dim, kept.long()))
    assert compacted.val is a.val


@pytest.mark.parametrize("form", ["coo", "csr", "csc", "transposed"])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("fanout", [0, 1, 3, 100])
def test_samples(form: str, dim: int, replace: bool, bias: bool, fanout: int) -> None:
    a = matrix("square", form)
    values = torch.arange(1, a.nnz + 1.0, dtype=torch.float64)  # tell the entries
    values[::3] = 0 if bias else -1
    a = fgs.val_like(a, values.requires_grad_())
    ids = torch.tensor([4, 0, 1, 1, 5])
    drawn = a.sample(dim, fanout, ids, replace, bias)
    assert drawn.shape == ((5, 6) if dim == 0 else (6, 5))
    for number, old in enumerate(ids.tolist()):
        near, far = (drawn.row, drawn.col) if dim == 0 else (drawn.col, drawn.row)
        old_near, old_far = (a.row, a.col) if dim == 0 else (a.col, a.row)
        found = sorted(
            zip(far[near == number].tolist(), drawn.val[near == number].tolist(), strict=True)
        )
        may = (old_near == old) & ((a.val > 0) if bias else (a.val != 0))
        all_of_row = list(zip(old_far[may].tolist(), a.val[may].tolist(), strict=True))
        assert {*found} <= {*all_of_row}
        if replace:
            assert len(found) == (fanout if all_of_row else 0)
        else:
            assert len(found) == min(fanout, len(all_of_row)) and (bias or sorted(found) == found)
            assert all(found.count(e) <= all_of_row.count(e) for e in found)
    (gradient,) = torch.autograd.grad(drawn.val.sum(), a.val)
    assert gradient.sum() == drawn.nnz


def test_samples_of_all_rows_and_all_entries() -> None:
    a = matrix("square")
    assert a.sample(0, 2).shape == a.shape
    torch.testing.assert_close(a.sample(1, -1).to_dense(), a.to_dense())
    assert matrix("none").sample(0, 3, replace=True).nnz == 0


def test_samples_follow_the_seed_and_not_threads() -> None:
    a = matrix("hub")
    draws = []
    for threads in (1, 3):
        torch.manual_seed(7)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        draws.append(a.sample(0, 5).indices())
        torch.set_num_threads(before)
    assert torch.equal(*draws)


@pytest.mark.parametrize("replace", [False, True])
def test_frequencies(replace: bool) -> None:
    """Of two draws out of three entries with weights 1, 2 and 5."""
    weights = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
    a = fgs.from_coo(torch.zeros(3).long(), torch.arange(3), weights)
    torch.manual_seed(0)
    many = a.sample(0, 1 if not replace else 2, torch.zeros(20_000).long(), replace, bias=True)
    counts = many.col.bincount(minlength=3) / many.nnz
    torch.testing.assert_close(counts, (weights / 8).float(), rtol=0, atol=0.015)
    uniform = a.sample(0, 1, torch.zeros(20_000).long(), replace)
    counts = uniform.col.bincount(minlength=3) / uniform.nnz
    torch.testing.assert_close(counts, torch.full((3,), 1 / 3), rtol=0, atol=0.015)
    if not replace:
        pairs = a.sample(0, 2, torch.zeros(20_000).long(), bias=True)
        left_out = 3 - pairs.sum(1).new_zeros(20_000).index_add(0, pairs.row, pairs.col.double())
        counts = left_out.long().bincount(minlength=3) / 20_000
        # Entry 2 is left out if 0 and 1 are drawn, in either order.
        last = 1 / 8 * 2 / 7 + 2 / 8 * 1 / 6
        assert abs(counts[2] - last) < 0.015


A = matrix("wide")  # [3, 9]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: A.index_select(2, torch.tensor([0])), ValueError, "dim must be 0 or 1"),
        (lambda: A.index_select(0, [0]), TypeError, "index must be a torch.Tensor"),
        (lambda: A.index_select(0, torch.tensor([0.0])), RuntimeError, "index must be one-dim"),
        (lambda: A.index_select(0, torch.tensor(0)), RuntimeError, "index must be one-dim"),
        (lambda: A.index_select(0, torch.tensor([3])), IndexError, "index holds 3"),
        (lambda: A.index_select(1, torch.tensor([-1])), IndexError, "index holds -1"),
        (lambda: A.range_select(2, slice(1)), ValueError, "dim must be 0 or 1"),
        (lambda: A.range_select(0, 1), TypeError, "index must be a slice"),
        (lambda: A.range_select(0, slice(0, 2, 2)), NotImplementedError, "index must have step 1"),
        (lambda: A.range_select(0, slice(0, 4)), RuntimeError, "index must be a slice of 0 to 3"),
        (lambda: A.range_select(0, slice(2, 1)), RuntimeError, "index must be a slice of 0 to 3"),
        (lambda: A.sample(3, 1), ValueError, "dim must be 0 or 1"),
        (lambda: A.sample(0, -2), ValueError, "fanout must be an integer >= -1"),
        (lambda: A.sample(0, 1.5), ValueError, "fanout must be an integer >= -1, got 1.5"),
        (lambda: A.sample(0, -1, replace=True), ValueError, "fanout must be an integer >= 0"),
        (lambda: A.sample(0, 1, torch.tensor([7])), IndexError, "ids holds 7"),
        (lambda: A.sample(0, 1, bias=True), ValueError, "bias must be given for values"),
        (lambda: matrix("wide", heads=2).sample(0, 1, bias=True), ValueError, "bias must be given"),
        (lambda: A.compact(2), ValueError, "dim must be 0 or 1"),
        (lambda: A.compact(0, torch.tensor([3])), IndexError, "leading_indices holds 3"),
    ],
)
def test_errors_name_the_argument(
    call: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()
