"""The forms in which PyG takes a graph, as the operators' ``(index, ptr, transpose)``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch_geometric import EdgeIndex

from fastgraph.routing.conditions import plain_tensor


class Topology(NamedTuple):
    """A graph as the operators name it.

    Attributes:
        index, ptr, transpose: see :mod:`fastgraph.ops.topology`.
        num_edges: the number of messages.
        values: one value for each edge, for a sparse matrix.
    """

    index: Tensor  # type: ignore[assignment]  # shadows tuple.index
    ptr: Tensor | None
    transpose: bool
    num_edges: int
    values: Tensor | None = None


def topology_of(edge_index: object, flow: str) -> Topology | str:
    """The topology that PyG would propagate along, or the reason why it cannot be taken."""
    if isinstance(edge_index, EdgeIndex):
        edge_index = edge_index.as_tensor()
    refusal = plain_tensor("edge_index", edge_index)
    if refusal is not None or not isinstance(edge_index, Tensor):
        return refusal or "edge_index is not a tensor"
    if edge_index.layout != torch.strided:
        return _sparse_topology(edge_index)
    if edge_index.dtype not in (torch.int64, torch.int32):
        return f"edge_index has dtype {edge_index.dtype}"
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        return f"edge_index has shape {list(edge_index.shape)}"
    return Topology(edge_index, None, flow == "target_to_source", edge_index.shape[1])


def _sparse_topology(adj_t: Tensor) -> Topology | str:
    """``adj_t`` has destinations as rows."""
    if adj_t.requires_grad:
        return "the sparse adjacency matrix requires a gradient"
    if adj_t.dim() != 2:
        return "the sparse adjacency matrix is batched"
    if adj_t.layout == torch.sparse_coo:
        if not adj_t.is_coalesced():
            return "the sparse COO adjacency matrix is not coalesced"
        indices, values = adj_t._indices(), adj_t._values()
        topology = Topology(indices, None, True, indices.shape[1], values)
    elif adj_t.layout == torch.sparse_csr:
        index, values = adj_t.col_indices(), adj_t.values()
        topology = Topology(index, adj_t.crow_indices(), False, index.shape[0], values)
    elif adj_t.layout == torch.sparse_csc:
        index, values = adj_t.row_indices(), adj_t.values()
        topology = Topology(index, adj_t.ccol_indices(), True, index.shape[0], values)
    else:
        return f"the adjacency matrix has layout {adj_t.layout}"
    if values.dim() != 1:
        return "the sparse adjacency matrix holds more than one value for each edge"
    return topology
