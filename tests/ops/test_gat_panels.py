"""``gat`` head by head (csrc/cpu/gat_panels.cpp) gives what it gives for all heads at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fastgraph import ops
from fastgraph.machine import native
from fastgraph.plugins.backend import FLOATING
from tests.graphs import Case, all_cases, hub_edges, random_edges

from .test_heads import error_ratios, inputs_of, transposed, upstream, with_gradients

WHOLE_HEADS = 1000  # channels, more than any head below has
HUB = Case("hub", hub_edges(60, 12_000), 60, 60)


@pytest.fixture
def by_head() -> Iterator[Callable[[bool], None]]:
    """Switches between one head after the other, which is on, and all at once."""
    library = native.library()

    def switch(on: bool) -> None:
        library.force_panels(WHOLE_HEADS if on else -1)

    switch(True)
    yield switch
    library.force_panels(0)


def gat(inputs: list[Tensor], case: Case, **options: Any) -> Tensor:
    return ops.gat(*inputs, case.edge_index, **options)[0]


@pytest.mark.parametrize(
    ("dropout", "transpose"), [(0.0, False), (0.4, True)], ids=["all", "transposed-dropout"]
)
@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_float64_equals_all_heads_at_once(
    case: Case, dropout: float, transpose: bool, by_head: Callable[[bool], None]
) -> None:
    inputs = inputs_of("gat", transposed(case) if transpose else case, heads=3, channels=37)
    addend = torch.randn(1, 3, 37, dtype=torch.float64)
    options = {"dropout": dropout, "seed": torch.tensor([7]), "transpose": transpose}

    def call() -> list[Tensor]:
        return with_gradients(lambda t: gat(t, case, addend=addend, **options), inputs)

    found = call()
    by_head(False)
    for a, b in zip(found, call(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("scale", [1.0, 30.0], ids=["usual", "saturated"])
@pytest.mark.parametrize(
    "edges", [hub_edges(60, 12_000), random_edges(60, 60, 900)], ids=["hub", "random"]
)
def test_float32_is_as_close_as_upstream(
    edges: Tensor, scale: float, by_head: Callable[[bool], None]
) -> None:
    case = Case("square", edges, 60, 60)
    exact = inputs_of("gat", case, heads=2, channels=40, scale=scale)
    rounded = [t.float() for t in exact]
    exact = [t.double() for t in rounded]
    truth = with_gradients(lambda t: upstream("gat", t, case), exact)
    theirs = with_gradients(lambda t: upstream("gat", t, case), rounded)
    ours = with_gradients(lambda t: gat(t, case), rounded)
    assert max(error_ratios(ours, theirs, truth)) < 3


def test_the_gradient_of_statistics(by_head: Callable[[bool], None]) -> None:
    inputs = inputs_of("gat", HUB, heads=2, channels=20)
    grad, grad_stats = torch.randn(60, 2, 20).double(), torch.randn(60, 2, 2).double()

    def call() -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in inputs]
        out, _, stats = ops.gat(*leaves, HUB.edge_index)
        return torch.autograd.grad([out, stats], leaves, [grad, grad_stats])

    found = call()
    by_head(False)
    for a, b in zip(found, call(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("node", [3, 30], ids=["connected", "isolated"])
@pytest.mark.parametrize("where", ["x", "score_src", "score_dst", "grad"])
def test_what_is_not_finite_reaches_what_it_reaches_at_once(
    where: str, node: int, value: float, by_head: Callable[[bool], None]
) -> None:
    case = Case("square", random_edges(30, 30, 200), 31, 31)
    inputs = inputs_of("gat", case, heads=2, channels=20)
    grad = torch.randn(31, 2, 20, dtype=torch.float64)
    places = ("x", "score_src", "score_dst", "grad")
    [*inputs, grad][places.index(where)][node, 1].view(-1)[0] = value

    def call() -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in inputs]
        out = gat(leaves, case)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    found = call()
    by_head(False)
    for a, b in zip(found, call(), strict=True):
        assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.isinf(), b.isinf())
        assert a[:, 0].isfinite().all()  # no other head


@pytest.mark.parametrize("channels", [1, 17], ids=["a line", "lines"])
@pytest.mark.parametrize("dropout", [0.0, 0.4], ids=["all", "dropout"])
def test_parts_of_heads(channels: int, dropout: float, by_head: Callable[[bool], None]) -> None:
    """Forward, where exponentials are vectorised; what follows them is the same for all parts."""
    x, *scores = (t.float() for t in inputs_of("gat", HUB, heads=2, channels=40))
    options = {"dropout": dropout, "seed": torch.tensor([7]), "addend": torch.randn(60, 2, 40)}

    def call() -> Tensor:
        return gat([x, *scores], HUB, **options)

    whole = call()
    native.library().force_panels(channels)
    parts = call()
    by_head(False)
    assert torch.equal(parts, whole)
    torch.testing.assert_close(parts, call())


def test_heads_one_by_one_add_up_in_another_order(by_head: Callable[[bool], None]) -> None:
    """By which the other tests are known to compare two kernels."""
    inputs = [t.float() for t in inputs_of("gat", HUB, heads=2, channels=40)]
    found = with_gradients(lambda t: gat(t, HUB), inputs)
    by_head(False)
    at_once = with_gradients(lambda t: gat(t, HUB), inputs)
    assert not any(torch.equal(a, b) for a, b in zip(found, at_once, strict=True))


@pytest.mark.parametrize("dtype", FLOATING)
def test_results_do_not_depend_on_threads(
    dtype: torch.dtype, by_head: Callable[[bool], None], restore_threads: None
) -> None:
    inputs = [t.to(dtype) for t in inputs_of("gat", HUB, heads=2, channels=24)]
    runs = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        runs.append(with_gradients(lambda t: gat(t, HUB), inputs))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    exact = with_gradients(lambda t: gat(t, HUB), [t.double() for t in inputs])
    for found, expected in zip(runs[0], exact, strict=True):
        error = (found.double() - expected).norm() / expected.norm()
        assert error < 10 * torch.finfo(dtype).eps  # a row has 6,000 entries
