"""Plans of products, with a cuSPARSE of the CPU that insists on how the library is to be called."""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastgraph import Graph, settings
from fastgraph.backends import reference, sparse
from fastgraph.backends.cusparse import ALGORITHMS, CuSparseSpmm
from fastgraph.graphs.memo import MEMO
from fastgraph.machine import native as native_libraries
from tests.cuda.benchmarks import measure
from tests.cuda.cusparse import library
from tests.cuda.cusparse.library import Counts
from tests.graphs import random_edges

SRC, DST = 20, 30
EDGES = random_edges(SRC, DST, 300).unique(dim=1)
EDGES = EDGES[:, torch.randperm(EDGES.shape[1])]
CSR_ALG2 = 6  # as cusparse.h numbers it


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Counts]:
    why_not = library.why_unavailable()
    if why_not is not None:
        pytest.skip(why_not)
    return library.load()


@pytest.fixture
def native(loaded: tuple[Any, Counts]) -> Any:
    return loaded[0]


@pytest.fixture
def counts(loaded: tuple[Any, Counts]) -> Iterator[Counts]:
    MEMO.clear()
    found = loaded[1]
    found.prepared = found.products = found.unsupported_algorithm = found.failure = 0
    yield found
    found.unsupported_algorithm = found.failure = 0


@pytest.fixture
def kernel(native: Any, counts: Counts) -> CuSparseSpmm:
    return CuSparseSpmm(lambda: native, 2)


def features(width: int = 5, rows: int = SRC, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, width, dtype=dtype)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduce", ["sum", "mean", "mean_adjoint"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
def test_products(
    native: Any,
    counts: Counts,
    dtype: torch.dtype,
    reduce: str,
    weighted: bool,
    transpose: bool,
    algorithm: int,
) -> None:
    kernel = CuSparseSpmm(lambda: native, algorithm)
    graph = Graph(EDGES, SRC, DST)
    weight = torch.rand(EDGES.shape[1], dtype=dtype) if weighted else None
    x = features(rows=DST if transpose else SRC, dtype=dtype)
    arguments = (graph, x, weight, reduce, transpose)
    if dtype.itemsize == 2 and reduce != "sum":
        assert not kernel.fits(*arguments)
        return
    assert kernel.fits(*arguments)
    torch.testing.assert_close(kernel(*arguments), reference.spmm(*arguments))
    assert (counts.prepared, counts.products) == (1, 1)


def test_a_plan_serves_all_products_of_its_kind(kernel: CuSparseSpmm, counts: Counts) -> None:
    graph = Graph(EDGES, SRC, DST)
    weights = [None, *torch.rand(3, EDGES.shape[1])]
    for weight in weights:
        for reduce in ("sum", "mean"):
            arguments = (graph, features(), weight, reduce, False)
            torch.testing.assert_close(kernel(*arguments), reference.spmm(*arguments))
    assert (counts.prepared, counts.products) == (1, 8)
    kernel(graph, features(7), None, "sum", False)
    kernel(graph, features(dtype=torch.float64), None, "sum", False)
    kernel(graph, features(rows=DST), None, "sum", True)
    assert counts.prepared == 4


def test_values_are_kept_unless_a_gradient_changes_them(
    kernel: CuSparseSpmm, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = 0

    def matrix_values(*arguments: Any) -> Tensor:
        nonlocal made
        made += 1
        return original(*arguments)

    original = sparse.matrix_values
    monkeypatch.setattr(sparse, "matrix_values", matrix_values)
    graph, x, weight = Graph(EDGES, SRC, DST), features(), torch.rand(EDGES.shape[1])
    for _ in range(3):
        kernel(graph, x, None, "mean", False)
        kernel(graph, x, weight, "sum", False)
    assert made == 2
    before = kernel(graph, x, weight, "sum", False)
    weight.mul_(2)
    torch.testing.assert_close(kernel(graph, x, weight, "sum", False), 2 * before)
    entries = len(MEMO)
    learned = weight.clone().requires_grad_()
    for _ in range(3):
        kernel(graph, x, learned, "sum", False)
        with torch.no_grad():
            learned.mul_(2)
    assert len(MEMO) == entries


def test_plans_go_with_the_graph(kernel: CuSparseSpmm, counts: Counts) -> None:
    before = counts.matrices
    graph = Graph(EDGES, SRC, DST)
    kernel(graph, features(), None, "sum", False)
    kernel(graph, features(7), None, "sum", False)
    assert counts.matrices == before + 6
    kernel.forget(graph, features(7), False)
    assert counts.matrices == before + 3
    del graph
    MEMO.trim()
    assert counts.matrices == before


def test_the_first_look_at_a_device_asks_for_new_values(
    loaded: tuple[Any, Counts], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_libraries, "cuda_library", lambda: loaded[0])
    is_right, found = measure("preflight").new_values(torch.device("cpu"))
    assert is_right and "algorithms (1, 2, 3)" in found


def test_what_does_not_fit(kernel: CuSparseSpmm, counts: Counts, native: Any) -> None:
    graph, x = Graph(EDGES, SRC, DST), features()
    assert kernel.fits(graph, x, None, "sum", False)
    twice = Graph(torch.cat([EDGES, EDGES[:, :1]], dim=1), SRC, DST)
    assert not kernel.fits(twice, x, None, "sum", False)
    assert not kernel.fits(graph, x[:, :0], None, "sum", False)
    misaligned = torch.randn(SRC * 5 + 1)[1:].view(SRC, 5)
    assert not kernel.fits(graph, misaligned, None, "sum", False)
    counts.unsupported_algorithm = CSR_ALG2
    assert not kernel.fits(graph, features(9), None, "sum", False)
    assert CuSparseSpmm(lambda: native, 3).fits(graph, features(9), None, "sum", False)
    for without in (SimpleNamespace(), SimpleNamespace(plan_product=None, cusparse_version=int)):
        assert not CuSparseSpmm(lambda w=without: w, 2).fits(graph, x, None, "sum", False)


@pytest.mark.parametrize(
    ("failure", "error"),
    [(6, RuntimeError), (2, torch.OutOfMemoryError), (11, torch.OutOfMemoryError)],
)
def test_errors_of_the_library_are_raised(
    kernel: CuSparseSpmm, counts: Counts, failure: int, error: type[Exception]
) -> None:
    counts.failure = failure
    with pytest.raises(error, match="cusparseSpMM: an error of the stand-in"):
        kernel(Graph(EDGES, SRC, DST), features(), None, "sum", False)


def test_rows_live_until_they_were_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan has their addresses alone, and the memo may let go of them at any time."""
    monkeypatch.setattr(settings, "_current", settings.current().replace(cache_bytes=0))
    products = 0

    def plan_product(ptr: Tensor, col: Tensor, *_: Any) -> Callable[..., None]:
        rows = weakref.ref(ptr), weakref.ref(col)

        def product(*_: Tensor) -> None:
            nonlocal products
            assert all(row() is not None for row in rows)
            products += 1

        return product

    kernel = CuSparseSpmm(lambda: SimpleNamespace(plan_product=plan_product), 2)
    kernel(Graph(EDGES, SRC, DST), features(), None, "sum", False)
    assert products == 1


def test_another_thread_may_forget_a_plan_at_once(
    kernel: CuSparseSpmm, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Forgotten(dict[Any, Any]):
        def __setitem__(self, *_: Any) -> None:
            pass

    graph, x = Graph(EDGES, SRC, DST), features()
    rows = sparse.sorted_rows(graph, False)._replace(plans=Forgotten())
    monkeypatch.setattr(sparse, "sorted_rows", lambda graph, transpose: rows)
    found = kernel(graph, x, None, "sum", False)
    torch.testing.assert_close(found, reference.spmm(graph, x, None, "sum", False))


def test_arguments_are_checked(native: Any, counts: Counts) -> None:
    ptr, col = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    values, x, out = torch.ones(2), torch.randn(2, 4), torch.empty(2, 4)
    run = native.plan_product(ptr, col, values, x, out, 1)
    run(values, x, out)
    torch.testing.assert_close(out, x)
    for wrong, error, message in (
        ((ptr.long(), col, values, x, out, 1), TypeError, "rowptr must be int32, got int64"),
        ((ptr, col, values[:1], x, out, 1), ValueError, r"values must have shape \[2\]"),
        ((ptr, col, values, x.double(), out, 1), TypeError, "values must be float64"),
        ((ptr, col, values, x, out[:1], 1), ValueError, r"out must have shape \[2, 4\]"),
        ((ptr, col, values, x, out, 4), ValueError, "algorithm must be 1, 2 or 3, got 4"),
    ):
        with pytest.raises(error, match=message):
            native.plan_product(*wrong)
    with pytest.raises(ValueError, match=r"x must have shape \[2, 4\], got \[2, 5\]"):
        run(values, torch.randn(2, 5), out)
    with pytest.raises(ValueError, match="x must be aligned to 16 bytes"):
        run(values, torch.randn(9)[1:].view(2, 4), out)


def test_the_version_is_that_of_the_library_in_the_process(native: Any) -> None:
    assert native.cusparse_version() == 12_304
    script = f"""
import torch, tvm_ffi
library = tvm_ffi.load_module({str(library.build()[1])!r})
assert library.cusparse_version() == 0
ptr, col = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0], dtype=torch.int32)
library.plan_product(ptr, col, torch.ones(1), torch.ones(1, 1), torch.ones(1, 1), 1)
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "RuntimeError: torch has not loaded cuSPARSE 12" in process.stderr
