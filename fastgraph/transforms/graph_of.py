"""The edges of a graph of PyG's, checked."""

from __future__ import annotations

from torch import Tensor
from torch_geometric.data import Batch, Data

from fastgraph.layers.arguments import check_edges
from fastgraph.nn.dual_pattern import DualPattern, dual_pattern


def graph_of(data: Data) -> tuple[Tensor, int]:
    """The ``edge_index`` of a graph, and its number of nodes.

    Raises:
        TypeError: ``data`` is no ``Data`` of PyG, or several in a batch.
        ValueError: it has no ``edge_index`` int64 or int32 ``[2, E]``.
        IndexError: that points outside the nodes.
    """
    if not isinstance(data, Data):
        raise TypeError(f"data must be a Data of PyG, got {type(data).__name__}")
    if isinstance(data, Batch):
        raise TypeError("data must be one graph, got a batch: transform graphs before PyG joins")
    if not isinstance(data.get("edge_index"), Tensor):
        raise ValueError(f"data must have an edge_index, got {data}")
    num_nodes = int(data.num_nodes)
    check_edges(num_nodes, edge_index=data.edge_index)
    return data.edge_index, num_nodes


def pattern_of(data: Data, *, path: bool = False, hops: int = 1) -> DualPattern:
    """The pattern of attention of a graph, with each edge once.

    Raises:
        TypeError: ``data`` is no ``Data`` of PyG, or several in a batch.
        ValueError: it has no ``edge_index`` int64 or int32 ``[2, E]``.
        IndexError: that points outside the nodes.
    """
    index, num_nodes = graph_of(data)
    return dual_pattern(index, num_nodes, path=path, hops=hops)
