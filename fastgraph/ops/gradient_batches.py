"""Gradients for a batch of gradients of results, or for one with a tangent, by the same kernels.

``torch.autograd.grad(..., is_grads_batched=True)`` and ``torch.func.vmap`` around
``torch.autograd.grad`` hand a backward pass tensors in which the batch is hidden, and
``torch.autograd.forward_ad`` those that have tangents. Where a kernel finds again what an earlier
one has computed, as the edges that attain a maximum, torch's own operations would not: their
products have other roundings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

_functorch = torch._C._functorch

Gradients = Sequence[Tensor | None]


def is_batch(tensor: Tensor) -> bool:
    """True if a batch is hidden in a tensor, by either of torch's two ways."""
    return _functorch.is_batchedtensor(tensor) or _functorch.is_legacy_batchedtensor(tensor)


def has_tangent(grad: Tensor) -> bool:
    """True if a tensor has a tangent, by ``torch.autograd.forward_ad``."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(grad).tangent is not None


def by_batch(backward: Callable[..., Gradients], grads: Gradients) -> list[Tensor | None]:
    """``backward(*grads)`` for each of a batch, as the batch of what it returns.

    Args:
        backward: returns gradients, or ``None`` in their places, for gradients of results.
        grads: of results, with a batch hidden in some, and ``None`` in the places of others.
    """
    unpack, pack = _of_functorch(grads) or _of_autograd()
    plain = [None if g is None else unpack(g) for g in grads]
    count = max(len(g) for g in plain if g is not None)
    found = [backward(*one) for one in _each(plain, count)]
    return [
        None if column[0] is None else pack(torch.stack([t for t in column if t is not None]))
        for column in zip(*found, strict=True)
    ]


def with_tangents(backward: Callable[..., Gradients], grads: Gradients) -> list[Tensor | None]:
    """``backward(*grads)`` with its tangents, which are linear in those of ``grads``.

    Args:
        backward: returns gradients, or ``None`` in their places, for gradients of results.
        grads: of results, some with tangents, and ``None`` in the places of others.
    """
    parts = [(None, None) if g is None else tuple(forward_ad.unpack_dual(g)) for g in grads]
    primals, tangents = backward(*(p for p, _ in parts)), backward(*(t for _, t in parts))
    return [
        p if p is None or t is None else forward_ad.make_dual(p, t)
        for p, t in zip(primals, tangents, strict=True)
    ]


def _each(grads: Gradients, count: int) -> Iterator[list[Tensor | None]]:
    for k in range(count):
        yield [None if g is None else g[min(k, len(g) - 1)] for g in grads]


_Way = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]
"""How a batch is shown and hidden: it is the first dimension, of size 1 where all are the same."""


def _of_functorch(grads: Gradients) -> _Way | None:
    batches = [g for g in grads if g is not None and _functorch.is_batchedtensor(g)]
    if not batches:
        return None
    level = max(_functorch.maybe_get_level(g) for g in batches)

    def unpack(grad: Tensor) -> Tensor:
        if not _functorch.is_batchedtensor(grad) or _functorch.maybe_get_level(grad) != level:
            return grad.unsqueeze(0)
        plain: Tensor = _functorch.get_unwrapped(grad)
        return plain.movedim(_functorch.maybe_get_bdim(grad), 0)

    return unpack, lambda found: _functorch._add_batch_dim(found, 0, level)


def _of_autograd() -> _Way:
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    return (
        lambda grad: torch._remove_batch_dim(grad, level, 1, 0),
        lambda found: torch._add_batch_dim(found, 0, level),
    )
