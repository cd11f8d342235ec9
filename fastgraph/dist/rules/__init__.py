"""The rules, which are in the table once these modules are imported."""

from __future__ import annotations

from fastgraph.dist.rules import (
    dense_attention,
    indexing,
    losses,
    metadata,
    normalisation,
    operators,
    pointwise,
    products,
    random,
    reductions,
    scatter,
    shapes,
)

__all__ = [
    "dense_attention",
    "indexing",
    "losses",
    "metadata",
    "normalisation",
    "operators",
    "pointwise",
    "products",
    "random",
    "reductions",
    "scatter",
    "shapes",
]
