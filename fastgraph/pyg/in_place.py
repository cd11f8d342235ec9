"""Adding to a layer's result in its own memory.

Where nodes have few neighbours a fresh tensor costs as much as the aggregation, because the system
zeroes its pages. Upstream writes ``out = out + term``; if nothing else can see ``out``, the sum may
take its place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastgraph.pyg.linear import project, unwatched


def add_to(out: Tensor, term: Tensor) -> Tensor:
    """``out + term``, in the memory of ``out`` where the sum has its shape and dtype."""
    fits = out.shape[out.dim() - term.dim() :] == term.shape
    in_place = fits and torch.promote_types(out.dtype, term.dtype) == out.dtype
    return out.add_(term) if in_place else out + term


def add_projections(neighbours: Tensor, owned: bool, linear: Any, of_root: Any, x: Any) -> Tensor:
    """``linear(neighbours) + of_root(x)``; ``owned`` says that ``neighbours`` may be changed."""
    out = project(linear, neighbours)
    if out is not neighbours:
        owned = unwatched(linear)
    root = project(of_root, x)
    return add_to(out, root) if owned else out + root
