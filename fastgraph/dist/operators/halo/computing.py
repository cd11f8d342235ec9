"""Fused operators by halo: each rank computes its own rows, from these and the rows of the halo.

An operator is called for all edges of a rank, or for two halves of them while the halo travels, see
:mod:`fastgraph.dist.operators.halo.exchange`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

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
from fastgraph.dist.operators.halo.cost import by_halo
from fastgraph.dist.operators.halo.exchange import Piece, Results, computed
from fastgraph.dist.operators.halo.graph import Neighbourhoods, neighbourhoods
from fastgraph.dist.operators.protocol import OPERATIONS, Mode, Relation
from fastgraph.dist.tensor.collectives import sum_of_ranks
from fastgraph.dist.tensor.sharded import ShardedTensor
from fastgraph.edge_programs.operations import OUTER
from fastgraph.edge_programs.program import Program
from fastgraph.graphs.edges import Edges
from fastgraph.ops.edge_program import EDGE_PROGRAM
from fastgraph.ops.edge_softmax import EDGE_SOFTMAX
from fastgraph.ops.heads import Call
from fastgraph.ops.segment_reduce import SEGMENT_REDUCE
from fastgraph.ops.spmm import SDDMM, SPMM


class Halo(Mode):
    """Each rank computes all heads of its nodes, from their rows and those of the halo."""

    name = "halo"
    operations = OPERATIONS

    def cost(self, layer: Layer, rows: Distribution, cluster: Cluster) -> Cost:
        """See :func:`by_halo`."""
        return by_halo(layer, rows, cluster)

    def weighted_sum(
        self, relation: Relation, x: Tensor, weight: Tensor | None, reduce: str
    ) -> ShardedTensor:
        """Sums and means over neighbourhoods."""
        graph = neighbourhoods(*relation)
        weight = graph.of_edges(weight)
        edges = functools.partial(graph.edges_of, numbered=weight is not None)

        def compute(piece: Piece) -> Results:
            edges = piece.edges.index, piece.edges.ptr, piece.of_edges(weight)
            return Results(SPMM(*piece.of_sources([x]), *edges, piece.num_rows, reduce, False))

        found = computed(graph, graph.local, edges, [x], compute, sums=reduce == "sum")
        return ShardedTensor(found.out, graph.destinations, 0)

    def normalised_sum(
        self, relation: Relation, x: Tensor, weight: Tensor | None, loop_weight: float
    ) -> ShardedTensor:
        """Sums with the normalisation of graph convolutions."""
        graph = neighbourhoods(*relation)
        local, normalised = graph.normalised(weight, loop_weight, x.dtype)
        csr = local.by_destination

        def compute(piece: Piece) -> Results:
            edges, weights = piece.edges, piece.of_edges(normalised)
            operands = *piece.of_sources([x]), edges.index, edges.ptr, weights
            return Results(SPMM(*operands, piece.num_rows, "sum", False))

        edges = Edges(csr.col, csr.ptr)
        found = computed(graph, local, lambda: edges, [x], compute, sums=True)
        return ShardedTensor(found.out, graph.destinations, 0)

    def extremum(
        self, relation: Relation, x: Tensor, weight: Tensor | None, reduce: str, ties: str
    ) -> tuple[ShardedTensor, Tensor]:
        """Maxima and minima over neighbourhoods, and the record of their ties."""
        graph = neighbourhoods(*relation)
        edges, rows = graph.edges_of(numbered=weight is not None), graph.destinations
        local = *graph.of_sources([x]), edges.index, edges.ptr, graph.of_edges(weight)
        out, record = SEGMENT_REDUCE(*local, rows.mine, reduce, False, ties)
        if ties != "none":
            record = ShardedTensor(record, rows, 0)
        return ShardedTensor(out, rows, 0), record

    def attention(
        self, relation: Relation, call: Call, attention: FusedAttention
    ) -> tuple[ShardedTensor, ShardedTensor, Tensor]:
        """The output, statistics and weights of fused attention."""
        graph = neighbourhoods(*relation)
        places = attention.spec.places
        inputs = _local(graph, places, call.inputs)
        pairs = zip(attention.spec.operands, inputs, strict=True)
        present = [(operand, x) for operand, x in pairs if x is not None]
        gathered = [x for operand, x in present if operand.shape[0] == "sources"]
        of_edges = [operand for operand, _ in present if operand.shape[0] == "edges"]
        edges = functools.partial(graph.edges_of, numbered=needs_weights(call) or bool(of_edges))
        addend, rows = graph.of_destinations(call.addend), graph.destinations
        dropped = dropout_of_weights(call, graph)

        def compute(piece: Piece) -> Results:
            own, kept = piece.of_addend(addend), dropped
            if dropped is not None:
                of_edges = piece.of_edges(dropped.of_edges)
                assert of_edges is not None
                kept = dropped._replace(of_edges=of_edges)
            how, given = attention, _of_piece(piece, places, inputs)
            if call.dropout > 0:
                how, given = attention.given_scores(given, piece.num_rows)
            found = local_attention(call, how, given, piece.edges, piece.num_rows, kept, own)
            return Results(*found)

        # Values of edges are copied for halves, and features of theirs may be wider than nodes'.
        splits = all("heads" in operand.shape or operand.counts for operand in of_edges)
        gathered = gathered if splits else []
        found = computed(graph, graph.local, edges, gathered, compute, addend=addend)
        stats = ShardedTensor(found.stats, rows, 0)
        alpha = found.weights
        alpha = stats.local.new_empty(0) if alpha is None else ShardedTensor(alpha, graph.edges, 0)
        return ShardedTensor(found.out, rows, 0), stats, alpha

    def products(
        self, relation: Relation, y: Tensor, x: Tensor, heads: int, reduce: str
    ) -> ShardedTensor:
        """Dot products of the ends of edges."""
        graph = neighbourhoods(*relation)
        edges = graph.edges_of(numbered=True)
        local = graph.of_destinations(y), *graph.of_sources([x]), edges.index, edges.ptr
        return ShardedTensor(SDDMM(*local, heads, reduce, False), graph.edges, 0)

    def program(
        self, relation: Relation, operands: Sequence[Tensor], program: Program
    ) -> list[Tensor]:
        """The outputs of an edge program; all in-edges of a row are on one rank."""
        graph = neighbourhoods(*relation)
        of_places: dict[str, Convert] = {
            "row": graph.of_destinations,
            "gathered": lambda x: x,
            "edge": graph.of_edges,
        }
        places = [operand.place for operand in program.operands]
        local = each(of_places, shared, places, operands)
        together("gathered", graph.of_sources, places, local)
        of_edges = "edge" in (*places, *(output.reduction for output in program.outputs))
        edges = graph.edges_of(numbered=of_edges)
        sizes = graph.sources.mine + len(graph.plan.halo), graph.destinations.mine
        given = local, edges.index, edges.ptr, str(program), *sizes, False
        found = EDGE_PROGRAM(*given)
        rows = {"edge": graph.edges, "total": None, OUTER: None}
        return [
            sum_of_ranks(tensor) if layout is None else ShardedTensor(tensor, layout, 0)
            for output, tensor in zip(program.outputs, found, strict=True)
            for layout in [rows.get(output.reduction, graph.destinations)]
        ]

    def softmax(self, relation: Relation, score: Tensor) -> ShardedTensor:
        """The softmax of scores over neighbourhoods."""
        graph = neighbourhoods(*relation)
        edges = graph.edges_of(numbered=True)
        sizes = graph.destinations.mine, graph.sources.mine + len(graph.plan.halo)
        local = graph.of_edges(score), edges.index, edges.ptr
        return ShardedTensor(EDGE_SOFTMAX(*local, *sizes, False), graph.edges, 0)


def _local(
    graph: Neighbourhoods, places: Sequence[str], inputs: Sequence[Operand]
) -> list[Operand]:
    """The operands of this rank; those of sources are taken by pieces, which exchange them."""
    of_places: dict[str, Convert] = {
        "sources": lambda x: x,
        "destinations": graph.of_destinations,
        "edges": graph.of_edges,
    }
    return each(of_places, shared, places, inputs)


def _of_piece(piece: Piece, places: Sequence[str], inputs: Sequence[Operand]) -> list[Operand]:
    """The operands of a piece, given those of this rank."""
    of_places: dict[str, Convert] = {
        "destinations": piece.of_destinations,
        "edges": piece.of_edges,
    }
    found = each(of_places, lambda x: x, places, inputs)
    together("sources", piece.of_sources, places, found)
    return found
