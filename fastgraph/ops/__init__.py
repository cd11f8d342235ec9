"""Operators on graphs, with gradients: one file each."""

from fastgraph.ops.attention import attention
from fastgraph.ops.block_attention import block_attention
from fastgraph.ops.dense_attention import dense_attention
from fastgraph.ops.edge_attention import edge_attention
from fastgraph.ops.edge_program import edge_program
from fastgraph.ops.edge_softmax import edge_softmax
from fastgraph.ops.gat import gat
from fastgraph.ops.gat_with_scores import gat_with_scores
from fastgraph.ops.gatv2 import gatv2
from fastgraph.ops.gcn import gcn
from fastgraph.ops.head_scores import head_scores
from fastgraph.ops.merge import merge
from fastgraph.ops.sddmm import sddmm
from fastgraph.ops.segment_reduce import segment_reduce
from fastgraph.ops.spmm import spmm

__all__ = [
    "attention",
    "block_attention",
    "dense_attention",
    "edge_attention",
    "edge_program",
    "edge_softmax",
    "gat",
    "gat_with_scores",
    "gatv2",
    "gcn",
    "head_scores",
    "merge",
    "sddmm",
    "segment_reduce",
    "spmm",
]
