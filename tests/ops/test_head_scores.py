"""The operator head_scores against the product and sum that it stands for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastgraph import ops


def inputs(nodes: int = 9, count: int = 2, heads: int = 3, channels: int = 5) -> list[Tensor]:
    return [
        torch.randn(nodes, heads, channels, dtype=torch.float64),
        torch.randn(count, heads, channels, dtype=torch.float64),
    ]


def upstream(x: Tensor, att: Tensor) -> Tensor:
    return (x * att.unsqueeze(1)).sum(-1)


def with_gradients(function: Any, tensors: list[Tensor]) -> list[Tensor]:
    tensors = [t.detach().requires_grad_() for t in tensors]
    out = function(*tensors)
    generator = torch.Generator().manual_seed(3)
    grad = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, tensors, grad)]


@pytest.mark.parametrize("nodes", [0, 1, 9, 700])
@pytest.mark.parametrize("channels", [0, 1, 7, 16, 33, 64, 130])
@pytest.mark.parametrize(("count", "heads"), [(1, 1), (2, 3), (3, 4), (0, 2), (2, 0)])
def test_every_size(nodes: int, count: int, heads: int, channels: int, backend: str) -> None:
    tensors = inputs(nodes, count, heads, channels)
    for a, b in zip(
        with_gradients(ops.head_scores, tensors), with_gradients(upstream, tensors), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errors_are_no_larger_than_upstreams(dtype: torch.dtype, backend: str) -> None:
    tensors = [t.to(dtype) for t in inputs(500, 2, 4, 64)]
    truth = with_gradients(upstream, [t.double() for t in tensors])
    ours, theirs = with_gradients(ops.head_scores, tensors), with_gradients(upstream, tensors)
    for a, b, exact in zip(ours, theirs, truth, strict=True):
        assert a.dtype == dtype
        rounding = torch.finfo(dtype).eps * exact.norm()
        assert (a.double() - exact).norm() <= 2 * (b.double() - exact).norm() + rounding


def test_strided_inputs_and_infinities(backend: str) -> None:
    x, att = inputs()
    x[2, 1, 0] = float("inf")
    x[3, 0, 2] = float("nan")
    strided = torch.stack([x, x], dim=-1)[..., 0]
    torch.testing.assert_close(ops.head_scores(strided, att), upstream(x, att), equal_nan=True)


def test_derivatives_and_opcheck(backend: str) -> None:
    tensors = [t.requires_grad_() for t in inputs(4, 2, 2, 3)]
    assert torch.autograd.gradcheck(ops.head_scores, tensors)
    assert torch.autograd.gradgradcheck(ops.head_scores, tensors)
    torch.library.opcheck(torch.ops.fastgraph.head_scores.default, tensors)


def test_threads_do_not_change_a_bit(restore_threads: None) -> None:
    tensors = [t.float() for t in inputs(5_000, 2, 4, 33)]
    results = []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        results.append(with_gradients(ops.head_scores, tensors))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize(
    ("x", "att", "message"),
    [
        (torch.randn(4, 6), torch.randn(1, 2, 3), "x must have shape"),
        (torch.randn(4, 2, 3), torch.randn(1, 3, 3), r"att must have shape \[count, 2, 3\]"),
        (torch.randn(4, 2, 3), torch.randn(1, 2, 3).double(), "att must have the dtype"),
        (torch.ones(4, 2, 3, dtype=torch.int64), torch.randn(1, 2, 3), "x must be one of"),
    ],
)
def test_wrong_arguments_are_named(x: Tensor, att: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.head_scores(x, att)
