"""Features whose heads stand last: one copy for both passes, and gradients in the same layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastgraph.sparse import fusing, matching
from tests.sparse.matrices import dense
from tests.sparse.test_fusing import (
    Form,
    attention,
    cosine,
    dense_product,
    gat,
    gatv2,
    ones,
    operands,
    randn,
    scores,
)


@pytest.fixture(autouse=True)
def _however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "LARGE", 0)
    monkeypatch.setattr(fusing, "_MOST_SCALED", torch.inf)


@pytest.mark.parametrize("form", [attention, cosine, gat, gatv2])
def test_features_are_copied_once_and_their_gradients_have_heads_last(
    form: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = ones("square")
    leaves = operands(a.shape, 2)
    t = [leaf * 1 for leaf in leaves]
    copied: list[bool] = []
    found: list[tuple[int, bool]] = []
    for k, x in enumerate(t):
        x.register_hook(lambda grad, k=k: found.append((k, grad.is_contiguous())))

    def contiguous(x: Tensor) -> Tensor:
        is_of_nodes = len(x) > 1  # and no vector of parameters
        copied.append(is_of_nodes and not x.is_contiguous())
        return x.contiguous()

    out = form(a, t) @ t[4]
    assert isinstance(out, Tensor)
    expected = dense_product(scores(form, leaves, 2), dense(a.pattern, a.val), leaves[4])
    torch.testing.assert_close(out, expected)
    assert out.is_contiguous()
    monkeypatch.setattr("fastgraph.ops.heads.contiguous", contiguous)
    grad = randn(*out.shape, seed=9)
    gradients = [
        torch.autograd.grad(o, leaves, grad, allow_unused=True, create_graph=order)
        for o, order in ((out, False), (expected, True))
    ]
    torch.testing.assert_close(*gradients)
    assert copied.count(True) == 1, "the gradient of the result, which has heads last"
    assert found and all(is_contiguous for _, is_contiguous in found)


@pytest.mark.parametrize("form", [attention, gatv2])
def test_second_derivatives(form: Form) -> None:
    a = ones("wide")
    t = operands(a.shape, 2)
    out = form(a, t) @ t[4]
    assert isinstance(out, Tensor)
    expected = dense_product(scores(form, t, 2), dense(a.pattern, a.val), t[4])
    twice = []
    for result in (out, expected):
        once = torch.autograd.grad(result.square().sum(), t, allow_unused=True, create_graph=True)
        total = torch.stack([g.square().sum() for g in once if g is not None]).sum()
        twice.append(torch.autograd.grad(total, t, allow_unused=True))
    torch.testing.assert_close(*twice)
