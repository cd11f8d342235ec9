"""Adding to a layer's result in its own memory.

Where nodes have few neighbours a fresh tensor costs as much as the aggregation, because the system
zeroes its pages. Upstream writes ``out = out + term``; if nothing else can see ``out``, the sum may
take its place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook
from torch_geometric.nn import Linear

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def unwatched(linear: Any) -> bool:
    """Whether a module is PyG's ``Linear`` and nobody sees what it does: no hook, no other weight.

    Its result is then new memory that its gradient does not need.
    """
    if type(linear) is not Linear or _has_any_global_hook():
        return False
    attributes = vars(linear)
    watched = any(map(attributes.__getitem__, _HOOKS)) or "forward" in attributes
    return not watched and "weight" in linear._parameters


def add_to(out: Tensor, term: Tensor) -> Tensor:
    """``out + term``, in the memory of ``out`` where the sum has its shape and dtype."""
    fits = out.shape[out.dim() - term.dim() :] == term.shape
    in_place = fits and torch.promote_types(out.dtype, term.dtype) == out.dtype
    return out.add_(term) if in_place else out + term
