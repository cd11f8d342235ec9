"""Guards: what a GPU finds out about its tensors while the host goes on."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from fastgraph import ops
from fastgraph.graphs import memo
from fastgraph.graphs.memo import MEMO
from fastgraph.graphs.witness import Guard, StaleGraphError, spoil_stale_results
from fastgraph.registry.registry import REGISTRY
from tests.conftest import selected
from tests.graphs import random_edges
from tests.simt.backend import emulator
from tests.simt.library import SimtError

DTYPES = [torch.int64, torch.int32, torch.float32, torch.float64, torch.bfloat16, torch.bool]


@pytest.fixture(autouse=True)
def _simt() -> Iterator[None]:
    yield from selected("simt")


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the CPU are watched as those on a GPU are."""

    def witness_of(tensors: Sequence[Tensor], *, may_raise: bool) -> Guard:
        return Guard(tensors, emulator().functions)

    MEMO.clear()
    monkeypatch.setattr(memo, "witness_of", witness_of)


def _total(tensor: Tensor) -> int:
    total = torch.empty(1, dtype=torch.int64)
    emulator().functions.record_content(tensor, total)
    return int(total)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [0, 1, 127, 128, 129, 5000])
def test_totals_depend_on_every_element_and_its_place(size: int, dtype: torch.dtype) -> None:
    numbers = torch.randint(0, 2, (size,)).to(dtype)
    totals = {_total(numbers)}
    assert {_total(numbers), _total(torch.cat([numbers[:1], numbers])[1:])} == totals
    for place in range(0, size, max(size // 9, 1)):
        edited = numbers.clone()
        edited[place] = not edited[place]
        totals.add(_total(edited))
    expected = 1 + len(range(0, size, max(size // 9, 1)))
    if size > 1 and not torch.equal(numbers, numbers.flip(0)):
        totals.add(_total(numbers.flip(0)))
        expected += 1
    assert len(totals) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [0, 1, 1000])
def test_results_are_spoiled_only_if_something_changed(size: int, dtype: torch.dtype) -> None:
    out = torch.ones(size, dtype=dtype)
    for changed in (0, 1):
        emulator().functions.fill_with_nan_if(torch.tensor([changed], dtype=torch.int32), out)
        assert bool(out.isnan().all()) if changed else torch.equal(out, torch.ones_like(out))


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("backward", [False, True])
def test_a_stale_graph_gives_nan_then_an_error_then_the_right_result(backward: bool) -> None:
    edges, x = random_edges(9, 9, 30), torch.randn(9, 3)

    def step() -> Tensor:
        leaf = x.clone().requires_grad_(backward)
        out = ops.spmm(leaf, edges)
        return torch.autograd.grad(out.sum(), leaf)[0] if backward else out

    step()
    edges.numpy()[:] = edges.flip(0).numpy()
    try:
        spoiled = step()
    except StaleGraphError:  # in the backward pass, which comes after what the forward pass found
        assert backward
    else:
        assert not backward and spoiled.isnan().all()
        with pytest.raises(StaleGraphError, match="before a call of spmm"):
            step()
    found = step()
    REGISTRY.select("cpu")
    MEMO.clear()
    torch.testing.assert_close(found, step())


@pytest.mark.usefixtures("guarded")
def test_an_edit_that_was_undone_is_reported_all_the_same() -> None:
    edges, x = random_edges(9, 9, 30), torch.randn(9, 3)
    expected = ops.spmm(x, edges)
    edges.numpy()[0, 0] += 1
    assert ops.spmm(x, edges).isnan().all()
    edges.numpy()[0, 0] -= 1
    with pytest.raises(StaleGraphError):
        ops.spmm(x, edges)
    assert torch.equal(ops.spmm(x, edges), expected)


@pytest.mark.usefixtures("guarded")
def test_edited_weights_spoil_the_next_operator() -> None:
    """An edit that a layer's lookup finds, before it calls an operator, counts for the operator."""
    edges, x, weight = random_edges(9, 9, 30), torch.randn(9, 3), torch.rand(30)
    expected = ops.gcn(x, edges, weight)
    assert torch.equal(ops.gcn(x, edges, weight), expected)
    weight.numpy()[:] *= 3
    assert ops.gcn(x, edges, weight).isnan().all()
    assert not ops.spmm(x, edges).isnan().any()
    with pytest.raises(StaleGraphError):
        ops.gcn(x, edges, weight)


def test_nothing_is_spoiled_without_a_question() -> None:
    out = torch.ones(3)
    spoil_stale_results("spmm", out)
    gc.collect()
    assert torch.equal(out, torch.ones(3))


def test_bad_input() -> None:
    functions, total = emulator().functions, torch.empty(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="tensor must be contiguous"):
        functions.record_content(torch.zeros(2, 3).t(), total)
    with pytest.raises(TypeError, match="total must be int64, got int32"):
        functions.record_content(torch.zeros(2), total.int())
    with pytest.raises((TypeError, SimtError), match="out must be float32, float64"):
        functions.fill_with_nan_if(torch.zeros(1, dtype=torch.int32), torch.zeros(3).int())
