"""Rules for operations of torch, which are in the table once these modules are imported."""

from __future__ import annotations

from fastgraph.dist.tensor.rules import (
    indexing,
    losses,
    metadata,
    normalisation,
    pointwise,
    products,
    random,
    recurrent,
    reductions,
    reversible,
    scatter,
    shapes,
)

__all__ = [
    "indexing",
    "losses",
    "metadata",
    "normalisation",
    "pointwise",
    "products",
    "random",
    "recurrent",
    "reductions",
    "reversible",
    "scatter",
    "shapes",
]
