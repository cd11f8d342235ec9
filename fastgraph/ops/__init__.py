"""Operators on graphs, with gradients: one file each."""

from fastgraph.ops.segment_reduce import segment_reduce
from fastgraph.ops.spmm import spmm

__all__ = ["segment_reduce", "spmm"]
