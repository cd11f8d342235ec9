"""PyG's ``Linear`` within layers whose ``forward`` is replaced."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook
from torch_geometric.nn import Linear
from torch_geometric.nn.aggr import MaxAggregation, MeanAggregation, MinAggregation, SumAggregation

from fastgraph.linear import linear

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

# As PyG defines them; a program may replace them later.
_FORWARDS = {
    cls: cls.forward
    for cls in (Linear, SumAggregation, MeanAggregation, MaxAggregation, MinAggregation)
}


def is_watched(module: Any) -> bool:
    """Whether somebody would notice that a module of PyG is not called, or calls something else."""
    attributes = vars(module)
    return (
        any(map(attributes.__getitem__, _HOOKS))
        or "forward" in attributes
        or type(module).forward is not _FORWARDS[type(module)]
    )


def unwatched(module: Any) -> bool:
    """Whether a module is PyG's ``Linear`` and nobody sees what it does: no hook, no other weight.

    Its result is then new memory that its gradient does not need.
    """
    if type(module) is not Linear or _has_any_global_hook():
        return False
    return not is_watched(module) and "weight" in module._parameters


def project(module: Any, x: Tensor) -> Tensor:
    """``module(x)``; the same in huge pages, if that makes no other difference."""
    if unwatched(module):
        return linear(x, module.weight, module.bias)
    result: Tensor = module(x)
    return result
