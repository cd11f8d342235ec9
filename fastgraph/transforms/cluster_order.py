"""A transform that numbers the nodes of a cluster one after the other."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.data.datapipes import functional_transform
from torch_geometric.transforms import BaseTransform

from fastgraph.layers.arguments import check_integers
from fastgraph.reordering import reorder
from fastgraph.transforms.graph_of import graph_of
from fastgraph.transforms.shortest_paths import DISTANCE

ORIGINAL = "original_index"


@functional_transform("cluster_order")
class ClusterOrder(BaseTransform):  # type: ignore[misc]  # PyG has no types
    """Brings the nodes of a graph into the order of its clusters, by METIS.

    For sequences of graph transformers, after TorchGT (SC 2024, section III-C); see
    :func:`fastgraph.reorder`, which does it on the CPU. ``original_index``, int64 ``[nodes]``, is
    the number that each node had before the first such transform, by which :meth:`back` restores
    the order; PyG counts it up in batches. Edges keep theirs.

    It comes before :class:`ShortestPaths`, whose results have an order of their own, and before
    :class:`AttentionPattern` with a path.

    Args:
        num_clusters: default: one for each 256 nodes. Graphs of fewer nodes stay as they are.

    Raises:
        TypeError: the graph is no ``Data`` of PyG, a batch, or holds a sparse matrix.
        ValueError: an option or the graph cannot be used.
        IndexError: ``edge_index`` points outside the nodes.
        ModuleNotFoundError: ``pymetis`` is not installed.
        fastgraph.dist.PartitionError: METIS failed.
    """

    def __init__(self, num_clusters: int | None = None) -> None:
        check_integers(or_none=True, num_clusters=num_clusters)
        self.num_clusters = num_clusters

    def forward(self, data: Data) -> Data:
        """The graph in another order, with ``original_index``."""
        index, num_nodes = graph_of(data)
        if DISTANCE in data:
            raise ValueError(f"data: expected no {DISTANCE} yet, as ClusterOrder comes before")
        if ORIGINAL not in data:
            data[ORIGINAL] = torch.arange(num_nodes, device=index.device)
        return reorder(data, num_clusters=self.num_clusters).data

    @staticmethod
    def back(out: Tensor, data: Data) -> Tensor:
        """The rows of an output for ``data``, or for a batch, in the order of before.

        Args:
            out: ``[nodes, ...]``.
            data: a graph that this has transformed, or a batch of such graphs.

        Raises:
            ValueError: this has not transformed the graph, or ``out`` has other rows.
        """
        if ORIGINAL not in data:
            raise ValueError(f"data: expected a graph with {ORIGINAL}, got {data}")
        if not out.dim() or len(out) != len(data[ORIGINAL]):
            rows = len(data[ORIGINAL])
            raise ValueError(f"out: expected [{rows}, ...], got {list(out.shape)}")
        return torch.empty_like(out).index_copy(0, data[ORIGINAL], out)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_clusters={self.num_clusters})"
