"""The forms in which PyG takes a graph, as :class:`fastgraph.graphs.edges.Edges`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric import EdgeIndex

from fastgraph.graphs.edges import Edges
from fastgraph.plugins.refusal import Refusal
from fastgraph.routing.conditions import operand


def edges_of(edge_index: object, flow: str) -> Edges | Refusal:
    """The edges along which PyG would propagate, or the reason why they cannot be taken."""
    if isinstance(edge_index, EdgeIndex):
        edge_index = edge_index.as_tensor()
    refusal = operand("edge_index", edge_index)
    if refusal is not None or not isinstance(edge_index, Tensor):
        return refusal or Refusal("edge_index is not a tensor")
    if edge_index.layout != torch.strided:
        return _of_matrix(edge_index)
    if edge_index.dtype not in (torch.int64, torch.int32):
        return Refusal(f"edge_index has dtype {edge_index.dtype}")
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        return Refusal(f"edge_index has shape {list(edge_index.shape)}")
    return Edges(edge_index, None, flow == "target_to_source")


def _of_matrix(adj_t: Tensor) -> Edges | Refusal:
    """``adj_t`` has destinations as rows."""
    if adj_t.requires_grad:
        return Refusal("the sparse adjacency matrix requires a gradient")
    if adj_t.dim() != 2:
        return Refusal("the sparse adjacency matrix is batched")
    if adj_t.layout == torch.sparse_coo:
        if not adj_t.is_coalesced():
            return Refusal("the sparse COO adjacency matrix is not coalesced")
        edges = Edges(adj_t._indices(), None, True, values=adj_t._values())
    elif adj_t.layout == torch.sparse_csr:
        edges = Edges(adj_t.col_indices(), adj_t.crow_indices(), values=adj_t.values())
    elif adj_t.layout == torch.sparse_csc:
        edges = Edges(adj_t.row_indices(), adj_t.ccol_indices(), True, values=adj_t.values())
    else:
        return Refusal(f"the adjacency matrix has layout {adj_t.layout}")
    if edges.values is not None and edges.values.dim() != 1:
        return Refusal("the sparse adjacency matrix holds more than one value for each edge")
    return edges
