"""Graphs of PyG as lists of neighbours for :mod:`fastgraph.tokens`."""

from __future__ import annotations

from typing import Any

import torch

from fastgraph.tokens.graph_files import NeighborLists, TokenGraph, graph_of_edges


def token_graph(data: Any) -> TokenGraph:
    """The lists of neighbours of a graph with one type of nodes and of edges.

    Args:
        data: a ``Data``, a ``GraphStore``, or a pair ``(FeatureStore, GraphStore)`` as loaders take
            it. Lists by destination or by source are taken as they stand, mapped files, too;
            an ``edge_index`` is sorted both ways, in memory.

    Raises:
        TypeError: it is something else.
        ValueError: it has several types of edges, or none.
    """
    from torch_geometric.data.graph_store import EdgeLayout, GraphStore

    store = data[1] if isinstance(data, tuple) and len(data) == 2 else data
    if not isinstance(store, GraphStore):
        raise TypeError(
            "data must be a Data, a GraphStore or a pair (FeatureStore, GraphStore), got "
            f"{type(data).__name__}"
        )
    attributes = store.get_all_edge_attrs()
    types = {attribute.edge_type for attribute in attributes}
    if len(types) != 1:
        raise ValueError(f"data must have one type of edges, got {sorted(map(str, types))}")
    into = out = None
    for attribute in attributes:
        first, second = store.get_edge_index(attribute)
        if attribute.layout is EdgeLayout.CSC:
            into = NeighborLists(second, first)
        elif attribute.layout is EdgeLayout.CSR:
            out = NeighborLists(first, second)
        elif into is None and out is None:
            sizes = [attribute.size] if attribute.size else []
            nodes = [int(size) for pair in sizes for size in pair if size is not None]
            return graph_of_edges(torch.stack([first, second]), max(nodes, default=None))
    return TokenGraph(into, out)
