"""Attention over parts of the edges, joined, beside attention over all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fastgraph import ops
from tests.graphs import Case, all_cases, random_edges

Results = tuple[Tensor, Tensor | None, Tensor]
CASES = [case for case in all_cases() if case.edge_index.dtype == torch.int64]


OPERATORS = {"gatv2": ops.gatv2, "gat": ops.gat, "attention": ops.attention}


def leaves_of(name: str, case: Case, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """The tensors that an operator takes before the edges."""
    src, dst, heads, width = case.num_src, case.num_dst, 2, 5
    shapes = {
        "gatv2": [(src, heads, width), (dst, heads, width), (1, heads, width)],
        "gat": [(src, heads, width), (src, heads), (dst, heads)],
        "attention": [(dst, heads, width), (src, heads, width), (src, heads, width)],
    }
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes[name]]


def in_parts(operator: Callable[..., Results], index: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """One part after another; the last of many has no edges."""
    out, _, stats = operator(index[:, ::parts].contiguous())
    for part in range(1, parts):
        other, _, other_stats = operator(index[:, part::parts].contiguous())
        out, stats = ops.merge(out, stats, other, other_stats)
    empty, _, of_empty = operator(index[:, :0])
    return ops.merge(empty, of_empty, out, stats)


def gradients(results: tuple[Tensor, Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """Of a loss that sees outputs and, as far as they are well defined, statistics."""
    out, stats = results
    logsum = torch.where(stats[..., 1] == 0, 0, stats[..., 0].detach() - stats[..., 1].log())
    torch.manual_seed(1)
    loss = (out * torch.randn_like(out)).sum() + (logsum * torch.randn_like(logsum)).sum()
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [
        torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)
    ]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", ["gatv2", "gat", "attention"])
def test_parts_of_the_edges_give_what_all_give(name: str, case: Case, backend: str) -> None:
    leaves = leaves_of(name, case)
    operator = functools.partial(OPERATORS[name], *leaves)
    out, _, stats = operator(case.edge_index)
    expected = gradients((out, stats), leaves)
    for parts in (1, 2, 3):
        joined = in_parts(operator, case.edge_index, parts)
        torch.testing.assert_close(joined[0], out)
        torch.testing.assert_close(joined[1], stats)
        torch.testing.assert_close(gradients(joined, leaves), expected)


@pytest.mark.parametrize("name", ["gatv2", "gat", "attention"])
def test_gradients_of_the_statistics(name: str, backend: str) -> None:
    """Of the logarithm of the sum of exponentials, first and second."""
    case = Case("random", random_edges(6, 5, 14), 6, 5)
    leaves = leaves_of(name, case)

    def logsum(*inputs: Tensor) -> Tensor:
        _, _, stats = OPERATORS[name](*inputs, case.edge_index)
        has_edges = stats[..., 1] != 0
        return torch.where(has_edges, stats[..., 0].detach() - stats[..., 1].log(), 0)

    assert torch.autograd.gradcheck(logsum, leaves)
    assert torch.autograd.gradgradcheck(logsum, leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_dtypes(dtype: torch.dtype) -> None:
    case = Case("random", random_edges(30, 30, 200), 30, 30)
    leaves = leaves_of("gatv2", case, dtype)
    operator = functools.partial(ops.gatv2, *leaves)
    out, _, stats = operator(case.edge_index)
    joined = in_parts(operator, case.edge_index, 3)
    assert joined[0].dtype == dtype and joined[1].dtype == stats.dtype == torch.float32
    roundings = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(joined[0], out, rtol=roundings, atol=roundings)
    assert all(g.dtype == dtype for g in gradients(joined, leaves))


def test_scores_whose_exponentials_overflow() -> None:
    x, score = torch.randn(4, 1, 3), torch.tensor([[1e4], [-1e4], [9e3], [0.0]])
    index = torch.tensor([[0, 1, 2, 3, 1, 3], [0, 0, 0, 0, 1, 1]])

    def operator(index: Tensor) -> Results:
        return ops.gat(x, score, torch.zeros(4, 1), index, negative_slope=1.0)

    torch.testing.assert_close(in_parts(operator, index, 3)[0], operator(index)[0])


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"other_out": torch.randn(3, 2, 5)}, r"other_out must have shape \[4, 2, 5\]"),
        ({"stats": torch.randn(4, 2)}, r"stats must have shape \[4, 2, 2\], got \[4, 2\]"),
        ({"other_stats": torch.randn(4, 2, 2).double()}, "other_stats must have the dtype"),
        ({"out": torch.randn(4, 10)}, r"out must have shape \[nodes, heads, channels\]"),
        ({"out": torch.zeros(4, 2, 5).int()}, "out must be one of"),
    ],
)
def test_bad_input(wrong: dict[str, Tensor], text: str) -> None:
    out, stats = torch.randn(4, 2, 5), torch.rand(4, 2, 2)
    good = {"out": out, "stats": stats, "other_out": out, "other_stats": stats}
    ops.merge(**good)
    with pytest.raises(ValueError, match=text):
        ops.merge(**{**good, **wrong})


def _with_lost_scores(name: str, lost: list[int], dtype: torch.dtype) -> list[Tensor]:
    """Operands of three sources and two destinations; sources that are named score -infinity."""
    torch.manual_seed(0)
    leaves = leaves_of(name, Case("three", torch.tensor([[0, 1, 2], [0, 0, 0]]), 3, 2), dtype)
    with torch.no_grad():
        if name == "gat":
            leaves[1][lost] = -torch.inf
        else:
            leaves[0][..., 0], leaves[1][lost, :, 0] = 1, -torch.inf
    return leaves


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ["gat", "attention"])
def test_a_part_whose_scores_are_all_minus_infinity(
    name: str, dtype: torch.dtype, backend: str
) -> None:
    """It has no share; where all parts are so, the softmax is NaN as it is over all edges."""
    index = torch.tensor([[0, 1, 2, 2], [0, 0, 0, 1]])
    for lost in ([0], [1], [0, 1], [0, 1, 2]):
        leaves = _with_lost_scores(name, lost, dtype)
        operator = functools.partial(OPERATORS[name], *leaves)
        out, _, stats = operator(index)
        expected = gradients((out, stats), leaves)
        for parts in (2, 3):
            joined = in_parts(operator, index, parts)
            torch.testing.assert_close(joined[0], out, equal_nan=True)
            torch.testing.assert_close(joined[1], stats, equal_nan=True)
            if len(lost) < 3:
                assert bool(out.isfinite().all())
                torch.testing.assert_close(gradients(joined, leaves), expected, equal_nan=True)


def test_a_part_of_gat_with_scores_that_has_no_share(backend: str) -> None:
    """As its edges score -infinity, it gets no gradient, and others that of all edges."""
    leaves = [torch.randn(n, 2, 5, dtype=torch.float64, requires_grad=True) for n in (3, 2)]
    index = torch.tensor([[0, 1, 2, 2], [0, 0, 0, 1]])
    score = torch.zeros(4, 2, dtype=torch.float64)
    score[0] = -torch.inf

    def part(edges: slice) -> Results:
        edge_index = index[:, edges].contiguous()
        return ops.gat_with_scores(*leaves, edge_index, score_edge=score[edges])

    out, _, stats = part(slice(None))
    (first, _, of_first), (other, _, of_other) = part(slice(1)), part(slice(1, None))
    joined = ops.merge(first, of_first, other, of_other)
    torch.testing.assert_close(joined[0], out)
    torch.testing.assert_close(gradients(joined, leaves), gradients((out, stats), leaves))
