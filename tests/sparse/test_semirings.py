"""Products over semirings beside dense tensors of all messages, and shortest paths beside SciPy."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import dijkstra
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fastgraph.sparse as fgs
from fastgraph.sparse import SparseMatrix
from fastgraph.sparse.semirings import ADDITIONS, MULTIPLICATIONS
from tests.sparse.matrices import dense, matrix, pattern, places
from tests.sparse.test_products import randn

SEMIRINGS = [f"{add}_{multiply}" for add in ADDITIONS for multiply in MULTIPLICATIONS]
DEPENDING = [name for name in SEMIRINGS if not name.endswith(("first", "pair"))]
"""Those whose messages depend on features."""

TREATMENTS = [(name, "split") for name in SEMIRINGS]
TREATMENTS += [(name, "winner") for name in SEMIRINGS if name.startswith(("min", "max"))]

PLACES_AND_FORMS = [
    *(("square", "csr"), ("wide", "int32"), ("tall", "csc"), ("none", "coo"), ("one", "coo")),
    *(("row", "coo"), ("hub", "coo"), ("wide", "transposed"), ("square", "strided")),
]

HALF = [torch.bfloat16, torch.float16]

MULTIPLY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "times": lambda a, x: a * x,
    "plus": lambda a, x: a + x,
    "minus": lambda a, x: a - x,
    "first": lambda a, x: a.expand_as(x),
    "second": lambda a, x: x,
    "pair": lambda a, x: torch.ones_like(x),
}


def messages(a: SparseMatrix, val: Tensor, x: Tensor, multiply: str) -> tuple[Tensor, Tensor]:
    """All messages and weights, ``[nnz, k]`` or ``[nnz, k, heads]``."""
    of_entries = val.unsqueeze(1)
    made = MULTIPLY[multiply](of_entries, x[a.col.long()])
    return made, of_entries.expand_as(made)


def upstream(a: SparseMatrix, val: Tensor, x: Tensor, semiring: str, ties: str = "") -> Tensor:
    """Row by row, by torch's reductions of what is there."""
    add, multiply = semiring.rsplit("_", 1)
    message, weight = messages(a, val, x, multiply)
    rows = []
    for i in range(a.shape[0]):
        own = a.row.long() == i
        m, w = message[own], weight[own]
        if len(m) == 0:
            rows.append(x.new_full(x.shape[1:], ADDITIONS[add]))
        elif add == "weighted_mean":
            rows.append((w * m).sum(0) / w.sum(0))
        elif ties == "winner":
            best = getattr(m, f"a{add}")(0)
            numbers = torch.arange(len(m)).view(-1, *[1] * (m.dim() - 1))
            first = torch.where(m == best, numbers, len(m)).amin(0, keepdim=True)
            rows.append(m.gather(0, first).squeeze(0))
        else:
            reduce = {"plus": Tensor.sum, "min": Tensor.amin, "max": Tensor.amax}
            reduce |= {"logsumexp": Tensor.logsumexp, "mean": Tensor.mean}
            rows.append(reduce[add](m, 0))
    return torch.stack(rows) if rows else x.new_zeros(0, *x.shape[1:])


def check(ours: Callable[..., Tensor], theirs: Callable[..., Tensor], *operands: Tensor) -> None:
    """Equal values in float64, and gradients of all operands on which they depend."""
    first = [t.detach().clone().requires_grad_() for t in operands]
    second = [t.detach().clone().requires_grad_() for t in operands]
    out, expected = ours(*first), theirs(*second)
    torch.testing.assert_close(out, expected)
    grad = randn(*expected.shape, seed=9)
    for one, other in zip(
        gradients(out, first, grad), gradients(expected, second, grad), strict=True
    ):
        torch.testing.assert_close(one, other)


def gradients(out: Tensor, leaves: list[Tensor], grad: Tensor) -> list[Tensor]:
    """Zeros where nothing depends on a leaf."""
    if not out.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    return list(torch.autograd.grad(out, leaves, grad, allow_unused=True, materialize_grads=True))


@pytest.mark.parametrize("semiring", SEMIRINGS)
@pytest.mark.parametrize(("name", "form"), PLACES_AND_FORMS)
@pytest.mark.parametrize("channels", [0, 1, 5])
@pytest.mark.parametrize("heads", [None, 2])
def test_values_and_gradients(
    name: str, form: str, channels: int, heads: int | None, semiring: str
) -> None:
    a = positive(matrix(name, form, heads), semiring)
    size = (a.shape[1], channels) if heads is None else (a.shape[1], channels, heads)

    def ours(val: Tensor, x: Tensor) -> Tensor:
        return fgs.matmul(fgs.val_like(a, val), x, semiring=semiring)

    if channels == 0 or a.nnz == 0:  # where torch knows of no gradient
        x = randn(*size)
        torch.testing.assert_close(ours(a.val, x), upstream(a, a.val, x, semiring))
        return
    check(ours, lambda val, x: upstream(a, val, x, semiring), a.val, randn(*size))
    assert ours(a.val, randn(*size)).is_contiguous()


def positive(a: SparseMatrix, semiring: str) -> SparseMatrix:
    """With sums of weights far from 0, if they are divided by."""
    return fgs.val_like(a, a.val.abs() + 0.5) if "weighted" in semiring else a


@pytest.mark.parametrize("semiring", SEMIRINGS)
def test_vectors(semiring: str) -> None:
    a = positive(matrix("square"), semiring)
    x = randn(6)
    out = fgs.matmul(a, x, semiring=semiring)
    assert torch.equal(out, fgs.matmul(a, x.unsqueeze(1), semiring=semiring).squeeze(1))


@pytest.mark.parametrize("semiring", SEMIRINGS)
def test_rows_without_entries_have_the_identity(semiring: str) -> None:
    """Of any number of entries elsewhere, and without columns, rows or heads, too."""
    identity = ADDITIONS[semiring.rsplit("_", 1)[0]]
    for shape, nnz in (((7, 4), 2), ((7, 4), 0), ((3, 0), 0), ((0, 3), 0)):
        indices = places(shape, nnz) if nnz else torch.empty(2, 0, dtype=torch.int64)
        a = fgs.spmatrix(indices, torch.rand(nnz).requires_grad_(), shape)
        x = torch.randn(shape[1], 3, requires_grad=True)
        out = fgs.matmul(a, x, semiring=semiring)
        assert out.shape == (shape[0], 3)
        empty = torch.ones(shape[0], dtype=torch.bool).index_fill(0, a.row, False)
        assert torch.equal(out[empty], torch.full_like(out[empty], identity))
        if out.requires_grad:
            for grad in torch.autograd.grad(out.sum(), (a.val, x), allow_unused=True):
                assert grad is None or not grad.isnan().any()
    heads = fgs.spmatrix(places((4, 4), 5), torch.randn(5, 0), (4, 4))
    assert fgs.matmul(heads, torch.randn(4, 3, 0), semiring=semiring).shape == (4, 3, 0)


@pytest.mark.parametrize("semiring", ["min_plus", "max_times", "min_minus", "min_second"])
@pytest.mark.parametrize("heads", [None, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF])
@pytest.mark.parametrize("ties", ["split", "winner"])
def test_ties_are_split_evenly_or_have_one_winner(
    semiring: str, heads: int | None, dtype: torch.dtype, ties: str
) -> None:
    """Rows begin with the identity: zeros that are extrema share with nobody."""
    a = matrix("hub", "coo", heads)
    val = a.val.mul(1.5).round().clamp(-1, 1)
    x = randn(40, 4, *([] if heads is None else [heads])).round().clamp(-1, 1)
    leaves, wide = ([t.to(d).requires_grad_() for t in (val, x)] for d in (dtype, torch.float64))
    out = fgs.matmul(fgs.val_like(a, leaves[0]), leaves[1], semiring, ties)
    expected = upstream(a, *wide, semiring, ties)
    assert torch.equal(out.double(), expected)
    grad = randn(*expected.shape).round()
    found, wanted = gradients(out, leaves, grad.to(dtype)), gradients(expected, wide, grad)
    near = {"rtol": 2e-2, "atol": 0.1} if dtype in HALF else {"rtol": 1e-5, "atol": 1e-5}
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, **near)


def test_zeros_that_are_extrema_share_with_nobody() -> None:
    a = fgs.spmatrix(torch.tensor([[0, 0, 1, 1], [0, 1, 0, 2]]), shape=(3, 3))
    x = torch.tensor([[0.0], [0.0], [1.0]], requires_grad=True)
    for semiring in ("min_second", "min_times"):
        (grad,) = torch.autograd.grad(fgs.matmul(a, x, semiring)[:2].sum(), x)
        assert grad.flatten().tolist() == [1.5, 0.5, 0.0]


def test_infinities_are_numbers_of_the_semiring() -> None:
    inf = math.inf
    a = fgs.spmatrix(torch.tensor([[0, 0, 1, 1, 2], [0, 1, 0, 2, 0]]), shape=(4, 3)).double()
    x = torch.tensor([[-inf, inf], [2.0, 1.0], [-inf, 3.0]], dtype=torch.float64)
    for semiring in ("logsumexp_plus", "max_plus", "min_plus", "logsumexp_second"):
        leaf = x.clone().requires_grad_()
        for ties in ("split", "winner"):
            out = fgs.matmul(a, leaf, semiring, ties)
            assert torch.equal(out, upstream(a, a.val, x, semiring))
            (grad,) = torch.autograd.grad(out[out.isfinite()].sum(), leaf)
            assert not grad.isnan().any()


@pytest.mark.parametrize("semiring", DEPENDING)
@pytest.mark.parametrize("ties", ["split", "winner"])
def test_a_message_that_is_no_number_makes_its_row_none(semiring: str, ties: str) -> None:
    a = matrix("square", dtype=torch.float32)
    x = randn(6, 3, dtype=torch.float32)
    x[2, 1] = math.nan
    hit = a.row[a.col == 2].unique()
    for requires_grad in (False, True):
        out = fgs.matmul(a, x.clone().requires_grad_(requires_grad), semiring, ties)
        assert out[hit, 1].isnan().all() and int(out.isnan().sum()) == len(hit)


@pytest.mark.parametrize("semiring", SEMIRINGS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_narrow_dtypes(semiring: str, dtype: torch.dtype) -> None:
    """Rounded once, from what is computed in float32 at least."""
    a = positive(matrix("hub"), semiring).to(dtype=dtype)
    x = randn(40, 8, dtype=dtype)
    exact = upstream(a, a.val.double(), x.double(), semiring)
    torch.testing.assert_close(fgs.matmul(a, x, semiring=semiring), exact.to(dtype))


@pytest.mark.parametrize(("semiring", "ties"), TREATMENTS)
def test_gradients_of_gradients(semiring: str, ties: str) -> None:
    for heads in (None, 2):
        a = positive(matrix("tall", "csc", heads), semiring)
        x = randn(4, 2, *([] if heads is None else [heads])).requires_grad_()
        val = a.val.detach().clone().requires_grad_()

        def product(val: Tensor, x: Tensor, a: SparseMatrix = a) -> Tensor:
            out = fgs.matmul(fgs.val_like(a, val), x, semiring, ties)
            return out[a.pattern.by_row.index.unique()] + 0 * (val.sum() + x.sum())

        assert torch.autograd.gradgradcheck(product, (val, x), atol=1e-4)


@pytest.mark.parametrize("semiring", ["min_plus", "max_second", "logsumexp_times", "mean_plus"])
@pytest.mark.parametrize("ties", ["split", "winner"])
def test_bits_are_equal_for_any_number_of_threads(semiring: str, ties: str) -> None:
    indices = places((300, 300), 40_000)
    val, x = torch.randn(40_000).round(decimals=1), torch.randn(300, 16).round(decimals=1)

    def results() -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (val, x)]
        out = fgs.matmul(fgs.spmatrix(indices, leaves[0], (300, 300)), leaves[1], semiring, ties)
        return [out, *gradients(out, leaves, out.detach())]

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = results()
        for threads in (2, 3, 5):
            torch.set_num_threads(threads)
            assert all(map(torch.equal, results(), expected))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("semiring", SEMIRINGS)
def test_sparse_products(semiring: str) -> None:
    """Entry by entry of what both have in common, with the gradients of both."""
    a = pattern("coo", (5, 6), places((5, 6), 17, distinct=True))
    b = pattern("csc", (6, 4), places((6, 4), 14, distinct=True, seed=3))

    def ours(u: Tensor, v: Tensor) -> Tensor:
        product = fgs.matmul(SparseMatrix(a, u), SparseMatrix(b, v), semiring=semiring)
        assert isinstance(product, SparseMatrix) and not product.has_duplicate()
        return product.val

    def theirs(u: Tensor, v: Tensor) -> Tensor:
        of_b = {(int(r), int(c)): v[e] for e, (r, c) in enumerate(zip(b.row, b.col, strict=True))}
        found: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
        for e, (i, k) in enumerate(zip(a.row.tolist(), a.col.tolist(), strict=True)):
            for j in range(4):
                if (k, j) in of_b:
                    found.setdefault((i, j), []).append((u[e], of_b[k, j]))
        rows = []
        for _, pairs in sorted(found.items()):
            first, second = map(torch.stack, zip(*pairs, strict=True))
            one = fgs.spmatrix(
                torch.stack([torch.zeros(len(pairs)), torch.arange(len(pairs))]).long()
            )
            rows.append(upstream(one, first, second.unsqueeze(1), semiring).squeeze())
        return torch.stack(rows)

    u, v = randn(17), randn(14, seed=6)
    if "weighted" in semiring:
        u = u.abs() + 0.5
    check(ours, theirs, u, v)


def test_of_sparse_matrices_without_a_common_entry() -> None:
    a = fgs.spmatrix(torch.tensor([[0], [1]]), shape=(2, 3))
    product = fgs.matmul(a, fgs.spmatrix(torch.tensor([[2], [1]]), shape=(3, 2)), "min_plus")
    assert product.shape == (2, 2) and product.nnz == 0


@pytest.mark.parametrize(
    "semiring", ["min", "plus", "min-plus", "plus_any", "any_pair", "", None, 3]
)
def test_a_name_that_is_none(semiring: object) -> None:
    a, x = matrix("square"), randn(6, 2)
    for other in (x, matrix("distinct")):
        with pytest.raises(ValueError, match=r"semiring must be.*'logsumexp'.*'second'.*got"):
            fgs.matmul(a, other, semiring=semiring)  # type: ignore[arg-type]


def test_bad_arguments() -> None:
    a, x = matrix("square"), randn(6, 2)
    with pytest.raises(ValueError, match=r"ties must be one of .*'winner'.*got 'last'"):
        fgs.matmul(a, x, semiring="min_plus", ties="last")
    with pytest.raises(AssertionError, match="A must be a SparseMatrix, got Tensor"):
        fgs.matmul(x, x.T, semiring="min_plus")
    with pytest.raises(RuntimeError, match=r"X must be \[m, k\]"):
        fgs.matmul(a, randn(5, 2), semiring="min_plus")
    with pytest.raises(RuntimeError, match="X must have the dtype"):
        fgs.matmul(a, x.float(), semiring="min_plus")
    with pytest.raises(RuntimeError, match="X must be one of"):
        fgs.matmul(fgs.val_like(a, torch.ones(20).long()), x.long(), semiring="min_plus")
    with pytest.raises(RuntimeError, match="duplicate"):
        fgs.matmul(a, a, semiring="min_plus")


def test_operands_in_any_strides() -> None:
    a = matrix("square", "strided", 2)
    x = randn(2, 6, 5).permute(1, 2, 0)[:, ::2]
    for semiring in ("min_plus", "logsumexp_times", "max_second", "plus_plus"):
        torch.testing.assert_close(
            fgs.matmul(a, x, semiring=semiring), upstream(a, a.val, x, semiring)
        )


def test_compiled_code_computes_the_same() -> None:
    a = matrix("square")

    def loss(val: Tensor, x: Tensor) -> Tensor:
        b = fgs.val_like(a, val)
        least = fgs.matmul(b, x.sin(), "min_plus", "winner")
        return least.sum() + fgs.matmul(b, x, "logsumexp_times").cos().sum()

    leaves = a.val.clone().requires_grad_(), randn(6, 3).requires_grad_()
    expected = torch.autograd.grad(loss(*leaves), leaves)
    compiled = torch.compile(loss, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(*leaves), leaves), expected)


@pytest.mark.parametrize("semiring", ["min_plus", "max_second", "logsumexp_plus", "mean_plus"])
def test_a_transform_of_torch_func_is_an_error_and_no_zero(semiring: str) -> None:
    a = matrix("square")
    x = randn(6, 3)
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(fgs.matmul(a, leaf, semiring).sum(), leaf)
    try:
        found = torch.func.grad(lambda x: fgs.matmul(a, x, semiring).sum())(x)
    except RuntimeError:
        return
    torch.testing.assert_close(found, expected)


class Largest(TorchDispatchMode):
    """Of the tensors that operators return."""

    numel = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        found = [t.numel() for t in tree_leaves(out) if isinstance(t, Tensor)]
        self.numel = max(self.numel, *found, 0)
        return out


@pytest.mark.parametrize(("semiring", "ties"), TREATMENTS)
def test_nothing_of_entries_times_channels_is_stored(semiring: str, ties: str) -> None:
    n, nnz, channels = 50, 2000, 32
    val, x = torch.rand(nnz, requires_grad=True), torch.randn(n, channels, requires_grad=True)
    a = fgs.spmatrix(places((n, n), nnz), val, (n, n))
    with Largest() as largest:
        out = fgs.matmul(a, x, semiring, ties)
        if out.requires_grad:
            out.sum().backward()
    assert 0 < largest.numel <= 2 * nnz


def distances(
    row: np.ndarray, col: np.ndarray, length: np.ndarray, num_nodes: int, sources: list[int]
) -> None:
    """Distances from some nodes, by a product after the other until nothing changes."""
    edges = torch.from_numpy(np.stack([col, row])).long()  # a node takes from where edges come
    a = fgs.spmatrix(edges, torch.from_numpy(length), (num_nodes, num_nodes))
    d = torch.full((num_nodes, len(sources)), math.inf, dtype=torch.float64)
    d[sources, range(len(sources))] = 0.0
    for _ in range(num_nodes):
        before, d = d, torch.minimum(d, fgs.matmul(a, d, semiring="min_plus"))
        if torch.equal(before, d):
            break
    graph = coo_array((length, (row, col)), shape=(num_nodes, num_nodes)).tocsr()
    expected = torch.from_numpy(dijkstra(graph, indices=sources)).T
    torch.testing.assert_close(d, expected, rtol=1e-12, atol=0)


def test_shortest_paths() -> None:
    """Of a directed graph, some of whose nodes are beyond reach."""
    generator = np.random.default_rng(0)
    indices = places((120, 120), 260, distinct=True).numpy()
    length = generator.uniform(0.1, 2.0, 260)
    distances(indices[0], indices[1], length, 120, [0, 7, 33])


@pytest.mark.skipif("FASTGRAPH_DATA" not in os.environ, reason="FASTGRAPH_DATA is not set")
def test_shortest_paths_of_a_mesh() -> None:
    wing = np.load(Path(os.environ["FASTGRAPH_DATA"]) / "wing.npz")
    row, col = wing["edge_index"]
    length = np.random.default_rng(1).uniform(0.1, 2.0, len(row))
    distances(row, col, length, int(wing["num_nodes"]), [0, 31_000])


def test_the_structure_of_a_sparse_product_is_made_once() -> None:
    a = pattern("coo", (5, 6), places((5, 6), 17, distinct=True))
    first = SparseMatrix(a, randn(17)) @ SparseMatrix(a, randn(17)).T
    second = SparseMatrix(a, randn(17, seed=2)) @ SparseMatrix(a, randn(17, seed=3)).T
    assert first.pattern is second.pattern
    other = SparseMatrix(a, randn(17)).T @ SparseMatrix(a, randn(17))
    assert other.shape == (6, 6) and other.pattern is not first.pattern
    torch.testing.assert_close(other.to_dense().trace(), (dense(a, randn(17)) ** 2).sum())


def test_what_a_sparse_product_gave_out_may_be_edited() -> None:
    a = pattern("coo", (5, 5), places((5, 5), 12, distinct=True))
    square = SparseMatrix(a, randn(12)) @ SparseMatrix(a, randn(12))
    expected = square.to_dense()
    square.indices().zero_()
    with pytest.raises(RuntimeError, match="edited"):
        square.to_dense()
    again = SparseMatrix(a, randn(12)) @ SparseMatrix(a, randn(12))
    torch.testing.assert_close(again.to_dense(), expected)


def test_indices_that_are_edited_make_no_sparse_product() -> None:
    indices = places((5, 5), 12, distinct=True)
    a = SparseMatrix(pattern("coo", (5, 5), indices), randn(12))
    _ = a @ a
    indices.zero_()
    with pytest.raises(RuntimeError, match="edited"):
        _ = a @ a
