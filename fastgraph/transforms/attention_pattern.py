"""A transform that says which nodes attend to which, and as what."""

from __future__ import annotations

import torch
from torch_geometric.data import Data
from torch_geometric.data.datapipes import functional_transform
from torch_geometric.transforms import BaseTransform

from fastgraph.layers.arguments import check_flags, check_integers
from fastgraph.nn.dual_pattern import LONGEST
from fastgraph.transforms.graph_of import pattern_of


@functional_transform("attention_pattern")
class AttentionPattern(BaseTransform):  # type: ignore[misc]  # PyG has no types
    """Gives a graph the pattern of sparse attention, with the type of each pair.

    ``attn_index``, int64 ``[2, A]``: node ``attn_index[1, a]`` attends to ``attn_index[0, a]``.
    ``attn_type``, uint8 ``[A]``: 0 for a node and itself, 1 for an edge, 3 for consecutive nodes
    that no edge joins, and ``d + 3`` for nodes that are d edges apart, from 2 on, as
    :func:`fastgraph.nn.dual_pattern` and the models take them. Each node attends to itself once,
    and each pair comes once, however often its edge does. Tokens are the models' own.

    PyG batches both: it counts up what has ``index`` in its name.

    Args:
        hops: up to which distance along edges nodes attend to each other, 1 to 250.
        path: whether consecutive nodes do, for which :class:`ClusterOrder` should come before.

    Raises:
        TypeError: the graph is no ``Data`` of PyG, or a batch.
        ValueError: an option is out of range, or the graph has no ``edge_index`` int64 or int32
            ``[2, E]``.
        IndexError: ``edge_index`` points outside the nodes.
    """

    def __init__(self, hops: int = 1, *, path: bool = False) -> None:
        check_integers(1, LONGEST, hops=hops)
        check_flags(path=path)
        self.hops, self.path = hops, path

    def forward(self, data: Data) -> Data:
        """The same graph with ``attn_index`` and ``attn_type``."""
        pattern = pattern_of(data, path=self.path, hops=self.hops)
        data.attn_index = torch.stack([pattern.sources, pattern.queries])
        data.attn_type = pattern.types
        return data

    def __repr__(self) -> str:
        return f"{type(self).__name__}(hops={self.hops}, path={self.path})"
