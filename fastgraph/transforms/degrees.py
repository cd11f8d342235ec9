"""A transform that counts the neighbours of nodes."""

from __future__ import annotations

from torch_geometric.data import Data
from torch_geometric.data.datapipes import functional_transform
from torch_geometric.transforms import BaseTransform

from fastgraph.layers.arguments import check_integers
from fastgraph.nn.graph_model import degrees
from fastgraph.transforms.graph_of import pattern_of


@functional_transform("add_degrees")
class Degrees(BaseTransform):  # type: ignore[misc]  # PyG has no types
    """Gives a graph the degrees of its nodes, as Graphormer's embeddings take them.

    ``in_degree`` and ``out_degree``, int64 ``[nodes]``, count each edge once and no loops; larger
    ones count as ``max_degree``. Models count them themselves unless they are given: that is for
    parts of a graph, which have lost edges.

    Args:
        max_degree: at least 1.

    Raises:
        TypeError: the graph is no ``Data`` of PyG, or a batch.
        ValueError: ``max_degree`` is out of range, or the graph has no ``edge_index`` int64 or
            int32 ``[2, E]``.
        IndexError: ``edge_index`` points outside the nodes.
    """

    def __init__(self, max_degree: int = 512) -> None:
        check_integers(max_degree=max_degree)
        self.max_degree = max_degree

    def forward(self, data: Data) -> Data:
        """The same graph with ``in_degree`` and ``out_degree``."""
        into, out_of = degrees(pattern_of(data))
        data.in_degree = into.clamp(max=self.max_degree)
        data.out_degree = out_of.clamp(max=self.max_degree)
        return data

    def __repr__(self) -> str:
        return f"{type(self).__name__}(max_degree={self.max_degree})"
