"""Values that wait are tensors for everybody, and stay expressions where a product gains by it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastgraph.sparse as fgs
from fastgraph.routing.status import recording
from fastgraph.sparse import expression
from fastgraph.sparse.lazy_values import Index, LazyValues
from tests.sparse.test_fusing import attention, gat, ones, operands, randn


def dgls_gat(a: fgs.SparseMatrix, t: list[Tensor], dropout: nn.Module) -> fgs.SparseMatrix:
    """As ``examples/sparse/gat.py`` of DGL has it."""
    e = t[2][a.row] + t[3][a.col]
    attended = fgs.val_like(a, F.leaky_relu(e)).softmax()
    return fgs.val_like(attended, dropout(attended.val))


@pytest.mark.parametrize("heads", [None, 2])
@pytest.mark.parametrize("name", ["square", "wide", "tall", "hub"])
def test_gat_of_dgl_is_one_operator(name: str, heads: int | None) -> None:
    a = ones(name)
    t = operands(a.shape, heads)
    with recording() as status:
        out = dgls_gat(a, t, nn.Dropout(0.5).eval()) @ t[4]
    assert (status.row("sparse").routed, status.row("sparse").fell_back) == (1, 0)
    row, col = a.coo()
    scores = F.leaky_relu(t[2][row] + t[3][col])
    expected = fgs.val_like(a, fgs.val_like(a, scores).softmax().val) @ t[4]
    torch.testing.assert_close(out, expected)
    wanted = t[2:]
    torch.testing.assert_close(
        *(torch.autograd.grad(o.square().sum(), wanted) for o in (out, expected))
    )


@pytest.mark.parametrize("rate", [0.3, 1.0])
@pytest.mark.parametrize("heads", [None, 2])
@pytest.mark.parametrize("name", ["square", "hub", "wide"])
def test_dropout_is_the_same_by_values_and_by_the_product(
    name: str, heads: int | None, rate: float
) -> None:
    a = ones(name)
    t = operands(a.shape, heads)
    dropped = dgls_gat(a, t, nn.Dropout(rate))
    with recording() as status:
        out = dropped @ t[4]
    assert status.row("sparse").routed == 1
    values = dropped.val.clone()
    assert (values == 0).any() or rate < 1
    expected = fgs.val_like(a, values) @ t[4]
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(
        *(torch.autograd.grad(o.square().sum(), t[2:]) for o in (out, expected))
    )


def test_dropout_draws_anew() -> None:
    a = ones("hub")
    t = [x.detach() for x in operands(a.shape, None)]
    torch.manual_seed(3)
    first, second = (dgls_gat(a, t, nn.Dropout(0.5)).val.clone() for _ in range(2))
    torch.manual_seed(3)
    again = dgls_gat(a, t, nn.Dropout(0.5)).val.clone()
    assert torch.equal(first, again) and not torch.equal(first, second)
    undropped = dgls_gat(a, t, nn.Dropout(0.5).eval()).val.clone()
    kept = first != 0
    torch.testing.assert_close(first[kept], 2 * undropped[kept])


FUNCTIONS: list[Callable[[Tensor], Any]] = [
    lambda v: v.sum(),
    lambda v: torch.exp(v) + 1,
    lambda v: (v * 2 + 1) / 3,
    lambda v: 1 - v,
    lambda v: 2 / (v + 4),
    lambda v: v * torch.arange(len(v)),
    lambda v: v[3:],
    lambda v: v.view(-1, 1),
    lambda v: v.tolist(),
    lambda v: v.detach().numpy().sum(),
    lambda v: v.float(),
    lambda v: v > 0,
    lambda v: torch.stack([v, v]),
    lambda v: torch.softmax(v, 0),
    lambda v: F.leaky_relu(v),
    lambda v: F.dropout(v, 0.5, training=False),
    lambda v: repr(v.detach()),
    lambda v: pickle.loads(pickle.dumps(v.detach())),
    lambda v: copy.deepcopy(v.detach()),
    lambda v: v.data_ptr() != 0,
    lambda v: v.requires_grad,
    lambda v: (*v.shape, v.dtype, v.device, v.dim(), len(v), v.numel()),
    lambda v: -v,
    lambda v: v.clone().mul_(2),
    lambda v: torch.add(v, v, alpha=2),
    lambda v: v.new_zeros(3),
    lambda v: torch.ops.aten.add.Tensor(v, 1),
    lambda v: torch.jit.script(_doubled)(v),
]


def _doubled(v: Tensor) -> Tensor:
    return v * 2


@pytest.mark.parametrize("number", range(len(FUNCTIONS)))
def test_functions_take_values(number: int) -> None:
    a = ones("square")
    t = operands(a.shape, None)
    function = FUNCTIONS[number]
    found = function(attention(a, t).val)
    values = attention(a, t).val.clone()
    expected = function(values)
    if not isinstance(expected, Tensor):
        assert found == expected
        return
    torch.testing.assert_close(found.clone(), expected)
    if expected.requires_grad:
        torch.testing.assert_close(
            *(torch.autograd.grad(o.square().sum(), t[:2]) for o in (found, expected))
        )


class Cube(torch.autograd.Function):
    """A function of which torch shows nobody the arguments."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grads[0]


def test_functions_of_autograd_that_see_the_tensor_itself() -> None:
    a = ones("square")
    t = operands(a.shape, None)
    val = attention(a, t).val
    assert type(val) is LazyValues
    out = Cube.apply(val)
    expected = attention(a, t).val.clone() ** 3
    torch.testing.assert_close(out, expected)
    found, wanted = (
        torch.autograd.grad(o.sum(), t[:2], create_graph=True) for o in (out, expected)
    )
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(
        *(torch.autograd.grad(sum(g.square().sum() for g in p), t[:2]) for p in (found, wanted))
    )


def test_backward_of_values_and_their_gradient() -> None:
    a = ones("square")
    t = operands(a.shape, None)
    s = attention(a, t)
    s.val.retain_grad()
    (s @ t[4]).sum().backward()
    assert s.val.grad is not None and s.val.grad.shape == (a.nnz,)
    t[0].grad = None
    attention(a, t).val.backward(torch.ones(a.nnz, dtype=torch.float64))
    assert t[0].grad is not None


def test_values_edited_in_place_are_those_of_the_matrix_and_an_error_for_others() -> None:
    a = ones("square")
    t = [x.detach() for x in operands(a.shape, None)]
    s = attention(a, t)
    later = s / 2
    s.val.mul_(3)
    torch.testing.assert_close(s.val, attention(a, t).val.clone() * 3)
    torch.testing.assert_close(s @ t[4], 3 * (attention(a, t) @ t[4]))
    torch.testing.assert_close((s / 2).val, attention(a, t).val.clone() * 1.5)
    for use in (lambda m: m.val.clone(), lambda m: m @ t[4]):
        with pytest.raises(RuntimeError, match="edited in place"):
            use(later)


def test_indices_are_tensors_like_others() -> None:
    a = ones("wide")
    plain = a.pattern.row
    assert type(a.row) is Index and torch.equal(a.row, plain)
    for found in (a.row + 1, a.row.long().clone(), torch.stack([a.row, a.col]), a.row[2:]):
        assert type(found) is Tensor
    assert a.row.dtype == plain.dtype and a.row.tolist() == plain.tolist()
    assert torch.equal(randn(2, a.shape[0])[:, a.row], randn(2, a.shape[0])[:, plain])
    features = randn(a.shape[0], 2, 3)
    assert torch.equal(features[a.row], features[plain])
    assert type(features[a.row]) is Tensor
    longer = randn(a.shape[0] + 1)
    assert type(longer[a.row]) is Tensor and torch.equal(longer[a.row], longer[plain])
    with pytest.raises(IndexError):
        randn(1)[a.row]
    numbers = torch.arange(a.shape[0])
    assert torch.equal(numbers[a.row], plain.long())
    assert torch.equal(pickle.loads(pickle.dumps(a.row)), plain)
    assert type(copy.deepcopy(a.row)) is Tensor
    assert repr(a.row) == repr(plain)
    again = fgs.from_coo(a.row, a.col, shape=a.shape)
    assert torch.equal(again.indices(), a.indices())
    written = torch.zeros(a.shape[0], dtype=torch.float64)
    written[a.row] = 1.0
    assert torch.equal(written.nonzero().squeeze(1), plain.unique())


def test_values_of_another_pattern() -> None:
    a, b = ones("square"), ones("square")
    t = [x.detach() for x in operands(a.shape, None)]
    lazy = t[2][a.row]
    assert type(lazy) is LazyValues
    assert fgs.val_like(a, lazy).values is lazy.expression
    both = lazy + t[3][b.col]
    torch.testing.assert_close(both.clone(), t[2][a.pattern.row] + t[3][b.pattern.col])
    torch.testing.assert_close(fgs.val_like(b, lazy).val.clone(), t[2][a.pattern.row])


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_copies_of_matrices(copied: Callable[[fgs.SparseMatrix], fgs.SparseMatrix]) -> None:
    a = ones("square")
    t = [x.detach() for x in operands(a.shape, None)]
    t[0].mul_(2)
    lazy = attention(a, t)
    torch.testing.assert_close(copied(lazy).val.clone(), attention(a, t).val.clone())
    torch.testing.assert_close(copied(lazy / 2) @ t[4], (attention(a, t) / 2) @ t[4])
    torch.testing.assert_close(attention(copied(a), t) @ t[4], attention(a, t) @ t[4])
    a.val.fill_(2)
    edited = copied(a)
    doubled = fgs.sddmm(edited, t[0], t[1].T).val.clone()
    torch.testing.assert_close(doubled, 2 * fgs.sddmm(ones("square"), t[0], t[1].T).val.clone())


def test_few_values_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    a = ones("square")
    t = operands(a.shape, None)
    expected = [form(a, t).val.clone() for form in (attention, gat)]
    monkeypatch.setattr(expression, "FEWEST_VALUES", 64 * a.nnz + 1)
    for form, values in zip((attention, gat), expected, strict=True):
        found = form(a, t)
        assert type(found.val) is Tensor and type(a.row) is Tensor
        torch.testing.assert_close(found.val, values)
    biased = fgs.sp_add_v(a, t[2].unsqueeze(1))
    assert type(biased.val) is Tensor


def test_nothing_waits_in_inference_mode() -> None:
    a = ones("square")
    t = operands(a.shape, None)
    with torch.inference_mode():
        assert type(a.row) is Tensor and type(gat(a, t).val) is Tensor
