"""Fused operators on a grid: each rank computes with its block of the adjacency matrix.

Features of sources are replicated within a column of the grid, what meets them within a row; one
operator does the block, and what the blocks of a row found is reduced where the nodes are: sums are
added, of extrema the most extreme is taken, and attention is joined by the statistics of its
softmax. Backward the same exchanges go the other way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastgraph.dist.operators.attention import (
    Convert,
    FusedAttention,
    Operand,
    dropout_of_weights,
    each,
    local_attention,
    needs_weights,
    shared,
    together,
)
from fastgraph.dist.operators.cost import Cluster, Cost, Distribution, Layer
from fastgraph.dist.operators.grid import joining
from fastgraph.dist.operators.grid.cost import on_grid
from fastgraph.dist.operators.grid.exchange import groups
from fastgraph.dist.operators.grid.graph import Block, block
from fastgraph.dist.operators.grid.programs import outputs_of, softmax_of_edges
from fastgraph.dist.operators.protocol import OPERATIONS, Mode, Operation, Relation
from fastgraph.dist.operators.rank_graph import local_rows
from fastgraph.dist.ranks.mesh import GRID, Mesh, holder, usual_mesh
from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.tensor.sharded import ShardedTensor
from fastgraph.edge_programs.program import Program
from fastgraph.layers.sums import add_to
from fastgraph.ops.heads import Call
from fastgraph.ops.merge import joined_statistics, with_shares, without_shares
from fastgraph.ops.segment_reduce import SEGMENT_REDUCE
from fastgraph.ops.spmm import SDDMM, SPMM


class Grid(Mode):
    """Each rank computes with the edges between the nodes of two groups of ranks."""

    name = GRID
    operations = OPERATIONS

    def __init__(self, mesh: Mesh | None = None) -> None:
        self.mesh = mesh

    def on(self, mesh: Mesh | None) -> Grid:
        """The mode on the grid of a mesh; default: the most square one."""
        return self if mesh == self.mesh else Grid(mesh)

    def why_not(self, operation: Operation) -> str | None:
        """A block must be able to compute its part without the others."""
        if operation.name == "products" and operation.reduce != "sum":
            return "products are divided by degrees"
        return None

    def owner_of_edges(self, sources: Tensor, destinations: Tensor) -> Tensor:
        """See :meth:`Mode.owner_of_edges`: the rank whose block has the edge."""
        return holder(sources, destinations, self._usual_mesh)

    @property
    def _usual_mesh(self) -> Mesh:
        return self.mesh or usual_mesh(WORLD.size)

    def cost(self, layer: Layer, rows: Distribution, cluster: Cluster) -> Cost | None:
        """See :func:`on_grid`."""
        return on_grid(layer, rows, cluster)

    def weighted_sum(
        self, relation: Relation, x: Tensor, weight: Tensor | None, reduce: str
    ) -> ShardedTensor:
        """See :meth:`Mode.weighted_sum`: sums of blocks are added up."""
        block = self._block(relation)
        edges = block.edges_of(numbered=weight is not None)
        (features,) = block.of_sources([x])
        given = edges.index, edges.ptr, block.of_edges(weight), block.num_destinations, "sum", False
        out = block.summed(SPMM(features, *given))
        if reduce == "mean":
            degree = block.degrees.sum(0).clamp(min=1)
            out = out / degree.view(-1, *[1] * (out.dim() - 1))
        return ShardedTensor(out, block.destinations, 0)

    def normalised_sum(
        self, relation: Relation, x: Tensor, weight: Tensor | None, loop_weight: float
    ) -> ShardedTensor:
        """See :meth:`Mode.normalised_sum`: the block has the self-loops of its nodes."""
        loops = relation.sources.n if loop_weight else 0
        block = self._block(relation._replace(self_loops=loops))
        edges = block.edges_of(numbered=False)
        (features,) = block.of_sources([x])
        normalised = block.normalised(weight, loop_weight, features.dtype)
        given = edges.index, edges.ptr, normalised, block.num_destinations, "sum", False
        return ShardedTensor(block.summed(SPMM(features, *given)), block.destinations, 0)

    def extremum(
        self, relation: Relation, x: Tensor, weight: Tensor | None, reduce: str, ties: str
    ) -> tuple[ShardedTensor, Tensor]:
        """See :meth:`Mode.extremum`."""
        block = self._block(relation)
        edges = block.edges_of(numbered=weight is not None)
        (features,) = block.of_sources([x])
        given = edges.index, edges.ptr, block.of_edges(weight), block.num_destinations
        out, record = SEGMENT_REDUCE(features, *given, reduce, False, ties)
        rows = block.destinations
        if ties == "none":
            (parts,) = block.parts([out])
            return ShardedTensor(joining.most_extreme(block, parts, reduce), rows, 0), record
        if ties == "winner":
            # Without weights the operator numbers edges by destination.
            order = None if weight is not None else block.local.by_destination.edge_id
            position = block.edges.position_on(record.device)
            record = _numbers(record, position if order is None else position[order.long()])
        parts, records = block.parts([out, record])
        out, record = joining.extremum(block, parts, records, reduce, ties)
        return ShardedTensor(out, rows, 0), ShardedTensor(record, rows, 0)

    def attention(
        self, relation: Relation, call: Call, attention: FusedAttention
    ) -> tuple[ShardedTensor, ShardedTensor, Tensor]:
        """See :meth:`Mode.attention`: blocks are joined by the statistics of their softmax."""
        block = self._block(relation)
        numbered = needs_weights(call) or attention.has_values_of_edges(call)
        attention, inputs = _operands(block, call, attention)
        edges = block.edges_of(numbered=numbered)
        dropped, num_rows = dropout_of_weights(call, block), block.num_destinations
        out, stats, alpha = local_attention(call, attention, inputs, edges, num_rows, dropped, None)
        # The largest scores get no gradient, and so none is sent.
        parts, largest, inverse = block.parts([out, stats[..., 0].detach(), stats[..., 1]])
        own, given = stats, torch.stack([largest, inverse], -1)
        shares, stats = joined_statistics(given)
        if len(parts) == 1:  # in which case the shares of nodes with edges are 1
            out = parts[0]
        else:
            parts = with_shares(shares, given, parts)
            out = (shares.to(parts.dtype).unsqueeze(-1) * parts).sum(0)
            out = without_shares(out, stats)
        if call.addend is not None:
            out = add_to(out, local_rows(call.addend, block.destinations))
        weights = out.new_empty(0)
        if call.weights and alpha is not None:
            (scale,) = block.of_parts([shares])
            rows = block.local.edge_list()[1]
            alpha = with_shares(scale[rows], own[rows], alpha) * scale.to(alpha.dtype)[rows]
            weights = ShardedTensor(alpha, block.edges, 0)
        nodes = block.destinations
        return ShardedTensor(out, nodes, 0), ShardedTensor(stats, nodes, 0), weights

    def products(
        self, relation: Relation, y: Tensor, x: Tensor, heads: int, reduce: str
    ) -> ShardedTensor:
        """See :meth:`Mode.products`: both ends of all edges of a block are on its rank."""
        block = self._block(relation)
        edges = block.edges_of(numbered=True)
        (of_destinations,), (of_sources,) = block.of_destinations([y]), block.of_sources([x])
        local = SDDMM(of_destinations, of_sources, edges.index, edges.ptr, heads, reduce, False)
        return ShardedTensor(local, block.edges, 0)

    def program(
        self, relation: Relation, operands: Sequence[Tensor], program: Program
    ) -> list[Tensor]:
        """See :meth:`Mode.program`."""
        return outputs_of(self._block(relation), operands, program)

    def softmax(self, relation: Relation, score: Tensor) -> ShardedTensor:
        """See :meth:`Mode.softmax`: weights stay where the edges are."""
        block = self._block(relation)
        found = softmax_of_edges(block, local_rows(score, block.edges))
        return ShardedTensor(found, block.edges, 0)

    def _block(self, relation: Relation) -> Block:
        return block(groups(self._usual_mesh), *relation)


def _numbers(record: Tensor, position: Tensor) -> Tensor:
    """The numbers of edges among those of all ranks, given those on this one; -1 for none."""
    if not len(position):
        return record.long()
    return torch.where(record < 0, -1, position[record.clamp(min=0)])


def _operands(
    block: Block, call: Call, attention: FusedAttention
) -> tuple[FusedAttention, list[Operand]]:
    """The operands for a block, in a collective for each kind of nodes.

    Nodes that an operator scores itself are scored where they are, and their scores are operands.
    """
    of_places: dict[str, Convert] = {
        "sources": lambda x: local_rows(x, block.sources),
        "destinations": lambda x: local_rows(x, block.destinations),
        "edges": block.of_edges,
    }
    inputs = each(of_places, shared, attention.spec.places, call.inputs)
    attention, inputs = attention.given_scores(inputs, block.destinations.mine)
    places = attention.spec.places
    together("sources", block.from_sources, places, inputs)
    together("destinations", block.from_destinations, places, inputs)
    return attention, inputs
