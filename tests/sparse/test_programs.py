"""Expressions as edge programs and their reductions, beside separate operators in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fastgraph.sparse as fgs
from fastgraph.routing.status import recording
from fastgraph.sparse import SparseMatrix, fusing
from fastgraph.sparse.groups import REDUCTIONS
from tests.sparse.matrices import PLACES
from tests.sparse.test_fusing import NAMES, attention, ones, operands, randn

Form = Callable[[SparseMatrix, list[Tensor]], SparseMatrix]


@pytest.fixture(autouse=True)
def _however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_FEWEST_OF_PROGRAM", "_FEWEST_OF_ROW", "_WIDE"):
        monkeypatch.setattr(fusing, name, 0)
    for name in ("_MOST_SCALED", "_MOST_SCALED_TRAINING"):
        monkeypatch.setattr(fusing, name, torch.inf)
    monkeypatch.setattr(fusing, "_slower_of_one_head", lambda *_, **__: None)


def dots(t: list[Tensor]) -> fgs.Virtual:
    return fgs.dense(t[0]) @ t[1].transpose(0, 1)


def vanilla(a: SparseMatrix, t: list[Tensor]) -> SparseMatrix:
    return a * dots(t)


def cosine(a: SparseMatrix, t: list[Tensor]) -> SparseMatrix:
    return a * (dots(t) * 2 / (fgs.rows(t[2].exp()) * fgs.cols(t[3].exp())))


def squared(a: SparseMatrix, t: list[Tensor]) -> SparseMatrix:
    return a * (dots(t) * dots(t))


def gated(a: SparseMatrix, t: list[Tensor]) -> SparseMatrix:
    return a * (torch.sigmoid(dots(t) / fgs.rows(t[2].exp())) - fgs.cols(t[3]))


def sums(a: SparseMatrix, t: list[Tensor]) -> SparseMatrix:
    return a * F.elu(fgs.rows(t[2]) + fgs.cols(t[3]), 0.5)


def ends(a: SparseMatrix, t: list[Tensor]) -> SparseMatrix:
    return a * (fgs.rows(t[2]) / fgs.cols(t[3].exp()))


def powers(a: SparseMatrix, t: list[Tensor]) -> SparseMatrix:
    return a * ((fgs.rows(t[2]) - fgs.cols(t[3])) ** 2 - 0.5)


def additive(a: SparseMatrix, t: list[Tensor]) -> SparseMatrix:
    vector = t[4][0].detach()
    return a * (F.leaky_relu(fgs.rows(t[0]) + fgs.cols(t[1]), 0.2) @ vector)


FORMS: list[Form] = [vanilla, cosine, squared, gated, sums, ends, powers, additive]


def matches(found: Tensor, expected: Tensor, wanted: list[Tensor]) -> None:
    """With gradients, and gradients of these."""
    torch.testing.assert_close(found, expected)
    grad = randn(*found.shape, seed=9)
    both = [
        torch.autograd.grad(
            o, wanted, grad, allow_unused=True, materialize_grads=True, create_graph=True
        )
        for o in (found, expected)
    ]
    torch.testing.assert_close(*both)
    again = [
        torch.autograd.grad(
            sum(g.square().sum() for g in p), wanted, allow_unused=True, materialize_grads=True
        )
        for p in both
    ]
    torch.testing.assert_close(*again)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("reduce", ["sum", "smean", "smax", "smin"])
@pytest.mark.parametrize("heads", [None, 2])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_reductions_of_rows_and_columns(
    name: str, form: Form, heads: int | None, reduce: str, dim: int
) -> None:
    a = ones(name)
    t = operands(a.shape, heads)
    lazy = form(a, t)
    with recording() as status:
        found = lazy.reduce(dim, reduce)
    assert (status.row("sparse").routed, status.row("sparse").fell_back) == (1, 0)
    assert not lazy.values.is_computed
    matches(found, fgs.val_like(a, form(a, t).val.clone()).reduce(dim, reduce), t)


@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("is_softmax", [False, True])
@pytest.mark.parametrize("heads", [None, 2])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_products(
    name: str, form: Form, heads: int | None, is_softmax: bool, is_wide: bool
) -> None:
    a = ones(name)
    t = operands(a.shape, heads)
    x = t[4] if is_wide else randn(a.shape[1], 2, *t[4].shape[2:], seed=7).requires_grad_()

    def made() -> SparseMatrix:
        return form(a, t).softmax() if is_softmax else form(a, t)

    with recording() as status:
        found = made() @ x
    assert (status.row("sparse").routed, status.row("sparse").fell_back) == (1, 0)
    matches(found, fgs.val_like(a, made().val.clone()) @ x, [*t[:4], x])


@pytest.mark.parametrize("reduce", ["smax", "smin"])
@pytest.mark.parametrize("dim", [0, 1])
def test_ties_and_zeros(reduce: str, dim: int) -> None:
    """Whole numbers, of which many are equal and many are 0."""
    a = ones("hub")
    q, k = ((randn(40, 2, seed=s).round().clamp(-1, 1)).requires_grad_() for s in (1, 2))
    found = (a * (fgs.dense(q) @ k.T)).reduce(dim, reduce)
    expected = fgs.val_like(a, fgs.sddmm(a, q, k.T).val.clone()).reduce(dim, reduce)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        *(torch.autograd.grad(o.square().sum() + o.sum(), (q, k)) for o in (found, expected))
    )


@pytest.mark.parametrize("form", [cosine, ends])
def test_infinite_factors_of_rows_without_entries(form: Form) -> None:
    """As degrees of isolated nodes to the power of -1/2, in sums and in gradients."""
    t = operands((6, 6), None)
    where = torch.tensor([[0, 1, 1, 4], [5, 1, 5, 0]])
    b = SparseMatrix(
        fgs.spmatrix(where, shape=(6, 6)).pattern, torch.ones(4, dtype=torch.float64), is_ones=True
    )
    t[2] = torch.tensor([0.5, 1, -torch.inf, torch.inf, 0.3, torch.inf]).double().requires_grad_()
    t[3] = torch.tensor([0.5, 1, -torch.inf, torch.inf, -torch.inf, 2.0]).double().requires_grad_()
    for sink in (
        lambda s: s @ t[4],
        lambda s: s.sum(1),
        lambda s: s.sum(0),
        lambda s: s.softmax() @ t[4],
    ):
        found = sink(form(b, t))
        with torch.no_grad():
            torch.testing.assert_close(sink(form(b, t)), found)
        assert found.isfinite().all()
        grads = torch.autograd.grad(found.sum(), t, allow_unused=True)
        assert all(g.nan_to_num(0, 0, 0).equal(g) for g in grads[:2] if g is not None)
        expected = sink(fgs.val_like(b, form(b, t).val.clone()))
        torch.testing.assert_close(found, expected)


def _kinds(x: Tensor) -> Tensor:
    return x.nan_to_num(nan=7.0, posinf=8.0, neginf=9.0)


SCALED: list[Form] = [
    lambda a, t: a * dots(t) / (fgs.rows(t[2]) * fgs.cols(t[3])),
    lambda a, t: a * (dots(t) * fgs.rows(t[2]) * fgs.cols(t[3])),
    lambda a, t: a * (fgs.rows(t[2]) * fgs.cols(t[3])),
    lambda a, t: a * (fgs.rows(t[2]) / fgs.cols(t[3])),
]
SINKS = [
    lambda s, x: s @ x,
    lambda s, x: s.softmax() @ x,
    lambda s, x: s.sum(1),
    lambda s, x: s.smean(0),
    lambda s, x: s.smax(1),
]


@pytest.mark.parametrize("number", [torch.inf, -torch.inf, torch.nan, 0.0])
@pytest.mark.parametrize("form", SCALED)
def test_infinite_factors_are_left_to_separate_operators(form: Form, number: float) -> None:
    """Infinity, or 1 over 0, times a sum is another number than the sum of infinite terms."""
    a = ones("square")
    for place in (2, 3):
        t = operands(a.shape, None)
        with torch.no_grad():
            t[0][::2] = 0.0  # dot products of which are 0
            t[place][1::2] = number
        for sink in SINKS:
            a.pattern.reused.clear()
            with recording() as status:
                found = sink(form(a, t), t[4])
            is_divisor = form in (SCALED[0], SCALED[3]) and (form is SCALED[0] or place == 3)
            expects_refusal = number != 0 or is_divisor
            reasons = list(status.row("sparse").reasons)
            if form in SCALED[:2] or sink in (SINKS[0], SINKS[2], SINKS[3]):
                assert reasons == ["infinite factors, or divisors of 0"] * expects_refusal
            expected = sink(fgs.val_like(a, form(a, t).val.clone()), t[4])
            torch.testing.assert_close(_kinds(found), _kinds(expected))
            for f, e in zip(
                *(torch.autograd.grad(o.sum(), t, allow_unused=True) for o in (found, expected)),
                strict=True,
            ):
                assert (f is None) == (e is None)
                if f is not None and e is not None:
                    torch.testing.assert_close(_kinds(f), _kinds(e))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("heads", [None, 2])
def test_sums_of_infinite_features(heads: int | None, dim: int) -> None:
    """Of rows without entries they are 0; elsewhere the kinds are those of separate products."""
    a = ones("hub")
    for number in (torch.inf, -torch.inf, torch.nan):
        for place, rows in ((0, slice(3, None, 9)), (0, 7), (1, slice(0, None, 3)), (1, 8)):
            t = operands(a.shape, heads)
            with torch.no_grad():
                t[place][rows, 0] = number
                t[1 - place][::2, 0] = 0
            for reduce in ("sum", "smean"):
                a.pattern.reused.clear()
                lazy = vanilla(a, t)
                with recording() as status:
                    found = lazy.reduce(dim, reduce)
                separate = fgs.val_like(a, vanilla(a, t).val.clone()).reduce(dim, reduce)
                torch.testing.assert_close(_kinds(found), _kinds(separate))
                row = status.row("sparse")
                assert row.routed + row.fell_back == 1
                if not separate.isfinite().all():  # by separate operators, though it was begun
                    assert [*row.reasons] == ["a sum that is infinite, or NaN"]


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("heads", [None, 2])
@pytest.mark.parametrize("name", ["square", "wide", "one"])
def test_a_bias_and_a_factor_for_each_entry_and_head(
    name: str, heads: int | None, is_shared: bool
) -> None:
    """Added to scores, and multiplied with them, as tensors beside the values that wait."""
    if is_shared and heads is None:
        pytest.skip("there are no other heads")
    a = ones(name)
    t = operands(a.shape, heads)
    last = () if heads is None else (1 if is_shared else heads,)
    bias, factor = (randn(a.nnz, *last, seed=s).requires_grad_() for s in (12, 13))

    def made(values: Tensor) -> Tensor:
        return (bias + values / 3**0.5 * factor).neg() - bias * 0.5

    with recording() as status:
        lazy = fgs.val_like(a, made(fgs.bsddmm(a, t[0], t[1].transpose(0, 1)).val)).softmax()
        found = lazy @ t[4]
    assert status.row("sparse").programs == 1
    scores = fgs.bsddmm(a, t[0], t[1].transpose(0, 1)).val.clone()
    expected = fgs.val_like(a, made(scores)).softmax() @ t[4]
    matches(found, expected, [t[0], t[1], t[4], bias, factor])


def test_heads_beside_one() -> None:
    """Dot products of one head times factors of several."""
    a = ones("square")
    t, u = operands(a.shape, None), operands(a.shape, 2)

    def made() -> SparseMatrix:
        return a * (dots(t) * fgs.rows(u[2]) / fgs.cols(u[3].exp()))

    wanted = [*t[:2], u[2], u[3], u[4]]
    for sink in (lambda s: s @ u[4], lambda s: s.sum(1), lambda s: s.smax(0)):
        with recording() as status:
            found = sink(made())
        assert status.row("sparse").routed == 1
        matches(found, sink(fgs.val_like(a, made().val.clone())), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", [vanilla, gated, ends])
def test_other_dtypes(dtype: torch.dtype, form: Form) -> None:
    exact = operands(PLACES["hub"][0], 2)
    b = ones("hub").to(dtype=dtype)
    t = [x.detach().to(dtype) for x in exact]
    for sink in ("sum", "smax"):
        found = form(b, t).reduce(1, sink).double()
        expected = form(ones("hub"), exact).reduce(1, sink)
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.3)


def test_a_second_reduction_uses_values() -> None:
    a = ones("square")
    t = operands(a.shape, None)
    lazy = gated(a, t)
    with recording() as status:
        first, second, third = lazy.sum(1), lazy.sum(1), lazy @ t[4]
    assert (status.row("sparse").routed, status.row("sparse").fell_back) == (1, 2)
    torch.testing.assert_close(first, second)
    torch.testing.assert_close(third, fgs.val_like(a, lazy.val.clone()) @ t[4])


REASONS: list[tuple[str, Form]] = [
    ("more than 2 dot", lambda a, t: a * (dots(t) * dots(t) + dots(t))),
    ("softmax within", lambda a, t: attention(a, t) * 2),
    ("no instruction for selu", lambda a, t: a * F.selu(dots(t))),
    ("with such arguments", lambda a, t: a * F.softplus(dots(t), 2.0)),
    ("functions of values", lambda a, t: a * (dots(t) + _long(t))),
]


def _long(t: list[Tensor]) -> fgs.Virtual:
    made = fgs.rows(t[2]) + fgs.cols(t[3])
    for _ in range(30):
        made = torch.tanh(made)
    return made


@pytest.mark.parametrize(("reason", "form"), REASONS)
def test_all_else_is_separate_and_says_why(reason: str, form: Form) -> None:
    a = ones("square")
    t = operands(a.shape, None)
    for sink in (lambda s: s @ t[4], lambda s: s.smax(1), lambda s: s.sum(0)):
        with recording() as status:
            out = sink(form(a, t))
        (found,) = status.row("sparse").reasons
        assert reason in found
        torch.testing.assert_close(out, sink(fgs.val_like(a, form(a, t).val.clone())))
        a.pattern.reused.clear()


@pytest.mark.parametrize("reduce", [*REDUCTIONS])
def test_explained(reduce: str) -> None:
    a = ones("square")
    t = operands(a.shape, None)
    for form, operator in ((vanilla, "spmm"), (gated, "edge_program")):
        by = operator if reduce in ("sum", "smean") else "edge_program"
        text = fgs.explain(form(a, t), reduce=reduce)
        if reduce == "sprod":
            assert "sprod of groups: products of the values" in text
        else:
            assert f"{reduce}: one group" in text and f"by {by}" in text
    with pytest.raises(ValueError, match="reduce must be one of"):
        fgs.explain(vanilla(a, t), reduce="max")


def test_large_graphs_of_one_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are decided on, with nothing else set."""
    monkeypatch.undo()
    index = torch.randint(0, 400, (2, 80000), generator=torch.Generator().manual_seed(0))
    a = fgs.from_edge_index(index, num_nodes=400)
    t = [x.float().detach() for x in operands((400, 400), None)]
    t[0], t[1] = (randn(400, 64, seed=s).float().requires_grad_() for s in (1, 2))
    assert "by spmm" in fgs.explain(vanilla(a, t), reduce="sum")
    assert "gradients of values of one head" in fgs.explain(vanilla(a, t), reduce="smax")
    with torch.no_grad():
        assert "by edge_program" in fgs.explain(vanilla(a, t), reduce="smax")
        assert "by edge_program" in fgs.explain(gated(a, t))
        assert "too few entries" in fgs.explain(sums(a, t), reduce="sum")
