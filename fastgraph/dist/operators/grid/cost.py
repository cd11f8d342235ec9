"""The cost of a layer on a grid: the bytes that ranks send, from numbers of rows alone.

A rank of row ``i`` and column ``j`` of a grid computes with the edges from the nodes of column
``j`` to those of row ``i``, see :mod:`fastgraph.dist.operators.grid.exchange`. With ``n`` nodes
shared out evenly over a square grid of ``P`` ranks, and ``k`` values exchanged for each node along
each axis, a rank sends ``n k (sqrt(P) - 1) / P`` values along each of them: ``O(n k / sqrt(P))``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastgraph.dist.operators.cost import TOPOLOGY, Cluster, Cost, Distribution, Layer
from fastgraph.dist.ranks.mesh import Mesh, holder


class Widths(NamedTuple):
    """The bytes that a layer exchanges for each node in one direction; 0 for nothing.

    Attributes:
        sources: of what is gathered, which the ranks of a column replicate.
        destinations: of what meets it at the node that aggregates, as queries, which the ranks of a
            row replicate.
        partial: of the result of a block, which the ranks of a row reduce.
    """

    sources: int = 0
    destinations: int = 0
    partial: int = 0


class Exchanged(NamedTuple):
    """The bytes that a layer exchanges for each node, forward and backward.

    Attributes:
        forward: what is exchanged.
        backward: that of which gradients are exchanged, the other way.
    """

    forward: Widths
    backward: Widths = Widths()


def exchanged(layer: Layer) -> Exchanged:
    """The bytes that a layer exchanges; what it makes of nodes is made where these are."""
    forward = {"sources": 0, "destinations": 0}
    backward = dict(forward)
    for operand in (*layer.operands, *layer.made):
        if operand.place in forward:
            forward[operand.place] += operand.row
            backward[operand.place] += operand.row * operand.wants_gradient
    gradient = layer.out + layer.statistics if layer.learns else 0
    return Exchanged(
        Widths(**forward, partial=layer.out + layer.statistics + layer.record),
        Widths(**backward, partial=gradient),
    )


class Volume(NamedTuple):
    """A step of one layer.

    Attributes:
        sent: bytes that each rank sends.
        collectives: how many each rank waits for.
    """

    sent: list[int]
    collectives: int


def volume(
    mesh: Mesh, widths: Exchanged, sources: Sequence[int], destinations: Sequence[int]
) -> Volume:
    """The bytes that ranks send for a step of a layer, forward and backward; exact, as a test says.

    Args:
        mesh: of the grid.
        widths: what it exchanges for each node.
        sources: how many of the nodes that edges start from each rank holds.
        destinations: how many of those that they lead to; often the same.
    """
    height, width = mesh
    forward, backward = widths
    sent = []
    for rank in range(height * width):
        row, column = divmod(rank, width)
        of_row = sum(destinations[row * width : (row + 1) * width]) - destinations[rank]
        of_column = sum(sources[column::width]) - sources[rank]
        # To replicate is to send own rows to all others; to reduce, each of the others its own.
        sent.append(
            forward.sources * sources[rank] * (height - 1)
            + backward.sources * of_column
            + (forward.destinations + backward.partial) * destinations[rank] * (width - 1)
            + (backward.destinations + forward.partial) * of_row
        )
    along_columns = [forward.sources, backward.sources] if height > 1 else []
    along_rows = [*forward[1:], *backward[1:]] if width > 1 else []
    return Volume(sent, sum(size > 0 for size in (*along_columns, *along_rows)))


def largest_block(edge_index: Tensor, sources: Tensor, destinations: Tensor, mesh: Mesh) -> int:
    """The edges of the rank that computes most.

    Args:
        edge_index: int64 ``[2, E]``, of the whole graph.
        sources: the rank of each node that edges start from, int64 ``[n]``.
        destinations: the same for those that edges lead to.
        mesh: of the grid.
    """
    of_edges = holder(sources[edge_index[0]], destinations[edge_index[1]], mesh)
    return int(torch.bincount(of_edges, minlength=1).max())


def on_grid(layer: Layer, rows: Distribution, cluster: Cluster) -> Cost | None:
    """Blocks of the adjacency matrix stay where they are, on the fastest grid of these ranks."""
    found = [_on_mesh(layer, rows, mesh) for mesh in rows.blocks]
    return min(found, key=lambda cost: layer.seconds(cost, cluster), default=None)


def _on_mesh(layer: Layer, rows: Distribution, mesh: Mesh) -> Cost:
    height, width = mesh
    widths = exchanged(layer)
    found = volume(mesh, widths, rows.sources, rows.destinations)
    forward = widths.forward
    of_columns = sum(w.sources > 0 for w in widths) * (height - 1)
    of_rows = sum((w.destinations > 0) + (w.partial > 0) for w in widths) * (width - 1)
    work = rows.blocks[mesh] * layer.heads * layer.channels
    of_row = max(sum(rows.destinations[i * width : (i + 1) * width]) for i in range(height))
    of_column = max(sum(rows.sources[j::width]) for j in range(width))
    memory = of_column * forward.sources + of_row * (forward.destinations + forward.partial)
    memory += rows.blocks[mesh] * TOPOLOGY
    return Cost(found.collectives, of_columns + of_rows, max(found.sent), work, memory, mesh)
