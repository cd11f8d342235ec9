"""Attention whose edges carry features of all widths, beside PyG's formulas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastgraph import ops
from fastgraph.machine import native
from tests.emulated import repeats_but
from tests.graphs import Case, hub_edges, random_edges

from .test_heads import (
    Inputs,
    both,
    call_with_edges,
    error_ratios,
    inputs_of,
    operator,
    upstream,
    upstream_with_edges,
    with_gradients,
)

NAMES = ("gatv2", "attention")
# Rows of no, few and many entries, some together and some longer than what is projected at once.
RAGGED = Case(
    "ragged",
    torch.cat(
        [random_edges(40, 60, 150), torch.stack([torch.arange(401) % 40, torch.full((401,), 7)])], 1
    ),
    40,
    64,
)
CUT = Case("cut", hub_edges(40, 9_000), 40, 40)


def sized_inputs(name: str, case: Case, heads: int, channels: int, edge_dim: int) -> Inputs:
    """As :func:`edge_inputs_of` has them, with other numbers of heads and channels."""
    inputs = inputs_of(name, case, heads, channels)
    edge = torch.randn(case.num_edges, edge_dim, dtype=torch.float64)
    if name == "gatv2":
        return [*inputs, edge, torch.randn(heads, edge_dim, channels, dtype=torch.float64)]
    query = torch.randn(case.num_dst, heads, channels + edge_dim, dtype=torch.float64)
    return [query, *inputs[1:], edge]


@pytest.mark.parametrize("channels", [1, 5, 16, 19])
@pytest.mark.parametrize("heads", [1, 3, 4])
@pytest.mark.parametrize("edge_dim", repeats_but([1, 3, 4], [1, 3, 4, 16, 33]))
@pytest.mark.parametrize("name", NAMES)
def test_every_width_equals_upstream(
    name: str, edge_dim: int, heads: int, channels: int, backend: str
) -> None:
    inputs = sized_inputs(name, RAGGED, heads, channels, edge_dim)
    ours = with_gradients(lambda t: both(call_with_edges(name, t, RAGGED)), inputs)
    theirs = with_gradients(lambda t: both(upstream_with_edges(name, t, RAGGED)), inputs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("case", [RAGGED, CUT], ids=str)
@pytest.mark.parametrize("level", native.available_levels())
@pytest.mark.parametrize("name", NAMES)
def test_every_instruction_level_is_as_close_as_upstream(
    name: str, level: str, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_default_library", lambda: native.library(level))

    def ours(inputs: Inputs) -> Tensor:
        return both(call_with_edges(name, inputs, case))

    def theirs(inputs: Inputs) -> Tensor:
        return both(upstream_with_edges(name, inputs, case))

    ratios = []
    for _ in range(5):  # chance decides whose rounding moves a large weight
        exact = sized_inputs(name, case, 3, 12, 7)
        single = [t.float() for t in exact]
        truth = with_gradients(theirs, [t.double() for t in single])
        results = with_gradients(ours, single), with_gradients(theirs, single), truth
        ratios.append(error_ratios(*results))
    assert max(torch.tensor(ratios).median(0).values.tolist()) <= 2
    for a, b in zip(with_gradients(ours, exact), with_gradients(theirs, exact), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("case", [RAGGED, CUT], ids=str)
@pytest.mark.parametrize(("heads", "channels"), [(1, 3), (3, 8), (2, 20), (1, 65), (33, 2)])
@pytest.mark.parametrize("edge_dim", [0, 2])
def test_slopes_where_what_is_added_up_is_zero(
    edge_dim: int, heads: int, channels: int, case: Case
) -> None:
    """The slope at 0 is that below, whether the signs of channels share a byte or not."""
    exact = sized_inputs("gatv2", case, heads, channels, edge_dim)
    whole = [t if i == 2 else torch.randint(-1, 2, t.shape).double() for i, t in enumerate(exact)]

    def ours(inputs: Inputs) -> Tensor:
        if edge_dim == 0:
            return operator("gatv2")(*inputs[:3], case.edge_index)
        return both(call_with_edges("gatv2", inputs, case))

    def theirs(inputs: Inputs) -> Tensor:
        if edge_dim == 0:
            return upstream("gatv2", inputs[:3], case)
        return both(upstream_with_edges("gatv2", inputs, case))

    whole = whole if edge_dim else whole[:3]
    for a, b in zip(with_gradients(ours, whole), with_gradients(theirs, whole), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_does_not_depend_on_those_beside_it(name: str) -> None:
    """Rows of few edges are taken together, and edges projected for some of them at a time."""
    inputs = [t.float() for t in sized_inputs(name, RAGGED, 8, 8, 5)]
    whole, _ = call_with_edges(name, inputs, RAGGED)
    destinations = RAGGED.edge_index[1]
    for rows in (range(3, 60, 7), range(20, 50)):
        kept = torch.isin(destinations, torch.tensor(list(rows)))
        place = -2 if name == "gatv2" else -1
        some = [t[kept] if i == len(inputs) + place else t for i, t in enumerate(inputs)]
        part = Case("part", RAGGED.edge_index[:, kept], RAGGED.num_src, RAGGED.num_dst)
        out, _ = call_with_edges(name, some, part)
        assert torch.equal(out[list(rows)], whole[list(rows)])


@pytest.mark.parametrize("frozen", [(3,), (4,), (3, 4), (0, 1, 2)], ids=str)
def test_what_is_frozen_changes_no_other_gradient(frozen: tuple[int, ...]) -> None:
    inputs = [t.float() for t in sized_inputs("gatv2", RAGGED, 3, 16, 6)]

    def gradients(frozen: tuple[int, ...]) -> list[Tensor | None]:
        leaves = [t.clone().requires_grad_(i not in frozen) for i, t in enumerate(inputs)]
        both(call_with_edges("gatv2", leaves, RAGGED)).square().sum().backward()
        return [t.grad for t in leaves]

    for i, (some, one) in enumerate(zip(gradients(()), gradients(frozen), strict=True)):
        if i in frozen:
            assert one is None
        else:
            assert some is not None and one is not None and torch.equal(some, one)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("heads", "channels"), [(1, 5), (2, 8)])
@pytest.mark.parametrize("position", [3, 4])
def test_nan_and_infinity_of_edges_reach_what_they_reach_upstream(
    position: int, heads: int, channels: int, bad: float, backend: str
) -> None:
    case = Case("random", random_edges(10, 10, 40), 12, 12)
    inputs = sized_inputs("gatv2", case, heads, channels, 3)
    inputs[position].view(-1)[1] = bad
    ours = with_gradients(lambda t: both(call_with_edges("gatv2", t, case)), inputs)
    theirs = with_gradients(lambda t: both(upstream_with_edges("gatv2", t, case)), inputs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
def test_threads_do_not_change_a_bit(name: str, restore_threads: None) -> None:
    case = Case("hub", hub_edges(3_000, 20_000), 3_000, 3_000)
    inputs = [t.float() for t in sized_inputs(name, case, 4, 16, 16)]
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(with_gradients(lambda t: both(call_with_edges(name, t, case)), inputs))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_outputs_past_the_caches_whose_parts_are_not_aligned() -> None:
    """Sums of edges begin in the middle of what one instruction would store."""
    nodes = (1 << 24) // 64 + 1
    index = torch.arange(nodes).repeat(2, 1)
    value, edge = torch.randn(nodes, 1, 10), torch.randn(nodes, 6)
    query = torch.randn(nodes, 1, 16, requires_grad=True)
    out, _, _ = ops.attention(query, value, value, index, edge=edge)
    assert torch.equal(out, torch.cat([value, edge.unsqueeze(1)], dim=-1))
    (grad,) = torch.autograd.grad(out.sum(), query)
    assert bool((grad == 0).all())  # one neighbour has all the weight, whatever is asked
