"""Adding bias and other terms to a layer's result in place.

Where nodes have few neighbours a fresh tensor can cost as much as the aggregation, because the
system zeroes its pages. Upstream writes ``out = out + term``; if nothing else can see ``out``, the
sum may take its place.
"""

from __future__ import annotations

import torch
from torch import Tensor


def add_to(out: Tensor, term: Tensor) -> Tensor:
    """``out + term``, in the memory of ``out`` where the sum has its shape and dtype."""
    fits = out.shape[out.dim() - term.dim() :] == term.shape
    # In place, a term on the meta device would be no error.
    in_place = fits and out.is_meta == term.is_meta
    in_place = in_place and torch.promote_types(out.dtype, term.dtype) == out.dtype
    # Nor where `term` alone has the dimension that `torch.func.vmap` hides.
    in_place = in_place and not _is_transformed()
    return out.add_(term) if in_place else out + term


def _is_transformed() -> bool:
    """True within a transform of ``torch.func``, other than those that torch compiles."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None


def first_rows(x: Tensor, num_rows: int) -> Tensor:
    """``x[:num_rows]``, or ``x`` itself where these are all."""
    return x if num_rows == len(x) else x[:num_rows]
