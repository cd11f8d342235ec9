"""Parts of rows, concatenated once for each of several factors of rows, with no copy between.

That is what scalers of degrees make of several aggregations. By torch's own operations it would
store the parts once more for each factor, and so would the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def scaled_parts(parts: Sequence[Tensor], factors: Sequence[Tensor | None]) -> Tensor:
    """``cat([factor * cat(parts, -1) for factor in factors], -1)``, given no subclasses of tensors.

    Args:
        parts: ``[*rows, width]`` of any widths, of one dtype.
        factors: ``[*rows, 1]``, or as many numbers where all rows have the same, of that dtype and
            without a gradient. ``None`` stands for 1.

    Returns:
        ``[*rows, len(factors) * widths]``.
    """
    out: Tensor = _ScaledParts.apply(tuple(factors), *parts)  # type: ignore[no-untyped-call]
    return out


class _ScaledParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, factors: tuple[Tensor | None, ...], *parts: Tensor) -> Tensor:
        ctx.factors, ctx.widths = factors, [part.shape[-1] for part in parts]
        width = len(factors) * sum(ctx.widths)
        out = parts[0].new_empty(*parts[0].shape[:-1], width)
        of_each = iter(out.split(ctx.widths * len(factors), dim=-1))
        for factor in factors:
            for part, piece in zip(parts, of_each, strict=False):
                if factor is None:
                    piece.copy_(part)
                else:
                    torch.mul(part, factor, out=piece)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        pieces = grad.split(ctx.widths * len(ctx.factors), dim=-1)
        found = (
            _gradient(pieces[k :: len(ctx.widths)], ctx.factors) if is_needed else None
            for k, is_needed in enumerate(ctx.needs_input_grad[1:])
        )
        return None, *found


def _gradient(pieces: Sequence[Tensor], factors: Sequence[Tensor | None]) -> Tensor:
    """The sum of a part's gradients, each times its factor."""
    found: Tensor | None = None
    for piece, factor in zip(pieces, factors, strict=True):
        if found is None:
            found = piece.clone() if factor is None else piece * factor
        else:  # in place: it is nobody else's, and no gradient of a sum needs it
            found = found.add_(piece) if factor is None else found.addcmul_(piece, factor)
    assert found is not None
    return found
