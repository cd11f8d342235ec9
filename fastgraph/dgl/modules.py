"""torch's own modules within layers whose ``forward`` is replaced."""

from __future__ import annotations

from typing import Any

from torch import nn

from fastgraph.layers.modules import KnownLinear, KnownModules
from fastgraph.plugins.refusal import Refusal

LINEAR = KnownLinear(nn.Linear)

project = LINEAR.project

_ON_EDGES = KnownModules(nn.Dropout, nn.LeakyReLU)


def edge_module_refusal(name: str, module: Any, cls: type[nn.Module]) -> Refusal | None:
    """Why a module that upstream calls on a tensor of edges cannot be left out.

    Args:
        name: of the module in its layer.
        module: what stands there.
        cls: what upstream puts there.
    """
    if type(module) is not cls:
        return Refusal(f"{name} is a {type(module).__name__}")
    return Refusal(f"{name} has hooks or is replaced") if _ON_EDGES.is_watched(module) else None
