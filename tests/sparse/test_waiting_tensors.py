"""Values that wait where torch sees tensors: gradients, hooks, edits, checkpoints, transforms."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import dlpack
from torch.utils.checkpoint import checkpoint

import fastgraph.sparse as fgs
from fastgraph.sparse import SparseMatrix
from fastgraph.sparse.lazy_values import LazyValues
from tests.sparse.test_fusing import attention, ones, operands, randn
from tests.sparse.test_lazy_values import Cube

W = randn(3, 3, seed=21)
TWICE: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "one tensor and its transpose": (
        lambda a, x: fgs.sddmm(a, x, x.T).val,
        lambda row, col, x: (x[row] * x[col]).sum(1),
    ),
    "one made of the other": (
        lambda a, x: fgs.sddmm(a, x, (x @ W).T).val,
        lambda row, col, x: (x[row] * (x @ W)[col]).sum(1),
    ),
    "rows and columns of one tensor": (
        lambda a, x: (u := x[:, 0])[a.row] + u[a.col],
        lambda row, col, x: x[row, 0] + x[col, 0],
    ),
    "of a product with the values": (
        lambda a, x: (attended := fgs.sddmm(a, x, x.T)).val + fgs.sddmm(a, attended @ x, x.T).val,
        lambda row, col, x: (
            (v := (x[row] * x[col]).sum(1))
            + (torch.zeros_like(x).index_add(0, row, v[:, None] * x[col])[row] * x[col]).sum(1)
        ),
    ),
}


@pytest.mark.parametrize("case", TWICE)
def test_gradients_of_operands_that_are_made_of_each_other_are_added_once(case: str) -> None:
    a = ones("square")
    x = randn(6, 3, seed=20).requires_grad_()
    lazy, plain = TWICE[case]
    out, expected = Cube.apply(lazy(a, x)), plain(*a.coo(), x) ** 3
    torch.testing.assert_close(out, expected)
    found, wanted = (torch.autograd.grad(o.sum(), x, create_graph=True)[0] for o in (out, expected))
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(
        *(torch.autograd.grad(g.square().sum(), x)[0] for g in (found, wanted))
    )


def scored(a: SparseMatrix, e: Tensor, v: Tensor) -> SparseMatrix:
    return fgs.val_like(a, F.leaky_relu(e + v[a.col])).softmax()


def test_products_use_ends_as_they_were_edited() -> None:
    a = ones("square")
    u, v, x = randn(6, seed=1), randn(6, seed=2), randn(6, 3)
    e = u[a.row]
    e.mul_(2)
    torch.testing.assert_close(scored(a, e, v) @ x, scored(a, (2 * u)[a.row], v) @ x)


def test_hooks_of_ends_see_gradients() -> None:
    a = ones("square")
    u, v, x = (t.requires_grad_() for t in (randn(6, seed=1), randn(6, seed=2), randn(6, 3)))
    e = u[a.row]
    e.retain_grad()
    e.register_hook(lambda grad: 2 * grad)
    (hooked,) = torch.autograd.grad((scored(a, e, v) @ x).square().sum(), u, retain_graph=True)
    (plain,) = torch.autograd.grad((scored(a, u[a.row], v) @ x).square().sum(), u)
    torch.testing.assert_close(hooked, 2 * plain)
    (scored(a, e, v) @ x).square().sum().backward()
    assert e.grad is not None


def test_softmax_of_values_that_were_edited_before() -> None:
    a = ones("square")
    t = [x.detach() for x in operands(a.shape, None)]
    scores = fgs.sddmm(a, t[0], t[1].T)
    scores.val.mul_(3)
    expected = (fgs.sddmm(a, t[0], t[1].T) * 3).softmax()
    torch.testing.assert_close(scores.softmax() @ t[4], expected @ t[4])
    torch.testing.assert_close(scores.softmax().val.clone(), expected.val.clone())


def test_gradients_that_are_asked_for_of_values() -> None:
    a = ones("square")
    t = operands(a.shape, None)
    with torch.no_grad():
        variable = attention(a, t)
    tied = attention(a, t)
    with torch.no_grad():
        val = tied.val
    assert type(val) is LazyValues and val.requires_grad and val.clone().requires_grad
    later = variable / 2
    asked = variable.val
    asked.requires_grad_()
    assert asked.requires_grad and variable.val.requires_grad
    assert not later.val.requires_grad and not (later @ t[4].detach()).requires_grad
    (variable @ t[4]).sum().backward()
    assert asked.grad is not None


def test_memory_is_refused_not_read() -> None:
    a = ones("square")
    t = [x.detach() for x in operands(a.shape, None)]
    val = attention(a, t).val
    with pytest.raises(RuntimeError, match="data pointer"):
        dlpack.to_dlpack(val)
    assert torch.equal(torch.from_dlpack(attention(a, t).val), val.clone())


def _twice(a: SparseMatrix, t: list[Tensor]) -> Tensor:
    attended = attention(a, t)
    return attended @ t[4] + attended @ (2 * t[4])


def test_checkpoints_repeat_products() -> None:
    a = ones("square")
    t = operands(a.shape, None)
    wanted = [t[0], t[1], t[4]]
    out = checkpoint(_twice, a, t, use_reentrant=False)
    expected = _twice(ones("square"), t)
    torch.testing.assert_close(
        *(torch.autograd.grad(o.square().sum(), wanted) for o in (out, expected))
    )


@pytest.mark.parametrize(
    "use",
    [
        lambda s, x: s @ x,
        lambda s, x: fgs.val_like(s, s.val * 2) @ x,
        lambda s, x: s.val.exp().sum() * x,
    ],
)
def test_checkpoints_repeat_no_values_from_outside(
    use: Callable[[SparseMatrix, Tensor], Tensor],
) -> None:
    a = ones("square")
    t = operands(a.shape, None)
    out = checkpoint(use, attention(a, t), t[4], use_reentrant=False)
    expected = use(attention(ones("square"), t), t[4])
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(
        *(torch.autograd.grad(o.square().sum(), [t[0], t[4]]) for o in (out, expected))
    )


def test_transforms_take_values_from_outside() -> None:
    a = ones("square")
    t = [x.detach() for x in operands(a.shape, None)]
    values, tangent = attention(a, t).val.clone(), randn(a.nnz, seed=3)
    val = attention(a, t).val
    found = torch.func.grad(lambda w: (val * w).sum())(tangent)
    torch.testing.assert_close(found, values)
    val = attention(a, t).val
    _, along = torch.func.jvp(lambda w: (val * w).sum(), (tangent,), (tangent,))
    torch.testing.assert_close(along, (values * tangent).sum())


def test_compiled_functions_take_values_with_gradients() -> None:
    a = ones("square")
    t = operands(a.shape, None)
    compiled = torch.compile(lambda val, x: (val * val).sum() * x, backend="eager")
    values = attention(a, t).val.clone()
    out, expected = compiled(attention(a, t).val, t[4]), (values * values).sum() * t[4]
    torch.testing.assert_close(
        *(torch.autograd.grad(o.square().sum(), [t[0], t[4]]) for o in (out, expected))
    )
