"""Rules for torch's operations on sharded tensors; importing these modules registers them."""

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
