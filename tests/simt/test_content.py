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

    def witness_of(tensors: Sequence[Tensor], *, may_raise: bool, held: object) -> Guard:
        return Guard(tensors, emulator().functions)

    MEMO.clear()
    monkeypatch.setattr(memo, "witness_of", witness_of)
    monkeypatch.setattr("fastgraph.graphs.edges.is_found_by_content", lambda *_: False)


def _sums(tensor: Tensor, count: int = 3) -> tuple[int, ...]:
    sums = torch.empty(count, dtype=torch.int64)
    emulator().functions.sum_content(tensor, sums)
    return tuple(sums.tolist())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [0, 1, 127, 128, 129, 5000])
def test_sums_depend_on_every_element_and_its_place(size: int, dtype: torch.dtype) -> None:
    numbers = torch.randint(0, 2, (size,)).to(dtype)
    found = {_sums(numbers)}
    assert {_sums(numbers), _sums(torch.cat([numbers[:1], numbers])[1:])} == found
    for place in range(0, size, max(size // 9, 1)):
        edited = numbers.clone()
        edited[place] = not edited[place]
        found.add(_sums(edited))
    expected = 1 + len(range(0, size, max(size // 9, 1)))
    if size > 1 and not torch.equal(numbers, numbers.flip(0)):
        found.add(_sums(numbers.flip(0)))
        expected += 1
    assert len(found) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [0, 1, 1000, 40_000])
@pytest.mark.parametrize("num_sums", [1, 130])
def test_results_are_spoiled_only_if_something_changed(
    size: int, num_sums: int, dtype: torch.dtype
) -> None:
    expected, seen, out = torch.randn(num_sums).long(), torch.zeros(1).long(), torch.ones(size)
    out = out.to(dtype)
    spoil = emulator().functions.spoil_if_changed
    spoil(expected.clone(), expected, seen, 7, out)
    assert torch.equal(out, torch.ones_like(out)) and seen.item() == 0
    found = expected.clone()
    found[-1] += 1
    spoil(found, expected, seen, 7, out)
    assert bool(out.isnan().all()) and seen.item() == 7


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
    functions, sums = emulator().functions, torch.zeros(2, dtype=torch.int64)
    seen, out = torch.zeros(1, dtype=torch.int64), torch.zeros(3)
    with pytest.raises(ValueError, match="tensor must be contiguous"):
        functions.sum_content(torch.zeros(2, 3).t(), sums)
    with pytest.raises(TypeError, match="sums must be int64, got int32"):
        functions.sum_content(torch.zeros(2), sums.int())
    with pytest.raises(ValueError, match="sums must not be empty"):
        functions.sum_content(torch.zeros(2), sums[:0])
    with pytest.raises(ValueError, match="expected must"):
        functions.spoil_if_changed(sums, sums[:1], seen, 1, out)
    with pytest.raises(ValueError, match="seen must"):
        functions.spoil_if_changed(sums, sums, sums, 1, out)
    with pytest.raises((TypeError, SimtError), match="out must be float32, float64"):
        functions.spoil_if_changed(sums, sums, seen, 1, out.int())


@pytest.mark.usefixtures("guarded")
def test_a_profiler_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes calls through the dispatcher, as compiled code does, whose tensors are compared."""
    edges, x = random_edges(9, 9, 30), torch.randn(9, 3, requires_grad=True)

    def step() -> Tensor:
        return torch.autograd.grad(ops.spmm(x, edges).sum(), x)[0]

    expected = step()
    monkeypatch.setattr(MEMO, "put", pytest.fail)
    with torch.profiler.profile():
        assert torch.equal(step(), expected)


@pytest.mark.usefixtures("guarded")
def test_a_question_without_results_is_answered() -> None:
    """An operator whose results are integers, or none, leaves the error to the next question."""
    edges = random_edges(9, 9, 30)
    guard = Guard([edges], emulator().functions)
    edges[0, 0] += 1
    assert guard.confirms([edges])
    spoil_stale_results("an operator", torch.zeros(3, dtype=torch.int64))
    with pytest.raises(StaleGraphError):
        guard.confirms([edges])
