"""Fused attention by heads: each rank computes some heads of all nodes over all edges.

One all-to-all makes shards of heads from shards of rows, one operator does this rank's heads on the
whole graph, and one all-to-all makes shards of rows from its output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fastgraph.dist.operators.heads.exchange import everywhere, shares, to_heads, to_rows
from fastgraph.dist.operators.heads.graph import WholeGraph, whole_graph
from fastgraph.dist.operators.rank_graph import local_rows
from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.tensor.layout import Layout
from fastgraph.dist.tensor.rules.random import dropout_factor
from fastgraph.dist.tensor.sharded import ShardedTensor, enter, is_sharded
from fastgraph.dist.tensor.table import NoRuleError
from fastgraph.layers.sums import add_to
from fastgraph.ops.heads import Call
from fastgraph.ops.spmm import SPMM
from fastgraph.registry.operators import Size


class Attention(NamedTuple):
    """An operator, as it is computed by heads.

    Attributes:
        kernel: the operator.
        shapes: of its operands.
        summed: the position of the operand whose rows it adds up.
        adds_edges: whether it adds up features of edges as well.
    """

    kernel: Callable[..., Any]
    shapes: Sequence[Sequence[Size]]
    summed: int
    adds_edges: bool = False


def attend(
    attention: Attention, call: Call, sources: Layout, destinations: Layout
) -> tuple[ShardedTensor, ShardedTensor, Tensor]:
    """The output, statistics and weights of an operator for sharded operands.

    Statistics stay where they were computed: they are sharded by heads.

    Raises:
        NoRuleError: the operator has to be computed in another way.
        IndexError: on all ranks, if the index points outside the nodes.
    """
    has_features = any(
        x is not None and shape[0] == "edges"
        for x, shape in zip(call.inputs, attention.shapes, strict=True)
    )
    if call.ptr is not None or call.seed is not None:
        raise NoRuleError
    if call.dropout > 0 and has_features and attention.adds_edges:
        raise NoRuleError
    heads = shares(num_heads(call))
    _check_heads(attention.shapes, call.inputs, heads.n)
    graph = whole_graph(
        call.index, sources, destinations, transpose=call.transpose, self_loops=call.self_loops
    )
    inputs = _operands(attention.shapes, call.inputs, graph, heads)
    weights = call.weights or call.dropout > 0
    edges = graph.edges_of(numbered=weights or has_features)
    given = (edges.index, edges.ptr, None, 0, False, call.option, 0.0, weights)
    out, stats, alpha, *_ = attention.kernel(*inputs, None, *given)
    if call.dropout > 0:
        # The numbers that all ranks would draw by rows, for the heads of this one.
        at = {0: graph.position, 1: heads.position}
        shape = [len(graph.position), heads.n]
        alpha = alpha * dropout_factor(shape, at, call.dropout, alpha.dtype)
        if heads.mine:
            values = inputs[attention.summed]
            out = SPMM(values, edges.index, edges.ptr, alpha, destinations.n, "sum", False)
    if call.weights:
        out, alpha = to_rows([out, alpha], [destinations, graph.rows], heads)
        alpha = ShardedTensor(alpha, graph.rows, 0)
    else:
        (out,) = to_rows([out], [destinations], heads)
    if call.addend is not None:
        out = add_to(out, local_rows(call.addend, destinations))
    stats = ShardedTensor(stats.index_select(0, destinations.order), heads, 1)
    return ShardedTensor(out, destinations, 0), stats, alpha


def num_heads(call: Call) -> int:
    """The number of heads of a call; 0 where its features have another shape than they must."""
    x: Tensor = call.inputs[0]
    return x.shape[1] if x.dim() == 3 else 0


def _check_heads(
    shapes: Sequence[Sequence[Size]], inputs: Sequence[Tensor | None], expected: int
) -> None:
    """Operands have so many heads, and one dtype; if not, upstream's own message is wanted.

    Raises:
        NoRuleError: they do not.
    """
    present = [(x, shape) for x, shape in zip(inputs, shapes, strict=True) if x is not None]
    for x, shape in present:
        fits = x.dim() == len(shape) and x.dtype == present[0][0].dtype
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
        local = local_rows(x, layout)
        if "heads" not in shape:
            found[i] = everywhere(local, layout)
            continue
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


def _own_heads(x: Tensor, axis: int, heads: Layout) -> Tensor:
    """This rank's heads of a parameter, whose gradient will be whole."""
    if is_sharded(x):
        raise NoRuleError
    entered: Tensor = enter(x)
    start = sum(heads.counts[: WORLD.rank])
    return entered.narrow(axis, start, heads.mine)
