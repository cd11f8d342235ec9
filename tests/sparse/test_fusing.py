"""Products of lazy values by one operator, beside dense matrices, with gradients of any order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fastgraph.sparse as fgs
from fastgraph.routing.status import recording
from fastgraph.sparse import SparseMatrix, fusing
from fastgraph.sparse.expression import Expression
from tests.sparse.matrices import FORMS, PLACES, dense, pattern

NAMES = [n for n in PLACES if n != "none"]
Form = Callable[[SparseMatrix, list[Tensor]], SparseMatrix]


@pytest.fixture(autouse=True)
def _however_few_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusing, "_WIDE", 0)
    monkeypatch.setattr(fusing, "_MOST_SCALED", torch.inf)


def randn(*size: int, seed: int = 5) -> Tensor:
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def ones(name: str, form: str = "coo") -> SparseMatrix:
    where = pattern(form, *PLACES[name])
    val = torch.ones(where.nnz, dtype=torch.float64)
    return SparseMatrix(where, val, is_ones=True)


def attention(a: SparseMatrix, t: list[Tensor]) -> SparseMatrix:
    return fgs.softmax(fgs.bsddmm(a, t[0], t[1].transpose(0, 1)) / 3**0.5)


def virtual_attention(a: SparseMatrix, t: list[Tensor]) -> SparseMatrix:
    return (a * (fgs.dense(t[0]) @ t[1].transpose(0, 1)) / 3**0.5).softmax()


def cosine(a: SparseMatrix, t: list[Tensor]) -> SparseMatrix:
    lengths = fgs.rows(t[2].exp()) * fgs.cols(t[3].exp())
    return (-(a * (fgs.dense(t[0]) @ t[1].transpose(0, 1)) / lengths)).softmax()


def gat(a: SparseMatrix, t: list[Tensor]) -> SparseMatrix:
    return (a * F.leaky_relu(fgs.rows(t[2]) + fgs.cols(t[3]), 0.2)).softmax()


def differences(a: SparseMatrix, t: list[Tensor]) -> SparseMatrix:
    return (a * (fgs.rows(t[2]) - fgs.cols(t[3]))).softmax()


def broadcasts(a: SparseMatrix, t: list[Tensor]) -> SparseMatrix:
    return fgs.sp_add_v(fgs.sp_add_v(a, t[2].unsqueeze(1)), t[3].unsqueeze(0)).softmax()


def gatv2(a: SparseMatrix, t: list[Tensor]) -> SparseMatrix:
    vector = t[1][0]
    return (a * (F.leaky_relu(fgs.rows(t[0]) + fgs.cols(t[4]), 0.2) @ vector)).softmax()


OPERATORS: dict[Form, str] = {
    gatv2: "gatv2",
    attention: "attention",
    virtual_attention: "attention",
    cosine: "attention",
    gat: "gat",
    differences: "gat",
    broadcasts: "gat",
}


def scores(form: Form, t: list[Tensor], heads: int | None) -> Tensor:
    """Dense ``[n, m]`` or ``[n, m, heads]``."""
    if form in (gat, differences, broadcasts):
        rows, cols = t[2].unsqueeze(1), t[3].unsqueeze(0)
        if form is gat:
            return F.leaky_relu(rows + cols, 0.2)
        return rows - cols if form is differences else 1 + rows + cols
    if form is gatv2:
        return torch.einsum(
            "nmk...,k...->nm...",
            F.leaky_relu(t[0].unsqueeze(1) + t[4].unsqueeze(0), 0.2),
            t[1][0],
        )
    dots = torch.einsum("nk...,mk...->nm...", t[0], t[1])
    if form is cosine:
        return -dots / (t[2].exp().unsqueeze(1) * t[3].exp().unsqueeze(0))
    return dots / 3**0.5


def dense_product(score: Tensor, places: Tensor, x: Tensor) -> Tensor:
    """The softmax over entries, with as many of them in a place as ``places`` says, and a sum."""
    several = x.dim() == 3
    score, x = (score, x) if several else (score.unsqueeze(-1), x.unsqueeze(-1))
    count = places.unsqueeze(-1)
    largest = score.masked_fill(count == 0, -torch.inf).amax(1, keepdim=True).clamp(min=-1e9)
    weight = count * (score - largest.detach()).masked_fill(count == 0, 0).exp()
    total = weight.sum(1, keepdim=True)
    out = torch.einsum("nmh,mkh->nkh", weight / torch.where(total == 0, 1, total), x)
    return out if several else out.squeeze(-1)


def operands(shape: tuple[int, int], heads: int | None) -> list[Tensor]:
    n, m = shape
    last = () if heads is None else (heads,)
    sizes = [(n, 3, *last), (m, 3, *last), (n, *last), (m, *last), (m, 3, *last)]
    return [randn(*size, seed=k).requires_grad_() for k, size in enumerate(sizes)]


@pytest.mark.parametrize("form", OPERATORS)
@pytest.mark.parametrize("heads", [None, 2])
@pytest.mark.parametrize("name", NAMES)
def test_softmax_and_product(name: str, heads: int | None, form: Form) -> None:
    if form is broadcasts and heads is not None:
        pytest.skip("vectors have no heads")
    a = ones(name)
    t = operands(a.shape, heads)
    with recording() as status:
        out = form(a, t) @ t[4]
    assert status.row("sparse").routed == 1
    expected = dense_product(scores(form, t, heads), dense(a.pattern, a.val), t[4])
    torch.testing.assert_close(out, expected)
    grad = randn(*out.shape, seed=9)
    pairs = [
        torch.autograd.grad(o, t, grad, allow_unused=True, create_graph=True)
        for o in (out, expected)
    ]
    torch.testing.assert_close(*pairs)
    again = [
        torch.autograd.grad(sum(g.square().sum() for g in p if g is not None), t, allow_unused=True)
        for p in pairs
    ]
    torch.testing.assert_close(*again)


@pytest.mark.parametrize("form", OPERATORS)
@pytest.mark.parametrize("given", FORMS)
def test_every_form_of_pattern(given: str, form: Form) -> None:
    a = ones("wide", given)
    t = operands(a.shape, None)
    lazy = form(a, t)
    assert isinstance(lazy.values, Expression)
    plan = fusing.plan(lazy.values, t[4])
    assert not isinstance(plan, str) and plan.operator == OPERATORS[form]
    out = lazy @ t[4]
    separate = fgs.val_like(a, form(a, t).val) @ t[4]
    torch.testing.assert_close(out, separate)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    a = fgs.spmatrix(PLACES["hub"][1], shape=PLACES["hub"][0])
    exact = operands(a.shape, 2)
    t = [x.detach().to(dtype) for x in exact]
    for form in (attention, gat):
        found = form(a, t) if dtype is torch.float32 else form(a.to(dtype=dtype), t)
        if dtype is torch.float32:
            assert isinstance(found.values, Expression)
            assert not isinstance(fusing.plan(found.values, t[4]), str)
        torch.testing.assert_close(
            (found @ t[4]).double(), form(ones("hub"), exact) @ exact[4], rtol=0.05, atol=0.05
        )


def product_of_dots(places: Tensor, dots: Tensor, x: Tensor) -> Tensor:
    """Features ``[m, k]`` or ``[m, k, heads]``, weighed by numbers ``[n, m]`` or of heads."""
    if x.dim() == 2:
        return (places * dots) @ x
    return torch.einsum("nm,nmh,mkh->nkh", places, dots, x)


@pytest.mark.parametrize("heads", [None, 2])
@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_product_without_softmax(
    name: str, heads: int | None, is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusing, "_FEWEST_OF_PROGRAM", 0)
    monkeypatch.setattr(fusing, "_FEWEST_OF_ROW", 0)
    a = ones(name)
    t = operands(a.shape, heads)
    key = t[4] if is_shared else t[1]
    weight = randn(a.nnz, seed=11).requires_grad_()
    weights = fgs.val_like(a, weight)
    virtual = (fgs.dense(t[0]) @ key.transpose(0, 1)) * 2 / (fgs.rows(t[2]) * fgs.cols(t[3]))
    with recording() as status:
        out = (weights * virtual) @ t[4]
    assert status.row("sparse").programs == 1
    dots = 2 * torch.einsum("nk...,mk...->nm...", t[0], key)
    scaled = dots / (t[2].unsqueeze(1) * t[3].unsqueeze(0))
    expected = product_of_dots(dense(a.pattern, weight), scaled, t[4])
    torch.testing.assert_close(out, expected)
    wanted, grad = [*t, weight], randn(*out.shape, seed=9)
    pairs = [
        torch.autograd.grad(o, wanted, grad, allow_unused=True, create_graph=True)
        for o in (out, expected)
    ]
    torch.testing.assert_close(*pairs)
    again = [
        torch.autograd.grad(
            sum(g.square().sum() for g in p if g is not None),
            wanted,
            materialize_grads=True,
            allow_unused=True,
        )
        for p in pairs
    ]
    torch.testing.assert_close(*again)


@pytest.mark.parametrize("heads", [None, 2])
def test_gradients_of_vanilla_attention(heads: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tensor thrice, as queries, keys and features."""
    monkeypatch.setattr(fusing, "_FEWEST_OF_PROGRAM", 0)
    a = ones("square")
    x = operands(a.shape, heads)[4]

    def product(x: Tensor) -> Tensor:
        return fgs.bsddmm(a, x, x.transpose(0, 1)) @ x

    with recording() as status:
        out = product(x)
    assert status.row("sparse").programs == 1
    dots = torch.einsum("nk...,mk...->nm...", x, x)
    torch.testing.assert_close(out, product_of_dots(dense(a.pattern, a.val), dots, x))
    assert torch.autograd.gradcheck(product, x)
    assert torch.autograd.gradgradcheck(product, x)


class Reversed(torch.autograd.Function):
    """The same numbers, whose gradient has the other sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


@pytest.mark.parametrize("change", [Reversed.apply, Tensor.detach, lambda x: x.detach() * 1])
def test_keys_with_another_gradient_than_features(
    change: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusing, "_FEWEST_OF_PROGRAM", 0)
    a = ones("square")
    x = operands(a.shape, None)[4]
    for key, value in ((change(x), x), (x, change(x))):
        with recording() as status:
            out = fgs.sddmm(a, x, key.transpose(0, 1)) @ value
        assert status.row("sparse").programs == 1
        expected = (dense(a.pattern, a.val) * (x @ key.T)) @ value
        torch.testing.assert_close(
            *(torch.autograd.grad(o.square().sum(), x) for o in (out, expected))
        )


def test_factors_of_few_entries_are_separate_with_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fusing, "_FEWEST_OF_PROGRAM", 0)
    a = ones("square")
    t = operands(a.shape, None)
    for number, place in ((2, fgs.rows), (3, fgs.cols)):
        factor = t[number]
        products = [a * ((fgs.dense(t[0]) @ t[1].T) * place(f)) for f in (factor, factor.detach())]
        with recording() as status:
            outs = [product @ t[4] for product in products]
        (reason,) = status.row("sparse").reasons
        assert "few entries of one head" in reason
        assert status.row("sparse").programs == 1
        torch.testing.assert_close(*outs)
    # It is told before a program is made, for which features of all rows were scaled.
    monkeypatch.setattr(fusing, "Message", None)
    product = a * ((fgs.dense(t[0]) @ t[1].T) * fgs.rows(t[2]))
    assert "few entries of one head" in fgs.explain(product, t[4])


def test_more_features_to_scale_than_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusing, "_MOST_SCALED", 0)
    a = ones("square")
    t = operands(a.shape, None)
    for lazy in (cosine(a, t), a * (fgs.rows(t[2]) * fgs.cols(t[3]))):
        assert "more features to scale than values" in fgs.explain(lazy, t[4])
    with torch.no_grad():
        assert "by attention" in fgs.explain(cosine(a, t), t[4].detach())
        monkeypatch.setattr(fusing, "_MOST_SCALED_SCORING", 0)
        assert "more features to scale than values" in fgs.explain(cosine(a, t), t[4].detach())


def test_values_of_entries_are_added_to_scores() -> None:
    a = ones("square")
    t = operands(a.shape, None)
    bias = randn(a.nnz, seed=12).requires_grad_()
    biased = fgs.sp_add_v(fgs.val_like(a, bias), t[2].unsqueeze(1))
    scored = fgs.sp_add_v(biased, t[3])
    separate = fgs.val_like(a, (bias + t[2][a.row] + t[3][a.col])).softmax() @ t[4]
    assert fusing.plan(scored.softmax().values, t[4]).operator == "gat"
    out = scored.softmax() @ t[4]
    torch.testing.assert_close(out, separate)
    wanted = [bias, t[2], t[3], t[4]]
    torch.testing.assert_close(
        *(torch.autograd.grad(o.square().sum(), wanted) for o in (out, separate))
    )


@pytest.mark.parametrize("name", ["distinct", "square", "wide", "tall"])
@pytest.mark.parametrize("has_values", [False, True])
def test_products_with_diagonal_matrices(name: str, has_values: bool) -> None:
    shape, where = PLACES[name]
    pattern_ = fgs.spmatrix(where.unique(dim=1), shape=shape).pattern
    val = torch.ones(pattern_.nnz, dtype=torch.float64)
    a = SparseMatrix(pattern_, val, is_ones=True)
    if has_values:
        val = randn(a.nnz, seed=8).requires_grad_()
        a = fgs.val_like(a, val)
    n, m = shape
    left, right, x = (
        randn(*s, seed=k).requires_grad_() for k, s in enumerate(((n,), (m,), (m, 3)))
    )
    with recording() as status:
        lazy = fgs.diag(left) @ a @ fgs.diag(right)
        assert lazy.pattern is a.pattern and isinstance(lazy.values, Expression)
        assert "by spmm" in fgs.explain(lazy, x)
        out = lazy @ x
    assert status.row("sparse").routed == 1
    expected = torch.diag(left) @ dense(pattern_, val) @ torch.diag(right) @ x
    torch.testing.assert_close(out, expected)
    wanted = [left, right, x, *([val] if has_values else [])]
    both = [torch.autograd.grad(o.square().sum(), wanted) for o in (out, expected)]
    torch.testing.assert_close(*both)
    values = fgs.matmul(fgs.diag(left), a).val * 1
    torch.testing.assert_close(values, (left[a.row] * val))


def test_gatv2_with_dropout_and_as_tensors_of_entries() -> None:
    a = ones("hub")
    t = operands(a.shape, None)
    e = F.leaky_relu(t[0][a.row] + t[4][a.col], 0.2) @ t[1][0]
    lazy = fgs.val_like(a, e).softmax()
    assert "by gatv2" in fgs.explain(lazy, t[4])
    torch.testing.assert_close(lazy @ t[4], gatv2(a, t) @ t[4])
    attended = gatv2(a, t)
    dropped = fgs.val_like(attended, F.dropout(attended.val, 0.5))
    assert "by gatv2" in fgs.explain(dropped, t[4])
    out = dropped @ t[4]
    separate = dropped.val.clone()
    torch.testing.assert_close(out, fgs.val_like(a, separate) @ t[4])
    assert (separate == 0).any()


def test_wrong_vectors() -> None:
    a = ones("square")
    t = operands(a.shape, 2)
    with pytest.raises(RuntimeError, match=r"shape \[3, 2\]"):
        fgs.rows(t[0]) @ t[0][0].transpose(0, 1)
    with pytest.raises(RuntimeError, match="dtype"):
        fgs.rows(t[0]) @ t[0][0].float()
    with pytest.raises(TypeError, match="vector for its channels"):
        fgs.rows(randn(6)) @ randn(6)
    with pytest.raises(RuntimeError, match="must be contracted"):
        a * fgs.rows(t[0])
    with pytest.raises(RuntimeError, match="as many channels"):
        fgs.rows(t[0]) + fgs.cols(t[3])


REASONS: list[tuple[str, Form]] = [
    ("too few entries", lambda a, t: (attention(a, t) * 2).softmax()),
    ("too few entries", lambda a, t: attention(a, t) * 2),
    ("too few entries", lambda a, t: (a * torch.exp(fgs.rows(t[2]) + fgs.cols(t[3]))).softmax()),
    ("too few entries", lambda a, t: a * (fgs.dense(t[0]) @ t[1].T)),
    (
        "too few entries",
        lambda a, t: a * ((fgs.dense(t[0]) @ t[1].T) * (fgs.dense(t[0]) @ t[1].T)),
    ),
]


@pytest.mark.parametrize(("reason", "form"), REASONS)
def test_all_else_is_separate_and_says_why(reason: str, form: Form) -> None:
    a = ones("square")
    t = operands(a.shape, None)
    lazy = form(a, t)
    with recording() as status:
        out = lazy @ t[4]
    (found,) = status.row("sparse").reasons
    assert reason in found
    torch.testing.assert_close(out, fgs.val_like(a, form(a, t).val) @ t[4])


def test_widths_that_the_operator_does_not_take() -> None:
    a = ones("square")
    t = operands(a.shape, None)
    x = randn(a.shape[1], 5)
    with recording() as status:
        out = attention(a, t) @ x
    assert "too few entries" in next(iter(status.row("sparse").reasons))
    expected = dense_product(scores(attention, t, None), dense(a.pattern, a.val), x)
    torch.testing.assert_close(out, expected)


def test_second_product_uses_values() -> None:
    a = ones("square")
    t = operands(a.shape, None)
    expected = dense_product(scores(attention, t, None), dense(a.pattern, a.val), t[4])
    with recording() as status:
        lazy = attention(a, t)
        out = lazy @ t[4], lazy @ t[4]
        again = attention(a, t) @ t[4]  # as several products used those of this form
    assert (status.row("sparse").routed, status.row("sparse").fell_back) == (1, 2)
    for found in (*out, again):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("form", [attention, virtual_attention])
def test_edits_in_place_are_errors(form: Form, number: int) -> None:
    a = ones("square")
    t = [x.detach() for x in operands(a.shape, None)]
    for use in (lambda s: s @ t[4], lambda s: s.val.clone(), lambda s: s.sum(1)):
        lazy = form(a, t)
        t[number].mul_(2)
        with pytest.raises(RuntimeError, match="edited in place"):
            use(lazy)


def test_virtual_matrices_know_edits() -> None:
    u = randn(6)
    virtual = fgs.rows(u) + 1
    u.mul_(2)
    with pytest.raises(RuntimeError, match="edited in place"):
        ones("square") * virtual


def test_ones_that_were_edited_are_none() -> None:
    a = fgs.spmatrix(PLACES["square"][1], shape=PLACES["square"][0]).double()
    b = fgs.spmatrix(PLACES["square"][1], shape=PLACES["square"][0])
    b.val.fill_(2)
    t = [x.detach() for x in operands(a.shape, None)]
    q, k, x = (s.float() for s in (t[0], t[1], t[4]))
    out = fgs.sddmm(b, q, k.T).softmax() @ x
    expected = dense_product(2 * (t[0] @ t[1].T), dense(a.pattern, a.val), t[4])
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)


def test_gradients_are_those_of_the_time_of_the_expression() -> None:
    a = ones("square")
    t = operands(a.shape, None)
    with torch.no_grad():
        constant = attention(a, t)
    assert not constant.val.requires_grad
    with torch.no_grad():
        constant = attention(a, t)
    (grad,) = torch.autograd.grad((constant @ t[4]).sum(), t[4])
    separate = fgs.val_like(a, constant.val) @ t[4]
    torch.testing.assert_close(grad, torch.autograd.grad(separate.sum(), t[4])[0])
    variable = attention(a, t)
    with torch.no_grad():
        cut = variable / 2
        assert not (attention(a, t) @ t[4]).requires_grad
    assert not cut.val.requires_grad and variable.val.requires_grad
    assert not torch.autograd.grad((cut @ t[4]).sum(), t[0], allow_unused=True)[0]


def test_in_inference_mode_and_after_it() -> None:
    a = ones("square")
    t = operands(a.shape, None)
    expected = attention(a, t) @ t[4]
    lazy = attention(a, t)
    with torch.inference_mode():
        torch.testing.assert_close(attention(a, t) @ t[4], expected)
        torch.testing.assert_close(lazy @ t[4], expected)
    out = lazy @ t[4]
    out.sum().backward()
    assert t[0].grad is not None


def test_under_compile_and_transforms() -> None:
    a = ones("square")
    t = [x.detach() for x in operands(a.shape, None)]
    expected = attention(a, t) @ t[4]
    lazy = attention(a, t)

    def call(q: Tensor, x: Tensor) -> Tensor:
        return fgs.softmax(fgs.sddmm(a, q, t[1].T) / 3**0.5) @ x

    compiled = torch.compile(call, backend="eager")
    torch.testing.assert_close(compiled(t[0], t[4]), expected)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(lazy @ t[4], expected)


def test_attention_is_bitwise_that_of_the_operator() -> None:
    from fastgraph import ops

    a = ones("hub")
    t = operands(a.shape, None)
    index, ptr, transpose, _, _ = a.pattern.edges
    q, k, x = (s.unsqueeze(1) for s in (t[0], t[1], t[4]))
    by_operator, _, _ = ops.attention(q, k, x, index, ptr=ptr, transpose=transpose, scale=3**-0.5)
    found = attention(a, t) @ t[4]
    torch.testing.assert_close(found, by_operator.squeeze(1), rtol=1e-14, atol=0)


@pytest.mark.parametrize("heads", [None, 2])
def test_virtual_functions(heads: int | None) -> None:
    a = ones("square")
    t = operands(a.shape, heads)
    r, c = fgs.rows(t[2]), fgs.cols(t[3])
    dense_r, dense_c = t[2].unsqueeze(1), t[3].unsqueeze(0)
    cases: list[tuple[fgs.Virtual, Tensor]] = [
        (torch.exp(r) + c * 2, dense_r.exp() + dense_c * 2),
        (2 - r / (1 + torch.sigmoid(c)), 2 - dense_r / (1 + dense_c.sigmoid())),
        (1 / (r**2 + 1) - c, 1 / (dense_r**2 + 1) - dense_c),
        (torch.tensor(2.0) * -r + c, -2.0 * dense_r + dense_c),
        (F.elu(r + c, 0.5), F.elu(dense_r + dense_c, 0.5)),
        (torch.clamp(r * c, -1, None), torch.clamp(dense_r * dense_c, -1, None)),
        (torch.add(r, c), dense_r + dense_c),
    ]
    for virtual, expected in cases:
        found = (a * virtual).val
        row, col = a.row, a.col
        torch.testing.assert_close(found, expected.expand(*a.shape, *t[2].shape[1:])[row, col])
        torch.testing.assert_close((a / virtual).val, 1 / found)


def test_wrong_virtual_matrices() -> None:
    a = ones("wide")
    n, m = a.shape
    with pytest.raises(RuntimeError, match=r"must have 3 rows .* got 4"):
        a * fgs.rows(randn(4))
    with pytest.raises(RuntimeError, match="must have one shape"):
        fgs.rows(randn(3)) + fgs.rows(randn(4))
    with pytest.raises(RuntimeError, match=r"Y must be \[k, m\]"):
        fgs.dense(randn(n, 3)) @ randn(2, m)
    with pytest.raises(RuntimeError, match="one floating dtype"):
        fgs.dense(randn(n, 3)) @ randn(3, m).float()
    with pytest.raises(TypeError):
        fgs.dense(randn(n, 3)) + 1
    with pytest.raises(TypeError):
        torch.softmax(fgs.rows(randn(n)), 0)
    with pytest.raises(TypeError):
        fgs.rows(randn(n)) + randn(n)
    with pytest.raises(TypeError, match="in place"):
        F.leaky_relu(fgs.rows(randn(n)), inplace=True)
    with pytest.raises(TypeError, match="dense"):
        a * fgs.dense(randn(n, m))
    with pytest.raises(RuntimeError, match=r"u must be"):
        fgs.rows(torch.ones(3, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"x must be a torch\.Tensor"):
        fgs.dense([1])


def test_shapes_and_dtypes_are_checked_at_once() -> None:
    a = ones("wide")
    n, m = a.shape
    with pytest.raises(RuntimeError, match="X1 and X2 must be"):
        fgs.sddmm(a, randn(n, 3), randn(2, m))
    lazy = fgs.sddmm(a, randn(n, 3), randn(3, m)).softmax()
    with pytest.raises(RuntimeError, match="X must be"):
        lazy @ randn(m + 1, 2)
    with pytest.raises(RuntimeError, match="X must have the dtype"):
        lazy @ randn(m, 2).float()
    with pytest.raises(ValueError, match="dim"):
        lazy.softmax(2)
    assert lazy.shape == (n, m) and lazy.dtype == torch.float64 and lazy.nnz == a.nnz
