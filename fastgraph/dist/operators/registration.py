"""The one list of all modules with rules for sharded tensors; importing it registers them."""

from __future__ import annotations

from fastgraph.dist.operators import constant, dense_attention, dense_rows, few_rows, typed_edges
from fastgraph.dist.operators import rules as of_operators
from fastgraph.dist.tensor import rules as of_torch

__all__ = [
    "constant",
    "dense_attention",
    "dense_rows",
    "few_rows",
    "of_operators",
    "of_torch",
    "typed_edges",
]
