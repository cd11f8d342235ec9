"""Forms of attention as algebra by DGL's message passing, torch's sparse matrices and PyG's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import dgl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import softmax

from measure.graphs import GraphData


class _Weighed(MessagePassing):
    """Features, weighed by scores or by their softmax."""

    def __init__(self, is_softmax: bool) -> None:
        super().__init__(aggr="add")
        self.is_softmax = is_softmax

    def forward(self, edge_index: Tensor, x: Tensor, scores: Tensor) -> Tensor:
        out: Tensor = self.propagate(edge_index, x=x, scores=scores)
        return out

    def message(self, x_j: Tensor, scores: Tensor, index: Tensor, size_i: int | None) -> Tensor:
        weights = softmax(scores, index, num_nodes=size_i) if self.is_softmax else scores
        return weights.unsqueeze(1) * x_j


def upstream_forms(
    data: GraphData, tensors: Mapping[str, Tensor], scale: float
) -> dict[str, dict[str, Callable[[], Any]]]:
    """The ways of each form that upstream has, of one head.

    Args:
        data: the graph.
        tensors: ``q``, ``k``, ``x`` ``[n, channels]``, ``u``, ``v``, ``lengths`` ``[n]`` and
            ``bias`` ``[E]``.
        scale: of dot products.
    """
    q, k, x, u, v, lengths, bias = (
        tensors[name] for name in ("q", "k", "x", "u", "v", "lengths", "bias")
    )
    col, row = data.edge_index
    n = data.num_nodes
    graph = dgl.graph((col, row), num_nodes=n)
    places = torch.stack([row, col])

    def dots_of_dgl(a: Tensor, b: Tensor) -> Tensor:
        return dgl.ops.u_dot_v(graph, b, a).squeeze(1)

    def dots_of_edges(a: Tensor, b: Tensor) -> Tensor:
        return (a[row] * b[col]).sum(-1)

    def lengths_of_dgl() -> Tensor:
        return dgl.ops.u_mul_v(graph, lengths, lengths)

    def by_dgl(scores: Tensor, is_softmax: bool) -> Tensor:
        weights = dgl.ops.edge_softmax(graph, scores) if is_softmax else scores
        return dgl.ops.u_mul_e_sum(graph, x, weights.unsqueeze(1))

    def by_torch(scores: Tensor, is_softmax: bool) -> Tensor:
        matrix = torch.sparse_coo_tensor(places, scores, (n, n), is_coalesced=False)
        matrix = torch.sparse.softmax(matrix, 1) if is_softmax else matrix
        return torch.sparse.mm(matrix, x)

    def by_pyg(scores: Tensor, is_softmax: bool) -> Tensor:
        out: Tensor = _Weighed(is_softmax)(data.edge_index, x, scores)
        return out

    def ways(
        of_dgl: Callable[[], Tensor],
        of_edges: Callable[[], Tensor],
        leaves: tuple[Tensor, ...],
        is_softmax: bool = True,
    ) -> dict[str, Callable[[], Any]]:
        return {
            "DGL": lambda: (by_dgl(of_dgl(), is_softmax), leaves),
            "torch.sparse": lambda: (by_torch(of_edges(), is_softmax), leaves),
            "PyG": lambda: (by_pyg(of_edges(), is_softmax), leaves),
        }

    def cosines() -> Tensor:
        return dots_of_edges(x, x) / (lengths[row] * lengths[col])

    def cosines_of_dgl() -> Tensor:
        return dots_of_dgl(x, x) / lengths_of_dgl()

    return {
        "attention": ways(
            lambda: dots_of_dgl(q, k) * scale, lambda: dots_of_edges(q, k) * scale, (q, k, x)
        ),
        "attention with a bias": ways(
            lambda: dots_of_dgl(q, k) * scale + bias,
            lambda: dots_of_edges(q, k) * scale + bias,
            (q, k, x, bias),
        ),
        "gat": ways(
            lambda: F.leaky_relu(dgl.ops.u_add_v(graph, v, u), 0.2),
            lambda: F.leaky_relu(u[row] + v[col], 0.2),
            (u, v, x),
        ),
        "cosine": ways(cosines_of_dgl, cosines, (x, lengths)),
        "agnn": ways(cosines_of_dgl, cosines, (x, lengths), is_softmax=False),
        "va": ways(lambda: dots_of_dgl(x, x), lambda: dots_of_edges(x, x), (x,), is_softmax=False),
    }
