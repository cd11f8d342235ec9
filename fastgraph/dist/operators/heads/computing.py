"""Fused attention by heads: each rank computes some heads of all nodes over all edges.

One all-to-all makes shards of heads from shards of rows, one operator does this rank's heads on the
whole graph, and one all-to-all makes shards of rows from its output.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fastgraph.dist.operators.attention import (
    FusedAttention,
    local_attention,
    needs_weights,
    num_heads,
)
from fastgraph.dist.operators.cost import Cluster, Cost, Distribution, Layer
from fastgraph.dist.operators.dropout import dropout_of
from fastgraph.dist.operators.heads.cost import by_heads
from fastgraph.dist.operators.heads.exchange import everywhere, layout_of_heads, to_heads, to_rows
from fastgraph.dist.operators.heads.graph import WholeGraph, inverse, whole_graph
from fastgraph.dist.operators.protocol import Mode, Operation, Relation
from fastgraph.dist.operators.rank_graph import local_rows, part_of
from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.tensor.collectives import records_gradient
from fastgraph.dist.tensor.digests import DIGESTS
from fastgraph.dist.tensor.layout import Layout
from fastgraph.dist.tensor.memo import cached, on
from fastgraph.dist.tensor.sharded import ShardedTensor, enter, is_sharded
from fastgraph.dist.tensor.table import NoRuleError
from fastgraph.layers.sums import add_to
from fastgraph.ops.heads import Call
from fastgraph.registry.operators import OperandShape, Size


class Heads(Mode):
    """Each rank computes some heads of all nodes over all edges; sums have none to share out."""

    name = "heads"
    operations = frozenset(("attention",))

    def why_not(self, operation: Operation) -> str | None:
        """There must be several heads."""
        if operation.heads < 2:
            return f"heads cannot be shared out, there are {operation.heads}"
        return None

    def cost(self, layer: Layer, rows: Distribution, cluster: Cluster) -> Cost | None:
        """See :func:`by_heads`."""
        return by_heads(layer, rows, cluster)

    def attention(
        self, relation: Relation, call: Call, attention: FusedAttention
    ) -> tuple[ShardedTensor, ShardedTensor, Tensor]:
        """See :meth:`Mode.attention`; statistics stay where they were made: sharded by heads."""
        heads = layout_of_heads(num_heads(call))
        shapes = attention.spec.shapes
        _check_heads(attention.spec.operands, call.inputs, heads.n)
        graph, destinations = whole_graph(*relation), relation.destinations
        inputs = _operands(shapes, call.inputs, graph, heads)
        edges = graph.edges_of(numbered=needs_weights(call) or attention.has_values_of_edges(call))
        # What all ranks would drop by rows, of the heads of this one; all draw the seed.
        num_edges, like = len(graph.position), part_of(call.inputs[0])
        dropped = dropout_of(call, graph.position, num_edges, heads.n, heads, like)
        if not heads.mine:
            dropped = None
        given = attention, inputs, edges, destinations.n
        out, stats, alpha = local_attention(call, *given, dropped, None)
        weights = out.new_empty(0)
        if alpha is not None:
            out, alpha = to_rows([out, alpha], [destinations, graph.rows], heads)
            weights = ShardedTensor(alpha, graph.rows, 0)
        else:
            (out,) = to_rows([out], [destinations], heads)
        if call.addend is not None:
            out = add_to(out, local_rows(call.addend, destinations))
        stats = ShardedTensor(stats.index_select(0, destinations.order_on(stats.device)), heads, 1)
        return ShardedTensor(out, destinations, 0), stats, weights


def _check_heads(
    operands: Sequence[OperandShape], inputs: Sequence[Tensor | None], expected: int
) -> None:
    """Operands have so many heads, and one dtype; if not, upstream's own message is wanted.

    Integers that go with them have a dtype of their own.

    Raises:
        NoRuleError: they do not.
    """
    present = [(x, operand) for x, operand in zip(inputs, operands, strict=True) if x is not None]
    for x, (_, shape, _, counts) in present:
        fits = x.dim() == len(shape) and (counts or x.dtype == present[0][0].dtype)
        if not fits or ("heads" in shape and x.shape[shape.index("heads")] != expected):
            raise NoRuleError


def _operands(
    shapes: Sequence[Sequence[Size]],
    inputs: Sequence[Tensor | None],
    graph: WholeGraph,
    heads: Layout,
) -> list[Tensor | None]:
    """The operands for this rank's heads of all nodes and edges."""
    layouts: dict[Size, Layout] = {
        "sources": graph.sources,
        "destinations": graph.destinations,
        "edges": graph.rows,
    }
    found: list[Tensor | None] = [None] * len(inputs)
    sent: dict[tuple[int, int], int] = {}
    tensors: list[Tensor] = []
    rows: list[Layout] = []
    places: list[tuple[int, int]] = []
    for i, (x, shape) in enumerate(zip(inputs, shapes, strict=True)):
        if x is None:
            continue
        if shape[0] not in layouts:
            found[i] = _own_heads(x, shape.index("heads"), heads)
            continue
        layout = layouts[shape[0]]
        if "heads" not in shape:
            found[i] = _of_all_ranks(x, layout)
            continue
        local = local_rows(x, layout)
        # Sources and destinations may share one tensor, which is sent once.
        key = (id(local), id(layout))
        if key not in sent:
            sent[key] = len(tensors)
            tensors.append(local)
            rows.append(layout)
        places.append((i, sent[key]))
    if tensors:
        moved = to_heads(tensors, rows, heads)
        for i, place in places:
            found[i] = moved[place]
    return found


def _of_all_ranks(x: Tensor, rows: Layout) -> Tensor:
    """The rows of all ranks in their order; a tensor that all of them have is not sent."""
    if is_sharded(x) or x.shape[0] != rows.n or records_gradient(x):
        return everywhere(local_rows(x, rows), rows)
    DIGESTS.compare(x)
    make = lambda: x.index_select(0, on(inverse(rows.order), x.device))  # noqa: E731
    return cached(x, ("of all ranks", rows), make)


def _own_heads(x: Tensor, axis: int, heads: Layout) -> Tensor:
    """This rank's heads of a parameter, whose gradient will be whole."""
    if is_sharded(x):
        raise NoRuleError
    entered: Tensor = enter(x)
    start = sum(heads.counts[: WORLD.rank])
    return entered.narrow(axis, start, heads.mine)
