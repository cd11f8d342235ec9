"""Products and reductions of too few values to gain from one operator."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fastgraph.sparse as fgs
from fastgraph.routing.status import recording
from fastgraph.sparse import expression
from fastgraph.sparse.expression import Expression
from fastgraph.sparse.sparse_matrix import SparseMatrix
from tests.sparse.matrices import dense
from tests.sparse.test_fusing import (
    OPERATORS,
    Form,
    attention,
    dense_product,
    gat,
    gatv2,
    ones,
    operands,
    scores,
    virtual_attention,
)

WAITING = (attention, virtual_attention, gat, gatv2)


def test_few_entries_are_separate() -> None:
    a = ones("square")
    t = operands(a.shape, None)
    with recording() as status:
        _ = fgs.sddmm(a, t[0], t[1].T) @ t[4]
    assert list(status.row("sparse").reasons) == ["too few entries for an edge program to gain"]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> SparseMatrix:
    """A matrix with just as many entries as scores may wait with, too few for other values."""
    a = ones("hub")
    monkeypatch.setattr(expression, "FEWEST_VALUES", 10 * a.nnz)
    monkeypatch.setattr(expression, "FEWEST_SCORES", a.nnz)
    return a


@pytest.mark.parametrize("form", OPERATORS)
def test_of_few_values_only_scores_wait(
    few: SparseMatrix, form: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    t = operands(few.shape, None)
    for _ in range(2):
        lazy = form(few, t)
        assert isinstance(lazy.values, Expression) == (form in WAITING)
        with recording() as status:
            out = lazy @ t[4]
        assert status.row("sparse").routed == (form in WAITING)
        places = dense(few.pattern, few.val)
        torch.testing.assert_close(out, dense_product(scores(form, t, None), places, t[4]))
    monkeypatch.setattr(expression, "FEWEST_SCORES", few.nnz + 1)
    assert not isinstance(form(few, t).values, Expression)


@pytest.mark.parametrize("form", [attention, virtual_attention, gat])
def test_few_scores_wait_in_vain_once(few: SparseMatrix, form: Form) -> None:
    t = operands(few.shape, None)
    first = form(few, t)
    values = first.val.clone()
    second = form(few, t)
    assert not isinstance(second.values, Expression)
    torch.testing.assert_close(second.val, values)
    assert isinstance(gatv2(few, t).values, Expression)


def test_few_dot_products_without_softmax_are_separate(few: SparseMatrix) -> None:
    t = operands(few.shape, None)
    for number in range(2):
        with recording() as status:
            found = fgs.sddmm(few, t[0], t[1].T) @ t[4]
        expected = (dense(few.pattern, few.val) * (t[0] @ t[1].T)) @ t[4]
        torch.testing.assert_close(found, expected)
        waited = ["too few values to gain without a softmax"] if number == 0 else []
        assert [*status.row("sparse").reasons] == waited


def test_dropout_of_few_values_is_drawn_at_once(few: SparseMatrix) -> None:
    t = operands(few.shape, None)
    assert type(F.dropout(attention(few, t).val, 0.5)) is Tensor


def test_scores_of_gatv2_wait_as_long_as_a_softmax_takes_them(few: SparseMatrix) -> None:
    t = operands(few.shape, None)
    both = fgs.rows(t[0]) + fgs.cols(t[4])
    others = (both, F.leaky_relu(2 * both), -F.leaky_relu(both), F.leaky_relu(both - both))
    for virtual in others:
        assert not isinstance((few * (virtual @ t[1][0])).values, Expression)
    waiting = [few * (F.leaky_relu(both, 0.2) @ t[1][0]) for _ in range(3)]
    assert all(isinstance(s.values, Expression) for s in waiting)
    doubled = waiting[0] * 2
    assert not isinstance(doubled.values, Expression)
    separate = fgs.val_like(few, doubled.val / 2)
    with recording() as status:
        found = waiting[1] @ t[4]
    (reason,) = status.row("sparse").reasons
    assert reason == "too few values to gain without a softmax"
    torch.testing.assert_close(found, separate @ t[4])
    with recording() as status:
        total = waiting[2].sum(1)
    assert [*status.row("sparse").reasons] == [reason]
    torch.testing.assert_close(total, separate.sum(1))
