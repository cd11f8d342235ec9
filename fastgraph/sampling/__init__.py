"""Mini-batches of large graphs: neighbours, layers, walks, subgraphs, negatives, clusters.

Functions on compressed columns ``(colptr, row)``: ``row[colptr[v]:colptr[v + 1]]`` are the nodes
from which edges lead to node ``v``, and an edge is named by its place in ``row``. Random numbers
are a function of one seed and of what is drawn (Philox4x32-10), so that a seed gives the same
sample on any number of threads, in any process.
"""

from __future__ import annotations

from fastgraph.sampling.clusters import cluster
from fastgraph.sampling.layers import LayerSample, sample_layer
from fastgraph.sampling.negatives import negative_sample
from fastgraph.sampling.neighbors import (
    HeteroNeighborSample,
    NeighborSample,
    hetero_neighbor_sample,
    neighbor_sample,
)
from fastgraph.sampling.relabelling import unique_and_compact
from fastgraph.sampling.subgraphs import subgraph
from fastgraph.sampling.walks import random_walk

__all__ = [
    "HeteroNeighborSample",
    "LayerSample",
    "NeighborSample",
    "cluster",
    "hetero_neighbor_sample",
    "negative_sample",
    "neighbor_sample",
    "random_walk",
    "sample_layer",
    "subgraph",
    "unique_and_compact",
]
