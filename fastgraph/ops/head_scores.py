"""``head_scores``: dot products of each node's heads with a few vectors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastgraph.backends import reference
from fastgraph.machine.memory import contiguous
from fastgraph.ops.heads import check_heads
from fastgraph.ops.library import (
    Arguments,
    Context,
    Gradient,
    define,
    needs_torch_operations,
    wanted_gradients,
)
from fastgraph.plugins.backend import device_type
from fastgraph.registry.registry import REGISTRY


def head_scores(x: Tensor, att: Tensor) -> Tensor:
    r"""The scores :math:`s_{knh} = \langle x_{nh}, a_{kh} \rangle` by which GAT rates nodes.

    The same as ``(x * att.unsqueeze(1)).sum(-1)`` without the product: ``x`` is read once in the
    forward pass and once in the backward pass.

    Args:
        x: features ``[nodes, heads, channels]``, float32, float64, bfloat16 or float16.
        att: vectors ``[count, heads, channels]``.

    Returns:
        ``[count, nodes, heads]``.

    Raises:
        ValueError: an argument has the wrong shape, dtype or device.
    """
    out: Tensor = HEAD_SCORES(x, att)
    return out


def _check(x: Tensor, att: Tensor) -> torch.Size:
    check_heads("x", x, ("nodes", "heads", "channels"), x)
    check_heads("att", att, ("count", *x.shape[1:]), x)
    return torch.Size((att.shape[0], *x.shape[:2]))


def _forward(x: Tensor, att: Tensor) -> Tensor:
    _check(x, att)
    kernel = REGISTRY.kernel("head_scores", device_type(x), x.dtype)
    return kernel(contiguous(x), contiguous(att))  # type: ignore[no-any-return]


def _fake(x: Tensor, att: Tensor) -> Tensor:
    return x.new_empty(_check(x, att))


def _backward(
    x: Tensor, att: Tensor, grad: Tensor, addend: Tensor | None, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    check_heads("grad", grad, list(_check(x, att)), x)
    if addend is not None:
        check_heads("addend", addend, list(x.shape), x)
        addend = contiguous(addend)
    kernel = REGISTRY.kernel("head_scores_backward", device_type(x), x.dtype)
    given = (contiguous(x), contiguous(att), contiguous(grad))
    grad_x, grad_att = kernel(*given, addend=addend, wanted=wanted)
    wants_x, wants_att = wanted
    return grad_x if wants_x else x.new_empty(0), grad_att if wants_att else att.new_empty(0)


def _backward_fake(
    x: Tensor, att: Tensor, grad: Tensor, addend: Tensor | None, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    wants_x, wants_att = wanted
    return x.new_empty(x.shape if wants_x else 0), att.new_empty(att.shape if wants_att else 0)


def _save(ctx: Context, arguments: Arguments, result: Tensor) -> None:
    ctx.save_for_backward(*arguments)


def _gradient(ctx: Context, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x, att = ctx.saved_tensors
    return score_gradients(x, att, grad, None, wanted_gradients(ctx)[:2])


def score_gradients(
    x: Tensor, att: Tensor, grad: Tensor, addend: Tensor | None, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of both arguments that are wanted; ``addend`` is added to that of ``x``."""
    if needs_torch_operations(grad, addend):
        return reference.head_scores_backward(x, att, grad, addend=addend, wanted=wanted)
    grad_x, grad_att = HEAD_SCORES_BACKWARD(x, att, grad, addend, wanted)
    wants_x, wants_att = wanted
    return grad_x if wants_x else None, grad_att if wants_att else None


HEAD_SCORES_BACKWARD = define(
    "head_scores_backward(Tensor x, Tensor att, Tensor grad, Tensor? addend, bool[] wanted) "
    "-> (Tensor, Tensor)",
    _backward,
    _backward_fake,
)
HEAD_SCORES = define(
    "head_scores(Tensor x, Tensor att) -> Tensor",
    _forward,
    _fake,
    Gradient((0, 1), _save, _gradient),
)
