"""Positions of nodes in a graph, from its edges alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgraph.layers.arguments import check_kinds
from fastgraph.ops.gcn import gcn


def positions_by_powers(
    edge_index: Tensor, num_nodes: int, channels: int, *, powers: int = 4, seed: int = 0
) -> Tensor:
    r"""Random vectors that spread over the graph: nodes near each other have similar ones.

    :math:`\sum_{k=1}^{p} \mathrm{unit}(\tilde A^k R)`, where :math:`R` is Gaussian,
    :math:`\tilde A = \hat D^{-1/2} (A + I) \hat D^{-1/2}` as in :func:`fastgraph.ops.gcn`, and
    ``unit`` gives each row the length 1 ("Fast and Accurate Network Embeddings via Very Sparse
    Random Projection", Chen et al., CIKM 2019). Takes three matrices of the result's size.

    Args:
        edge_index: int64 or int32 ``[2, E]``; for a directed graph both directions, unless nodes
            shall know their in-neighbours alone.
        num_nodes: of the graph.
        channels: of a position.
        powers: the largest, at least 1.
        seed: of the random vectors.

    Returns:
        float32 ``[num_nodes, channels]``, on the device of ``edge_index``.

    Raises:
        ValueError: a number is out of its range, or ``edge_index`` has another shape or dtype.
        IndexError: ``edge_index`` points outside the nodes.
    """
    for name, value, least in (("channels", channels, 1), ("powers", powers, 1)):
        if value < least:
            raise ValueError(f"{name}: expected at least {least}, got {value}")
    if num_nodes < 0:
        raise ValueError(f"num_nodes: expected at least 0, got {num_nodes}")
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(num_nodes, channels, generator=draw).to(edge_index.device)
    out = torch.zeros_like(x)
    for _ in range(powers):
        x = gcn(x, edge_index)
        out += F.normalize(x, dim=1)
    return out


def with_random_signs(positions: Tensor) -> Tensor:
    """Positions of nodes, of which the sign of each channel is drawn by torch's generator.

    Eigenvectors have no sign of their own: with one that is drawn anew in each step a model learns
    not to look at it (Dwivedi et al., "Benchmarking graph neural networks", JMLR 2023).

    Args:
        positions: ``[nodes, channels]``.

    Raises:
        TypeError: ``positions`` is no tensor.
    """
    check_kinds(Tensor, positions=positions)
    signs = 2 * torch.randint(2, (positions.shape[-1],)) - 1
    return positions * signs.to(positions)
