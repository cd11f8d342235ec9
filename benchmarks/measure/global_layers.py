"""The layers of ``fastgraph.nn`` as message passing of DGL and PyG, with the same parameters."""

from __future__ import annotations

from typing import Any

import dgl
from dgl import function as fn
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import softmax


def dgl_va(layer: Any, graph: Any, h: Tensor) -> Tensor:
    """Dot products as weights."""
    return _dgl_sum(graph, h, h) @ layer.weight


def dgl_agnn(layer: Any, graph: Any, h: Tensor) -> Tensor:
    """Cosines as weights."""
    return _dgl_sum(graph, F.normalize(h), h) @ layer.weight


def _dgl_sum(graph: Any, of_scores: Tensor, h: Tensor) -> Tensor:
    with graph.local_scope():
        graph.ndata["s"], graph.ndata["h"] = of_scores, h
        graph.apply_edges(fn.u_dot_v("s", "s", "w"))
        graph.update_all(fn.u_mul_e("h", "w", "m"), fn.sum("m", "out"))
        out: Tensor = graph.ndata["out"]
        return out


def dgl_gat(layer: Any, graph: Any, h: Tensor) -> Tensor:
    """One head of graph attention, as DGL's own layer computes it."""
    with graph.local_scope():
        u = h @ layer.weight
        graph.ndata["u"] = u
        graph.srcdata["l"] = (u @ layer.att_col).unsqueeze(1)
        graph.dstdata["r"] = (u @ layer.att_row).unsqueeze(1)
        graph.apply_edges(fn.u_add_v("l", "r", "e"))
        scores = F.leaky_relu(graph.edata["e"], layer.negative_slope)
        graph.edata["a"] = dgl.ops.edge_softmax(graph, scores)
        graph.update_all(fn.u_mul_e("u", "a", "m"), fn.sum("m", "out"))
        out: Tensor = graph.ndata["out"]
        return out


class _Pyg(MessagePassing):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__(aggr="add")
        self.layer: Any = layer


class PygVA(_Pyg):
    """Dot products as weights."""

    def forward(self, h: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.propagate(edge_index, h=h) @ self.layer.weight
        return out

    def message(self, h_i: Tensor, h_j: Tensor) -> Tensor:
        return (h_i * h_j).sum(-1, keepdim=True) * h_j


class PygAGNN(_Pyg):
    """Cosines as weights."""

    def forward(self, h: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.propagate(edge_index, h=h, unit=F.normalize(h)) @ self.layer.weight
        return out

    def message(self, unit_i: Tensor, unit_j: Tensor, h_j: Tensor) -> Tensor:
        return (unit_i * unit_j).sum(-1, keepdim=True) * h_j


class PygGAT(_Pyg):
    """One head of graph attention."""

    def forward(self, h: Tensor, edge_index: Tensor) -> Tensor:
        u = h @ self.layer.weight
        row, col = (u @ att.unsqueeze(1) for att in (self.layer.att_row, self.layer.att_col))
        out: Tensor = self.propagate(edge_index, u=u, row=row, col=col)
        return out

    def message(
        self, u_j: Tensor, row_i: Tensor, col_j: Tensor, index: Tensor, size_i: int | None
    ) -> Tensor:
        scores = F.leaky_relu(row_i + col_j, self.layer.negative_slope)
        weight: Tensor = softmax(scores, index, num_nodes=size_i)
        return weight * u_j
