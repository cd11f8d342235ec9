"""The operators of a product, as text."""

from __future__ import annotations

import pytest
import torch

import fastgraph.sparse as fgs
from fastgraph.routing.status import recording
from tests.sparse.test_fusing import attention, gat, ones, operands, randn


@pytest.mark.parametrize("heads", [None, 2])
def test_groups_and_bytes(heads: int | None) -> None:
    a = ones("square")
    t = operands(a.shape, heads)
    values = a.nnz * (heads or 1) * 8
    with recording() as status:
        text = fgs.explain(attention(a, t), t[4])
    assert not status.rows
    assert "one group, v0, v1, v2, by attention" in text
    assert f"stored: {2 * a.shape[0] * (heads or 1) * 8} bytes" in text
    assert f"avoided: {3 * values:,} bytes" in text
    assert "by gat" in fgs.explain(gat(a, t))
    with torch.no_grad():
        assert "stored: 0 bytes" in fgs.explain(attention(a, t))


def test_a_product_after_it_is_still_one_operator() -> None:
    a = ones("square")
    t = operands(a.shape, None)
    lazy = attention(a, t)
    fgs.explain(lazy)
    with recording() as status:
        lazy @ t[4]
    assert status.row("sparse").routed == 1
    assert "several products" in fgs.explain(lazy)


def test_separate_operators_and_why() -> None:
    a = ones("square")
    t = operands(a.shape, None)
    text = fgs.explain((attention(a, t) * 2).softmax())
    assert "sddmm, edge_softmax, edge_softmax, spmm: too few entries" in text
    assert fgs.explain(a).endswith("product: spmm")
    with pytest.raises(TypeError, match="A must be a SparseMatrix"):
        fgs.explain(t[0])
    with pytest.raises(RuntimeError, match="X must be"):
        fgs.explain(attention(a, t), randn(a.shape[1] + 1, 3))
