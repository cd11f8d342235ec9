"""PyG's own modules within layers whose ``forward`` is replaced."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch_geometric.nn import Linear

from fastgraph.layers.modules import KnownLinear
from fastgraph.layers.sums import add_to

LINEAR = KnownLinear(Linear)

project = LINEAR.project


def pair_of(x: Any) -> Any:
    """Features of sources and of destinations; ``None`` for what is neither one tensor nor two."""
    if isinstance(x, Tensor):
        return (x, x)
    return x if isinstance(x, (tuple, list)) and len(x) == 2 else None


def add_root(out: Tensor, owned: bool, lin_root: Any, root: Tensor) -> Tensor:
    """``out + lin_root(root)``; ``owned`` says that ``out`` may be changed."""
    term = project(lin_root, root)
    return add_to(out, term) if owned else out + term
