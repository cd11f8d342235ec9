"""Fused operators by blocks of the adjacency matrix: each rank computes its block's part.

Features of sources are replicated within a column of the grid, what meets them within a row; one
operator does the block, and what the blocks of a row found is reduced where the nodes are: sums are
added, of extrema the most extreme is taken, and attention is joined by the statistics of its
softmax. Backward the same exchanges go the other way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fastgraph.backends.reference import num_shares
from fastgraph.dist.operators.grid.graph import Block
from fastgraph.dist.operators.local_attention import (
    check_dropout,
    dropout_of_weights,
    local_attention,
    needs_weights,
    shared,
)
from fastgraph.dist.operators.rank_graph import local_rows
from fastgraph.dist.tensor.sharded import ShardedTensor
from fastgraph.layers.sums import add_to
from fastgraph.ops.gat import GAT
from fastgraph.ops.head_scores import HEAD_SCORES
from fastgraph.ops.heads import Call
from fastgraph.ops.merge import joined_statistics
from fastgraph.ops.segment_reduce import SEGMENT_REDUCE
from fastgraph.ops.spmm import SDDMM, SPMM
from fastgraph.plugins.backend import accumulator
from fastgraph.registry import operators
from fastgraph.registry.operators import Size


def weighted_sum(block: Block, x: Tensor, weight: Tensor | None, reduce: str) -> ShardedTensor:
    """Sums and means over neighbourhoods."""
    edges = block.edges_of(numbered=weight is not None)
    (features,) = block.of_sources([x])
    given = edges.index, edges.ptr, block.of_edges(weight), block.num_destinations, "sum", False
    out = block.summed(SPMM(features, *given))
    if reduce == "mean":
        degree = block.degrees.sum(0).clamp(min=1)
        out = out / degree.view(-1, *[1] * (out.dim() - 1))
    return ShardedTensor(out, block.destinations, 0)


def normalised_sum(
    block: Block, x: Tensor, weight: Tensor | None, loop_weight: float
) -> ShardedTensor:
    """Sums with the normalisation of graph convolutions."""
    edges = block.edges_of(numbered=False)
    (features,) = block.of_sources([x])
    normalised = block.normalised(weight, loop_weight, x.dtype)
    given = edges.index, edges.ptr, normalised, block.num_destinations, "sum", False
    return ShardedTensor(block.summed(SPMM(features, *given)), block.destinations, 0)


def extremum(
    block: Block, x: Tensor, weight: Tensor | None, reduce: str, ties: str
) -> tuple[ShardedTensor, Tensor]:
    """Maxima and minima over neighbourhoods; ties are split, or no gradient is wanted."""
    edges = block.edges_of(numbered=weight is not None)
    (features,) = block.of_sources([x])
    given = edges.index, edges.ptr, block.of_edges(weight), block.num_destinations
    out, record = SEGMENT_REDUCE(features, *given, reduce, False, ties)
    if ties == "none":
        (parts,) = block.parts([out])
        return ShardedTensor(_most_extreme(block, parts, reduce), block.destinations, 0), record
    parts, records = block.parts([out, record])
    out, record = _Extremum.apply(block, parts, records, reduce)  # type: ignore[no-untyped-call]
    rows = block.destinations
    return ShardedTensor(out, rows, 0), ShardedTensor(record, rows, 0)


class _Extremum(Function):
    """Of the parts of a row, with the number of edges by which its gradient is divided.

    A part divides its gradient by the number that it recorded. So it gets that of the result times
    its share: the number of its edges that attain the extremum of all, over that of all parts.
    """

    @staticmethod
    def forward(
        ctx: Any, block: Block, parts: Tensor, records: Tensor, reduce: str
    ) -> tuple[Tensor, Tensor]:
        out = _most_extreme(block, parts, reduce)
        attains = (parts == out) & _has_edges(block, parts)
        recorded = num_shares(records) * attains
        # Each part counts the zeros that upstream's output starts from; they are there once.
        is_zero = (out == 0) & _has_edges(block, parts).any(0)
        ties = recorded.sum(0) - (attains.sum(0) - 1).clamp(min=0) * is_zero
        share = recorded.to(accumulator(out.dtype)) / ties.clamp(min=1)
        # A NaN equals nothing, so that upstream divides by 0: all of its neighbours get NaN.
        share.masked_fill_(out.isnan(), torch.nan)
        ctx.save_for_backward(share.to(out.dtype))
        record = ties.to(torch.int32)
        ctx.mark_non_differentiable(record)
        return out, record

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        (share,) = ctx.saved_tensors
        return None, grad * share, None, None


def _most_extreme(block: Block, parts: Tensor, reduce: str) -> Tensor:
    """Of the parts with edges; 0 where none has any."""
    has_edges = _has_edges(block, parts)
    start, function = (-torch.inf, torch.amax) if reduce == "max" else (torch.inf, torch.amin)
    found = function(parts.masked_fill(~has_edges, start), 0)
    return found.masked_fill(~has_edges.any(0), 0)


def _has_edges(block: Block, parts: Tensor) -> Tensor:
    """Bool ``[blocks, mine, 1, ...]``: whether they lead to a node in each."""
    shape = *block.degrees.shape, *[1] * (parts.dim() - 2)
    return (block.degrees > 0).view(shape)


def products(block: Block, y: Tensor, x: Tensor, heads: int) -> ShardedTensor:
    """Dot products of the ends of edges, which stay where the edges are."""
    edges = block.edges_of(numbered=True)
    (of_destinations,), (of_sources,) = block.of_destinations([y]), block.of_sources([x])
    local = SDDMM(of_destinations, of_sources, edges.index, edges.ptr, heads, "sum", False)
    return ShardedTensor(local, block.edges, 0)


def attend(
    block: Block, call: Call, kernel: Callable[..., Any], operator: operators.Attention
) -> tuple[ShardedTensor, ShardedTensor, Tensor]:
    """The output, statistics and weights of an operator of attention for sharded operands.

    Raises:
        NoRuleError: the operator has to be computed in another way.
    """
    places = [operand.shape[0] for operand in operator.operands]
    pairs = zip(places, call.inputs, strict=True)
    has_features = any(place == "edges" and x is not None for place, x in pairs)
    check_dropout(call, operator, has_features=has_features)
    inputs = _operands(block, call, places)
    edges = block.edges_of(numbered=needs_weights(call) or has_features)
    factor, num_rows = dropout_of_weights(call, block), block.num_destinations
    out, stats, alpha = local_attention(
        call, operator, kernel, inputs, edges, num_rows, factor, None
    )
    # The largest scores get no gradient, and so none is sent.
    parts, largest, inverse = block.parts([out, stats[..., 0].detach(), stats[..., 1]])
    shares, stats = joined_statistics(torch.stack([largest, inverse], -1))
    of_all = len(parts) == 1  # in which case the shares of nodes with edges are 1
    out = parts[0] if of_all else (shares.to(parts.dtype).unsqueeze(-1) * parts).sum(0)
    if call.addend is not None:
        out = add_to(out, local_rows(call.addend, block.destinations))
    weights = out.new_empty(0)
    if call.weights and alpha is not None:
        (scale,) = block.of_parts([shares])
        alpha = alpha * scale.to(alpha.dtype)[block.local.edge_list()[1]]
        weights = ShardedTensor(alpha, block.edges, 0)
    rows = block.destinations
    return ShardedTensor(out, rows, 0), ShardedTensor(stats, rows, 0), weights


def attend_with_scores(block: Block, call: Call) -> tuple[ShardedTensor, ShardedTensor, Tensor]:
    """The same for attention among nodes of one kind, of which each rank scores its own."""
    x, att, of_edges = call.inputs
    rows = block.sources
    scores = HEAD_SCORES(local_rows(x, rows), shared(att))
    of_both = [ShardedTensor(score, rows, 0) for score in scores.unbind(0)]
    return attend(block, call._replace(inputs=[x, *of_both, of_edges]), GAT, operators.GAT)


def _operands(block: Block, call: Call, places: Sequence[Size]) -> list[Tensor | None]:
    """The operands for the nodes and edges of a block, in a collective for each kind of nodes."""
    found = [
        None if x is None else block.of_edges(x) if place == "edges" else x
        for place, x in zip(places, call.inputs, strict=True)
    ]
    of_nodes = {"sources": block.of_sources, "destinations": block.of_destinations}
    for i, (place, x) in enumerate(zip(places, found, strict=True)):
        if x is not None and place not in ("edges", *of_nodes):
            found[i] = shared(x)
    for kind, everywhere in of_nodes.items():
        at = [i for i, place in enumerate(places) if place == kind]
        for i, x in zip(at, everywhere([call.inputs[i] for i in at]), strict=True):
            found[i] = x
    return found
