"""Layers of fastgraph's own, written as algebra on sparse matrices."""

from fastgraph.nn.global_attention import GlobalAGNN, GlobalGAT, GlobalVA

__all__ = ["GlobalAGNN", "GlobalGAT", "GlobalVA"]
