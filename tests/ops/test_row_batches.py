"""Rows that CPU kernels take in batches (csrc/include/fastgraph/row_batch.h).

Rows of many entries, which are batches of their own where heads are narrow, rows that are cut and
empty rows end a batch or lie in one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastgraph.backends.dropout import philox
from fastgraph.machine import native
from tests.graphs import Case, random_edges

from .test_edge_projection import sized_inputs
from .test_heads import (
    OPERATORS,
    both,
    call_with_edges,
    error_ratios,
    inputs_of,
    operator,
    upstream,
    upstream_with_edges,
    with_gradients,
)

MOST_HEADS = 32  # that batches are made of
SHAPES = ((1, 7), (1, 64), (2, 5), (3, 1), (4, 16), (8, 8), (8, 7), (8, 16), (12, 3), (33, 2))
# Heads that share vectors of one level or another: in all numbers of vectors, and with some left.
NARROW = ((15, 2), (15, 4), (15, 8), (6, 1))


def _mixed(degrees: list[int], num_src: int = 70) -> Case:
    """Destinations with so many edges each, in any order of the edges."""
    dst = torch.arange(len(degrees)).repeat_interleave(torch.tensor(degrees))
    src = random_edges(num_src, 1, dst.numel(), seed=3)[0]
    order = torch.randperm(dst.numel(), generator=torch.Generator().manual_seed(4))
    return Case("mixed", torch.stack([src, dst])[:, order], num_src, len(degrees))


LOW = _mixed([place % 10 for place in range(90)])
MIXED = _mixed([0, 2, 5000, 1, 0, 0, 32, 33, 3, 9, 100, 31, 4, 0, 700, 65, 64, 4096, 1])


@pytest.fixture(params=native.available_levels())
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each instruction set in turn."""
    library = native.library(request.param)
    monkeypatch.setattr(native, "_default_library", lambda: library)


@pytest.mark.parametrize("transpose", [False, True], ids=["forward", "transposed"])
@pytest.mark.parametrize("shape", SHAPES + NARROW, ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_values_and_gradients(
    name: str, shape: tuple[int, int], transpose: bool, level: None
) -> None:
    for case in (LOW, MIXED):
        ends = Case("", case.edge_index, case.num_dst, case.num_src) if transpose else case
        exact = inputs_of(name, ends, *shape)

        def ours(t: list[Tensor], case: Case = case) -> Tensor:
            return operator(name)(*t, case.edge_index, transpose=transpose)

        def theirs(t: list[Tensor], case: Case = case) -> Tensor:
            return upstream(name, t, case, transpose)

        for a, b in zip(with_gradients(ours, exact), with_gradients(theirs, exact), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", [LOW, MIXED], ids=["low", "mixed"])
@pytest.mark.parametrize("shape", [(1, 7), (8, 8), (8, 16), (4, 3), *NARROW], ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_float32_is_as_close_as_upstream(
    name: str, shape: tuple[int, int], case: Case, level: None
) -> None:
    rounded = [t.float() for t in inputs_of(name, case, *shape)]
    truth = with_gradients(lambda t: upstream(name, t, case), [t.double() for t in rounded])
    theirs = with_gradients(lambda t: upstream(name, t, case), rounded)
    ours = with_gradients(lambda t: operator(name)(*t, case.edge_index), rounded)
    assert max(error_ratios(ours, theirs, truth)) < 3


def test_sums_over_all_edges_are_as_close_as_upstream(level: None) -> None:
    """The gradient of ``att``: one long sum errs 1.8 times as much."""
    case = _mixed([8] * 20_000, num_src=20_000)
    rounded = [t.float() for t in inputs_of("gatv2", case, 4, 16)]
    truth = with_gradients(lambda t: upstream("gatv2", t, case), [t.double() for t in rounded])[-1]
    theirs = with_gradients(lambda t: upstream("gatv2", t, case), rounded)[-1]
    ours = with_gradients(lambda t: operator("gatv2")(*t, case.edge_index), rounded)[-1]
    assert (ours - truth).norm() < 1.5 * (theirs - truth).norm()


@pytest.mark.parametrize("channels", [8, 12])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPERATORS)
def test_halves_are_as_close_as_upstream(
    name: str, dtype: torch.dtype, channels: int, level: None
) -> None:
    rounded = [t.to(dtype) for t in inputs_of(name, LOW, 8, channels)]
    truth = with_gradients(lambda t: upstream(name, t, LOW), [t.double() for t in rounded])
    theirs = with_gradients(lambda t: upstream(name, t, LOW), rounded)
    ours = with_gradients(lambda t: operator(name)(*t, LOW.edge_index), rounded)
    assert max(error_ratios(ours, theirs, truth)) < 2


@pytest.mark.parametrize("edge_dim", [1, 4])
@pytest.mark.parametrize("shape", [*NARROW, (4, 3), (8, 16)], ids=str)
@pytest.mark.parametrize("name", ["gatv2", "attention"])
def test_narrow_heads_with_features_of_edges(
    name: str, shape: tuple[int, int], edge_dim: int, level: None
) -> None:
    """Sums of edges part the heads of attention's output and of its queries."""
    inputs = sized_inputs(name, MIXED, *shape, edge_dim)
    ours = with_gradients(lambda t: both(call_with_edges(name, t, MIXED)), inputs)
    theirs = with_gradients(lambda t: both(upstream_with_edges(name, t, MIXED)), inputs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("heads", "channels"), [(1, 6), (3, 6), (8, 6), (7, 4), (7, 2)])
@pytest.mark.parametrize("name", OPERATORS)
def test_dropout_and_addend(name: str, heads: int, channels: int, level: None) -> None:
    inputs = inputs_of(name, MIXED, heads, channels)
    words = philox(11, MIXED.num_edges, heads, torch.device("cpu"))
    keep = (words >= 0.4 * 2**32).double() / 0.6
    addend = torch.randn(MIXED.num_dst, heads, channels, dtype=torch.float64)
    options: dict[str, Any] = {"dropout": 0.4, "seed": torch.tensor([11]), "addend": addend}

    def ours(t: list[Tensor]) -> Tensor:
        return operator(name)(*t, MIXED.edge_index, **options)

    def theirs(t: list[Tensor]) -> Tensor:
        return upstream(name, t, MIXED, keep=keep) + addend

    for a, b in zip(with_gradients(ours, inputs), with_gradients(theirs, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_more_heads_are_taken_by_other_kernels(level: None) -> None:
    """The same numbers, added up in another order."""
    inputs = [t.float() for t in inputs_of("gat", LOW, MOST_HEADS + 1, 8)]
    of_all = operator("gat")(*inputs, LOW.edge_index)[:, :MOST_HEADS]
    of_most = operator("gat")(*(t[:, :MOST_HEADS] for t in inputs), LOW.edge_index)
    assert not torch.equal(of_all, of_most)
    torch.testing.assert_close(of_all, of_most)


@pytest.mark.parametrize(
    ("heads", "channels", "is_batch"), [(8, 8, True), (8, 17, False), (7, 8, False)]
)
@pytest.mark.parametrize("name", ["gatv2", "attention"])
def test_long_rows_of_narrow_heads_are_batches(
    name: str, heads: int, channels: int, is_batch: bool, level: None
) -> None:
    """More heads than batches have are taken by blocks, which add up in another order."""
    case = _mixed([700])
    inputs = [t.float() for t in inputs_of(name, case, MOST_HEADS + 4, channels)]
    by_blocks = operator(name)(*inputs, case.edge_index)[:, :heads]
    found = operator(name)(*(t[:, :heads] for t in inputs), case.edge_index)
    assert torch.equal(found, by_blocks) != is_batch
    torch.testing.assert_close(found, by_blocks)


@pytest.mark.parametrize("shape", [(8, 8), (7, 4)], ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_a_row_does_not_depend_on_those_beside_it(
    name: str, shape: tuple[int, int], level: None
) -> None:
    for case, rows in [(LOW, range(3, 90, 7)), (LOW, range(40, 60)), (MIXED, range(7, 18, 2))]:
        inputs = [t.float() for t in inputs_of(name, case, *shape)]
        whole = operator(name)(*inputs, case.edge_index)
        kept = case.edge_index[:, torch.isin(case.edge_index[1], torch.tensor(list(rows)))]
        assert torch.equal(operator(name)(*inputs, kept)[list(rows)], whole[list(rows)])


@pytest.mark.parametrize("name", OPERATORS)
def test_threads_do_not_change_a_bit(name: str, restore_threads: None) -> None:
    case = _mixed([place % 10 for place in range(3000)] + [5000, 3, 40] + [2] * 2000, 3000)
    inputs = [t.float() for t in inputs_of(name, case, 8, 8)]
    results = []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        results.append(with_gradients(lambda t: operator(name)(*t, case.edge_index), inputs))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
