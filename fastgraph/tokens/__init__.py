"""Tokens of nodes, so that training need not see the graph.

Knows torch and NumPy, and nothing of PyG or DGL.
"""

from __future__ import annotations

from fastgraph.tokens.context import write_context
from fastgraph.tokens.graph_files import NeighborLists, TokenGraph, open_graph, write_graph
from fastgraph.tokens.hop_features import HopFeatures
from fastgraph.tokens.local_nodes import local_nodes
from fastgraph.tokens.store import TokenStore
from fastgraph.tokens.writing import write_tokens

__all__ = [
    "HopFeatures",
    "NeighborLists",
    "TokenGraph",
    "TokenStore",
    "local_nodes",
    "open_graph",
    "write_context",
    "write_graph",
    "write_tokens",
]
