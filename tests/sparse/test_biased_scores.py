"""Scores with a bias of each entry: attention is one operator with it, or says why it is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fastgraph.sparse as fgs
from fastgraph.routing.status import recording
from fastgraph.sparse.matching import has_infinity
from tests.sparse.test_fusing import ones, operands, randn
from tests.sparse.test_programs import matches

Scores = Callable[[Tensor, Tensor], Tensor]

SCORES: dict[str, Scores] = {
    "sum": lambda dots, bias: dots / 3**0.5 + bias,
    "difference": lambda dots, bias: bias - dots * 2,
    "scaled sum": lambda dots, bias: (dots + bias) / 3**0.5,
    "negative sum": lambda dots, bias: -(0.5 * (bias + dots)) - bias,
}


def product(score: Scores, t: list[Tensor], bias: Tensor, name: str, *, waits: bool) -> Tensor:
    a = ones(name)
    dots = fgs.bsddmm(a, t[0], t[1].transpose(0, 1)).val
    return fgs.val_like(a, score(dots if waits else dots.clone(), bias)).softmax() @ t[4]


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("last", [(), (2,), (1,)])
@pytest.mark.parametrize("name", ["square", "wide", "one", "hub"])
def test_attention_with_a_bias_is_one_operator(name: str, last: tuple[int], score: str) -> None:
    a = ones(name)
    t = operands(a.shape, 2 if last else None)
    bias = randn(a.nnz, *last, seed=12).requires_grad_()
    with recording() as status:
        found = product(SCORES[score], t, bias, name, waits=True)
    row = status.row("sparse")
    assert (row.routed, row.programs, row.fell_back) == (1, 0, 0)
    expected = product(SCORES[score], t, bias, name, waits=False)
    matches(found, expected, [t[0], t[1], t[4], bias])


def test_dropout_of_weights_whose_scores_have_a_bias() -> None:
    """It drops what the values of the same expression drop."""
    a = ones("hub")
    t = operands(a.shape, 2)
    bias = randn(a.nnz, 2, seed=12).requires_grad_()
    dots = fgs.bsddmm(a, t[0], t[1].transpose(0, 1)).val
    weights = fgs.val_like(a, dots + bias).softmax()
    dropped = fgs.val_like(a, F.dropout(weights.val, 0.5))
    with recording() as status:
        found = dropped @ t[4]
    assert status.row("sparse").routed == 1
    values = dropped.val.clone()
    assert (values == 0).any()
    wanted = [t[0], t[1], t[4], bias]
    matches(found, fgs.val_like(a, values) @ t[4], wanted)


def test_rows_and_columns_may_scale_dot_products_but_not_the_bias() -> None:
    a = ones("square")
    t = operands(a.shape, None)
    bias = randn(a.nnz, seed=12).requires_grad_()

    def scores() -> Tensor:
        lengths = fgs.rows(t[2].exp()) * fgs.cols(t[3].exp())
        return (a * (fgs.dense(t[0]) @ t[1].transpose(0, 1) / lengths)).val

    with recording() as status:
        found = fgs.val_like(a, scores() + bias).softmax() @ t[4]
    assert status.row("sparse").routed == 1
    expected = fgs.val_like(a, scores().clone() + bias).softmax() @ t[4]
    matches(found, expected, [*t, bias])


def test_a_bias_that_hides_a_whole_row_is_separate() -> None:
    """The softmax of a row of minus infinity is NaN in torch and DGL, and 0 in the operator."""
    a = ones("hub")
    t = operands(a.shape, None)
    bias = randn(a.nnz, seed=12)
    hidden = torch.finfo(torch.float64).min
    for number, score in ((-torch.inf, SCORES["sum"]), (hidden, lambda dots, b: (dots + b) * 2)):
        bias[a.row == 7] = number
        with recording() as status:
            found = product(score, t, bias, "hub", waits=True)
        assert status.row("sparse").fell_back == 1
        expected = product(score, t, bias, "hub", waits=False)
        assert expected[7].isnan().all()
        torch.testing.assert_close(found, expected, equal_nan=True)


def test_a_bias_of_minus_infinity_hides_an_entry() -> None:
    a = ones("hub")
    t = operands(a.shape, 2)
    bias = randn(a.nnz, 2, seed=12)
    bias[::3] = -torch.inf

    def product(values: Tensor) -> Tensor:
        return fgs.val_like(a, values + bias).softmax() @ t[4]

    scores = fgs.bsddmm(a, t[0], t[1].transpose(0, 1))
    expected = product(scores.val.clone())
    found = product(fgs.bsddmm(a, t[0], t[1].transpose(0, 1)).val)
    assert found.isfinite().all()
    torch.testing.assert_close(found, expected)
    wanted = [t[0], t[1], t[4]]
    torch.testing.assert_close(
        *(torch.autograd.grad(o.square().sum(), wanted) for o in (found, expected))
    )


def test_a_bias_that_is_edited_or_does_not_fit() -> None:
    a = ones("square")
    t = operands(a.shape, 2)
    bias = randn(a.nnz, 2, seed=12)
    waiting = fgs.val_like(a, fgs.bsddmm(a, t[0], t[1].transpose(0, 1)).val + bias)
    bias.zero_()
    with pytest.raises(RuntimeError, match="was edited in place"):
        waiting.softmax() @ t[4]
    for wrong in (bias[:, :1].T, bias.float(), bias[0], bias[:, 0]):
        val, plain = (fgs.bsddmm(a, t[0], t[1].transpose(0, 1)).val for _ in range(2))
        try:
            expected = plain.clone() + wrong
        except RuntimeError:
            with pytest.raises(RuntimeError):
                val + wrong
        else:
            torch.testing.assert_close((val + wrong).clone(), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_numbers_whose_squares_overflow_are_not_infinite(dtype: torch.dtype) -> None:
    large = torch.full((3, 40), torch.finfo(dtype).max, dtype=dtype)
    assert not has_infinity(large) and not has_infinity(large[:, :0])
    for number in (torch.inf, -torch.inf, torch.nan):
        large[1, 7] = number
        assert has_infinity(large)
