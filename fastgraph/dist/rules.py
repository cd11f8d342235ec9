"""The rules, which are in the table once these modules are imported."""

from __future__ import annotations

from fastgraph.dist.operators import dense_attention
from fastgraph.dist.operators import rules as of_operators
from fastgraph.dist.tensor import rules as of_torch

__all__ = ["dense_attention", "of_operators", "of_torch"]
