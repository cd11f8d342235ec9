"""Sparse adjacency matrices as the ``edge_index`` and the arguments for which messages are traced.

So a layer computes the same bits for either form of the same graph, whose edges are in the same
order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.nn.conv import MessagePassing

from fastgraph.graphs.edges import DerivedIndex, Edges
from fastgraph.plugins.refusal import Refusal

_BY_VALUES = ("edge_weight", "edge_attr", "edge_type")


class Unfolded(NamedTuple):
    """The entries of a matrix.

    Attributes:
        edges: as ``edge_index``, and the tensors of the matrix that upstream saves.
        arguments: those of ``propagate``, with the values and the size of the matrix.
        has_offsets: true if upstream passes the offsets of rows to messages.
    """

    edges: DerivedIndex
    arguments: Mapping[str, Any]
    has_offsets: bool


def is_matrix(edge_index: object) -> bool:
    """True for a sparse matrix of torch."""
    return type(edge_index) is Tensor and edge_index.layout is not torch.strided


def unfolded(
    module: MessagePassing, taken: Collection[str], adj_t: Tensor, arguments: Mapping[str, Any]
) -> Unfolded | Refusal:
    """The entries of a matrix as upstream's ``collect`` finds them, or why there are none.

    Args:
        module: the layer.
        taken: the arguments of its ``message``, ``aggregate`` and ``update``.
        adj_t: the matrix, destinations as rows.
        arguments: of ``propagate``.
    """
    if module.fuse:
        return Refusal("message_and_aggregate is overridden")
    if module.flow != "source_to_target":
        return Refusal("a sparse adjacency matrix with flow target_to_source")
    if adj_t.requires_grad:
        return Refusal("the sparse adjacency matrix requires a gradient")
    is_csr = adj_t.layout is torch.sparse_csr
    if is_csr and adj_t.dim() == 2 + adj_t.dense_dim():
        edges = Edges(adj_t.col_indices(), adj_t.crow_indices())
        values = adj_t.values()
    elif adj_t.layout is torch.sparse_coo and adj_t.sparse_dim() == 2 and adj_t.is_coalesced():
        edges = Edges(adj_t._indices(), None, transpose=True)
        values = adj_t._values()
    else:
        return Refusal("an adjacency matrix that is neither CSR nor coalesced COO")
    by_values = next((name for name in _BY_VALUES if name in taken), None)
    found = {**arguments, "size": (adj_t.shape[1], adj_t.shape[0])}
    if by_values is not None:
        if by_values not in arguments:
            return Refusal(f"{by_values} is missing")
        if arguments[by_values] is None and (by_values != "edge_attr" or values.dim() > 1):
            found[by_values] = values
    return Unfolded(DerivedIndex(edges.as_index(), (edges.index,)), found, is_csr)
