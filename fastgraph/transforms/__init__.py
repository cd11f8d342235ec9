"""Transforms of PyG's graphs for graph transformers: orders, patterns, distances, positions.

They keep no state, and the same graph always becomes the same, so that they may be the
``pre_transform`` of a dataset. What they write PyG batches.
"""

from __future__ import annotations

from fastgraph.transforms.attention_pattern import AttentionPattern
from fastgraph.transforms.cluster_order import ClusterOrder
from fastgraph.transforms.degrees import Degrees
from fastgraph.transforms.laplacian_positions import LaplacianPositions
from fastgraph.transforms.shortest_paths import ShortestPaths

__all__ = [
    "AttentionPattern",
    "ClusterOrder",
    "Degrees",
    "LaplacianPositions",
    "ShortestPaths",
]
