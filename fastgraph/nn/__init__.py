"""Layers of fastgraph's own, and graph transformers that train without the graph."""

from fastgraph.nn.global_attention import GlobalAGNN, GlobalGAT, GlobalVA
from fastgraph.nn.global_module import GlobalModule
from fastgraph.nn.large_gt import LargeGT
from fastgraph.nn.local_module import LocalModule

__all__ = ["GlobalAGNN", "GlobalGAT", "GlobalModule", "GlobalVA", "LargeGT", "LocalModule"]
