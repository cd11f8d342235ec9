"""Products and reductions of too few values to gain from one operator."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fastgraph.sparse as fgs
from fastgraph.routing.status import recording
from fastgraph.sparse import expression
from fastgraph.sparse.expression import Expression
from tests.sparse.matrices import dense
from tests.sparse.test_fusing import OPERATORS, dense_product, gatv2, ones, operands, scores


def test_few_entries_are_separate() -> None:
    a = ones("square")
    t = operands(a.shape, None)
    with recording() as status:
        _ = fgs.sddmm(a, t[0], t[1].T) @ t[4]
    assert list(status.row("sparse").reasons) == ["too few entries for an edge program to gain"]


def test_of_few_values_only_scores_of_gatv2_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only as long as a softmax takes them as they are."""
    a = ones("hub")
    monkeypatch.setattr(expression, "FEWEST_VALUES", 10 * a.nnz)
    monkeypatch.setattr(expression, "FEWEST_SCORES", a.nnz)
    t = operands(a.shape, None)
    for form in OPERATORS:
        assert isinstance(form(a, t).values, Expression) == (form is gatv2)
    with recording() as status:
        out = gatv2(a, t) @ t[4]
    assert (status.row("sparse").routed, status.row("sparse").fell_back) == (1, 0)
    torch.testing.assert_close(
        out, dense_product(scores(gatv2, t, None), dense(a.pattern, a.val), t[4])
    )
    both = fgs.rows(t[0]) + fgs.cols(t[4])
    others = (both, F.leaky_relu(2 * both), -F.leaky_relu(both), F.leaky_relu(both - both))
    for virtual in others:
        assert not isinstance((a * (virtual @ t[1][0])).values, Expression)
    waiting = [a * (F.leaky_relu(both, 0.2) @ t[1][0]) for _ in range(3)]
    assert all(isinstance(s.values, Expression) for s in waiting)
    doubled = waiting[0] * 2
    assert not isinstance(doubled.values, Expression)
    separate = fgs.val_like(a, doubled.val / 2)
    with recording() as status:
        found = waiting[1] @ t[4]
    (reason,) = status.row("sparse").reasons
    assert reason == "too few values to gain without a softmax"
    torch.testing.assert_close(found, separate @ t[4])
    with recording() as status:
        total = waiting[2].sum(1)
    assert [*status.row("sparse").reasons] == [reason]
    torch.testing.assert_close(total, separate.sum(1))
    monkeypatch.setattr(expression, "FEWEST_SCORES", a.nnz + 1)
    assert not isinstance(gatv2(a, t).values, Expression)
