"""The bytes that ranks on a grid send for a layer, from numbers of rows alone: nothing is run.

A rank of row ``i`` and column ``j`` of a grid computes with the edges from the nodes of column
``j`` to those of row ``i``, see :mod:`fastgraph.dist.operators.grid.exchange`. With ``n`` nodes
shared out evenly over a square grid of ``P`` ranks, and ``k`` values exchanged for each node along
each axis, a rank sends ``n k (sqrt(P) - 1) / P`` values along each of them: ``O(n k / sqrt(P))``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastgraph.dist.ranks.mesh import Mesh, holder
from fastgraph.plugins.backend import accumulator
from fastgraph.registry.operators import GAT, Size


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


class Layer(NamedTuple):
    """A layer, forward and backward.

    Attributes:
        forward: what is exchanged.
        backward: that of which gradients are exchanged, the other way.
    """

    forward: Widths
    backward: Widths = Widths()


class Volume(NamedTuple):
    """A step of one layer.

    Attributes:
        sent: bytes that each rank sends.
        collectives: how many each rank waits for.
    """

    sent: list[int]
    collectives: int


def volume(mesh: Mesh, layer: Layer, sources: Sequence[int], destinations: Sequence[int]) -> Volume:
    """The bytes that ranks send for a step of a layer, forward and backward; exact, as a test says.

    Args:
        mesh: of the grid.
        layer: what it exchanges for each node.
        sources: how many of the nodes that edges start from each rank holds.
        destinations: how many of those that they lead to; often the same.
    """
    height, width = mesh
    forward, backward = layer
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


def of_sums(row: Tensor) -> Layer:
    """That of a sum or mean, from a tensor ``[any, *channels]`` of the gathered features."""
    size = row.shape[1:].numel() * row.element_size()
    gradient = Widths(size, 0, size) if row.requires_grad else Widths()
    return Layer(Widths(size, 0, size), gradient)


def of_extrema(row: Tensor) -> Layer:
    """That of a maximum or minimum, which says how many edges attain it if a gradient is wanted."""
    plain = of_sums(row)
    if not row.requires_grad:
        return plain
    counts = row.shape[1:].numel() * torch.int32.itemsize
    return Layer(plain.forward._replace(partial=plain.forward.partial + counts), plain.backward)


def of_attention(
    shapes: Sequence[Sequence[Size]], inputs: Sequence[Tensor | None], out: Sequence[int]
) -> Layer:
    """That of fused attention, without weights that are returned.

    Args:
        shapes: of the operands of the operator, see :mod:`fastgraph.registry.operators`.
        inputs: the operands, of which only shapes, dtypes and ``requires_grad`` are looked at, so
            that they may be on ``meta``.
        out: heads and channels of the output.
    """
    sizes: dict[Size, list[int]] = {"sources": [0, 0], "destinations": [0, 0]}
    present = [(x, shape[0]) for x, shape in zip(inputs, shapes, strict=True) if x is not None]
    for x, place in present:
        if place in sizes:
            size = x.shape[1:].numel() * x.element_size()
            sizes[place][0] += size
            sizes[place][1] += size * x.requires_grad
    like = present[0][0]
    result = math.prod(out) * like.element_size()
    statistic = out[0] * accumulator(like.dtype).itemsize
    forward, backward = zip(sizes["sources"], sizes["destinations"], strict=True)
    # The largest score of a node is a constant to gradients, the sum of exponentials is not.
    gradient = result + statistic if any(x.requires_grad for x, _ in present) else 0
    return Layer(Widths(*forward, result + 2 * statistic), Widths(*backward, gradient))


def of_gat_with_scores(x: Tensor, att: Tensor) -> Layer:
    """That of :func:`fastgraph.ops.gat_with_scores`, whose nodes are scored where they are.

    Args:
        x: the features that are gathered, ``[any, heads, channels]``.
        att: what scores them.
    """
    score = x.detach()[..., 0].requires_grad_(x.requires_grad or att.requires_grad)
    shapes = [operand.shape for operand in GAT.operands]
    return of_attention(shapes, [x, score, score, None], x.shape[1:])
