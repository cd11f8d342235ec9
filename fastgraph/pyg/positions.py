"""Positions of nodes in a graph, by node2vec where PyG can walk."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.nn import Node2Vec
from torch_geometric.nn.models import node2vec

from fastgraph.nn.positions import positions_by_powers

METHODS = ("auto", "node2vec", "powers")


def node_positions(
    edge_index: Tensor,
    num_nodes: int,
    channels: int,
    *,
    method: str = "auto",
    epochs: int = 1,
    seed: int = 0,
) -> Tensor:
    """Positions of nodes, such as :class:`fastgraph.nn.LargeGT` takes.

    Args:
        edge_index: int64 ``[2, E]``.
        num_nodes: of the graph.
        channels: of a position.
        method: "node2vec" (Grover and Leskovec, KDD 2016) with the settings of LargeGT's release:
            10 walks of 40 nodes from each node, contexts of 20, SparseAdam at 0.01; "powers" for
            :func:`fastgraph.nn.positions.positions_by_powers`, which takes a small part of the
            time; or "auto": node2vec where PyG has walks, by pyg-lib or
            :func:`fastgraph.pyg.fix_sampling`, and powers elsewhere.
        epochs: of node2vec.
        seed: of the random numbers of torch, whose state is the same afterwards.

    Returns:
        float32 ``[num_nodes, channels]``, on the device of ``edge_index``.

    Raises:
        ValueError: ``method`` is none of these, or another argument has another shape or range.
        ImportError: node2vec shall walk and PyG cannot, which is PyG's own error.
        IndexError: ``edge_index`` points outside the nodes.
    """
    if method not in METHODS:
        raise ValueError(f"method: expected one of {', '.join(METHODS)}, got {method!r}")
    if method == "powers" or (method == "auto" and not node2vec.WITH_PYG_LIB):
        return positions_by_powers(edge_index, num_nodes, channels, seed=seed)
    if channels < 1 or epochs < 1:
        raise ValueError(f"channels and epochs: expected at least 1, got {channels} and {epochs}")
    if num_nodes < 1:
        raise ValueError(f"num_nodes: expected at least 1, got {num_nodes}")
    if edge_index.dim() != 2 or edge_index.shape[0] != 2 or edge_index.is_floating_point():
        got = f"{edge_index.dtype} {list(edge_index.shape)}"
        raise ValueError(f"edge_index: expected integers [2, edges], got {got}")
    if edge_index.numel():
        low, high = map(int, edge_index.aminmax())
        if low < 0 or high >= num_nodes:
            raise IndexError(
                f"edge_index: expected nodes of 0 to {num_nodes - 1}, got {low} to {high}"
            )
    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(seed)
        model = Node2Vec(
            *(edge_index, channels),
            walk_length=40,
            context_size=20,
            walks_per_node=10,
            num_nodes=num_nodes,
            sparse=True,
        ).to(edge_index.device)
        optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.01)
        for _ in range(epochs):
            for positive, negative in model.loader(batch_size=256, shuffle=True):
                optimizer.zero_grad()
                loss = model.loss(positive.to(edge_index.device), negative.to(edge_index.device))
                loss.backward()
                optimizer.step()
    found: Tensor = model.embedding.weight.detach()
    return found
