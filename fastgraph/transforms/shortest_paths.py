"""A transform that measures distances along edges."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.data.datapipes import functional_transform
from torch_geometric.transforms import BaseTransform

from fastgraph.layers.arguments import check_integers, check_kinds
from fastgraph.nn.shortest_paths import LONGEST, distances_in_ranges, distances_of_pairs
from fastgraph.transforms.graph_of import graph_of, pattern_of

DISTANCE = "distance"
"""The attribute that is written."""


@functional_transform("shortest_paths")
class ShortestPaths(BaseTransform):  # type: ignore[misc]  # PyG has no types
    """Gives a graph the lengths of shortest paths between its nodes, by native searches.

    ``distance``, uint8, has the number of edges on the shortest path from key to query, and
    ``longest + 1`` where it is longer or there is none. Of all pairs of nodes it is ``[nodes *
    nodes]``, query by query and key by key: as PyG puts graphs of a batch one after the other, that
    is the ``pair_type`` of :func:`fastgraph.ops.dense_attention`, for a ``bias`` of ``longest + 2``
    rows. Of the pairs of an index it is ``[pairs]``.

    Args:
        longest: 0 to 254.
        pairs: ``"all"``, or the attribute that has the pairs, ``[2, pairs]`` with keys first, such
            as ``"attn_index"`` of :class:`AttentionPattern`.
        max_pairs: beyond which all pairs are refused; each takes a byte.

    Raises:
        TypeError: the graph is no ``Data`` of PyG, or a batch.
        ValueError: an option is out of range, the graph has no ``edge_index`` int64 or int32
            ``[2, E]`` or no pairs of that name, or has too many.
        IndexError: ``edge_index`` or pairs point outside the nodes.
    """

    def __init__(self, longest: int = 20, *, pairs: str = "all", max_pairs: int = 1 << 26) -> None:
        check_integers(0, LONGEST, longest=longest)
        check_integers(0, max_pairs=max_pairs)
        check_kinds(str, pairs=pairs)
        self.longest, self.pairs, self.max_pairs = longest, pairs, max_pairs

    def forward(self, data: Data) -> Data:
        """The same graph with ``distance``."""
        _, num_nodes = graph_of(data)
        pattern = pattern_of(data)
        ptr, sources = pattern.ptr.cpu(), pattern.sources.cpu()  # loops make no path shorter
        if self.pairs == "all":
            if num_nodes**2 > self.max_pairs:
                raise ValueError(
                    f"max_pairs: expected at least {num_nodes**2}, those of {num_nodes} nodes, got "
                    f"{self.max_pairs}: name pairs, such as 'attn_index'"
                )
            nodes = torch.arange(num_nodes)
            begins = torch.arange(num_nodes + 1) * num_nodes
            first = torch.zeros_like(nodes)
            found = distances_in_ranges(ptr, sources, nodes, first, begins, self.longest)
        else:
            keys, queries = self._pairs(data, num_nodes)
            found = distances_of_pairs(ptr, sources, keys, queries, self.longest)
        data[DISTANCE] = found.to(pattern.ptr.device)
        return data

    def _pairs(self, data: Data, num_nodes: int) -> Tensor:
        index: Tensor | None = data.get(self.pairs)
        is_index = isinstance(index, Tensor) and index.dtype in (torch.int64, torch.int32)
        if index is None or not is_index or index.dim() != 2 or len(index) != 2:
            raise ValueError(f"pairs: expected 'all' or an index [2, pairs], got {self.pairs!r}")
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < num_nodes:
            raise IndexError(
                f"{self.pairs}: expected nodes of 0 to {num_nodes - 1}, got {int(index.min())} to "
                f"{int(index.max())}"
            )
        return index.cpu().long()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(longest={self.longest}, pairs={self.pairs!r})"
