"""The layers that are measured, and what an expert does to give each a sparse adjacency."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, SAGEConv, TransformerConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.nn.dense.linear import Linear

Adjacency = Callable[[Tensor, int], Tensor]


def csr_adjacency(edge_index: Tensor, num_nodes: int, weight: Tensor | None = None) -> Tensor:
    """``adj_t`` as ``torch.sparse`` CSR ``[num_nodes, num_nodes]``: destinations are the rows."""
    source, destination = edge_index
    if weight is None:
        weight = torch.ones(edge_index.shape[1], device=edge_index.device)
    order = torch.argsort(destination * num_nodes + source, stable=True)
    ptr = torch.zeros(num_nodes + 1, dtype=torch.int64, device=edge_index.device)
    torch.cumsum(torch.bincount(destination, minlength=num_nodes), 0, out=ptr[1:])
    size = (num_nodes, num_nodes)
    return torch.sparse_csr_tensor(ptr, source[order], weight[order], size)


def gcn_adjacency(edge_index: Tensor, num_nodes: int) -> Tensor:
    """``csr_adjacency`` with self-loops and GCN's normalisation, computed once."""
    edge_index, weight = gcn_norm(edge_index, num_nodes=num_nodes)
    return csr_adjacency(edge_index, num_nodes, weight)


@dataclass(frozen=True)
class LayerCase:
    """How to build one layer for each column.

    Args:
        layer: class, called with the number of input channels and ``out_channels``.
        options: arguments in every column.
        adjacency: makes the CSR matrix for the columns that use one; ``None`` if the layer cannot.
        adjacency_options: more arguments where the matrix is given.
        propagate_options: more arguments where message passing alone is measured.
        bare_options: more arguments that leave nothing in ``forward`` but ``propagate``.
        keeps_linear: whether dense products are part of message passing.
    """

    layer: type[nn.Module]
    options: Mapping[str, Any] = field(default_factory=dict)
    adjacency: Adjacency | None = None
    adjacency_options: Mapping[str, Any] = field(default_factory=dict)
    propagate_options: Mapping[str, Any] = field(default_factory=dict)
    bare_options: Mapping[str, Any] | None = None
    keeps_linear: bool = False

    def build(self, channels: int, **more: Any) -> nn.Module:
        """The layer on ``channels`` inputs; the same parameters at every call."""
        torch.manual_seed(0)
        return self.layer(channels, **{"out_channels": channels, **self.options, **more})


_GCN: dict[str, Any] = {
    "adjacency": gcn_adjacency,
    "adjacency_options": {"normalize": False},
    "propagate_options": {"cached": True},
    "bare_options": {"bias": False, "cached": True},
}
_SAGE: dict[str, Any] = {"adjacency": csr_adjacency, "bare_options": {"root_weight": False}}
_ATTENTION: dict[str, Any] = {"heads": 4, "out_channels": 64}

LAYERS: dict[str, LayerCase] = {
    "GCN": LayerCase(GCNConv, **_GCN),
    "SAGE-max": LayerCase(SAGEConv, {"aggr": "max"}, **_SAGE),
    "SAGE-mean": LayerCase(SAGEConv, {"aggr": "mean"}, **_SAGE),
    "GATv2": LayerCase(GATv2Conv, _ATTENTION),
    "GAT": LayerCase(GATConv, _ATTENTION),
    "Transformer": LayerCase(TransformerConv, _ATTENTION),
}


def linear_modules(layer: nn.Module) -> dict[str, nn.Module]:
    """The dense products of a layer, by name."""
    return {
        name: module
        for name, module in layer.named_modules()
        if isinstance(module, (Linear, nn.Linear))
    }


def without_linear(layer: nn.Module) -> nn.Module:
    """Replace the dense products by the identity, so that ``forward`` is message passing alone."""
    for name in linear_modules(layer):
        parent, _, child = name.rpartition(".")
        setattr(layer.get_submodule(parent), child, nn.Identity())
    return layer
