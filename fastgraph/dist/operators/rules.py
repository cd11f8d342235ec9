"""Rules for the operators of fastgraph: each computes local rows, in the mode that is chosen."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fastgraph.dist.operators import planner
from fastgraph.dist.operators.grid import computing as by_blocks
from fastgraph.dist.operators.grid.exchange import Grid
from fastgraph.dist.operators.grid.graph import Block, block
from fastgraph.dist.operators.halo.graph import Neighbourhoods, neighbourhoods
from fastgraph.dist.operators.halo.overlap import Part, Results, computed
from fastgraph.dist.operators.heads import computing as by_heads
from fastgraph.dist.operators.local_attention import (
    SUMMED,
    check_dropout,
    dropout_of_weights,
    local_attention,
    needs_weights,
    shared,
)
from fastgraph.dist.operators.modes import Chosen, Fastest, grid_of, of_attention
from fastgraph.dist.operators.precision import PRECISION
from fastgraph.dist.operators.rank_graph import local_rows
from fastgraph.dist.ranks.counts import COUNTS
from fastgraph.dist.tensor.layout import Layout, usual
from fastgraph.dist.tensor.memo import remembered
from fastgraph.dist.tensor.sharded import ShardedTensor, is_sharded, on_the_whole
from fastgraph.dist.tensor.table import Arguments, NoRuleError, Options, rule
from fastgraph.graphs.edges import Edges
from fastgraph.graphs.memo import REMEMBERING
from fastgraph.ops.attention import ATTENTION
from fastgraph.ops.edge_softmax import EDGE_SOFTMAX
from fastgraph.ops.gat import GAT
from fastgraph.ops.gat_with_scores import GAT_WITH_SCORES
from fastgraph.ops.gatv2 import GATV2
from fastgraph.ops.head_scores import HEAD_SCORES
from fastgraph.ops.heads import Call, dropout_seed
from fastgraph.ops.library import DEFINING
from fastgraph.ops.segment_reduce import SEGMENT_REDUCE
from fastgraph.ops.spmm import SDDMM, SPMM
from fastgraph.registry import operators
from fastgraph.registry.operators import Size


def _rows_of(x: Tensor) -> Layout:
    """The layout of the nodes that features belong to."""
    if not isinstance(x, ShardedTensor):
        return usual(x.shape[0])
    if x.axis != 0:
        raise NoRuleError
    return x.rows


def _among(sources: Layout, n: int) -> Layout:
    """The layout of ``n`` aggregating nodes: that of the sources, if they may be the same nodes."""
    return sources if n == sources.n else usual(n)


def _graph(
    index: Tensor, ptr: Tensor | None, sources: Layout, destinations: Layout, transpose: bool
) -> Neighbourhoods:
    if ptr is not None:
        raise NoRuleError
    return neighbourhoods(index, sources, destinations, transpose=transpose)


def _block(
    index: Tensor,
    ptr: Tensor | None,
    grid: Grid,
    sources: Layout,
    destinations: Layout,
    transpose: bool,
    self_loops: int = 0,
) -> Block:
    if ptr is not None:
        raise NoRuleError
    return block(index, grid, sources, destinations, transpose=transpose, self_loops=self_loops)


def _fastest_sum(
    x: Tensor,
    index: Tensor,
    sources: Layout,
    destinations: Layout,
    transpose: bool,
    weight: Tensor | None,
    *,
    is_extremum: bool = False,
) -> Fastest | None:
    """Decides how rows are added up; ``None`` where weights would move to blocks at each call."""
    if weight is not None:
        return None

    def fastest(names: Sequence[str]) -> Chosen:
        plan = functools.partial(_graph, index, None, sources, destinations, transpose)
        layer = planner.layer_of_sum(x, is_extremum=is_extremum)
        return planner.choose(index, layer, (sources, destinations, transpose), plan, names)

    return fastest


@rule("fastgraph::spmm")
def weighted_sum(func: Any, args: Arguments, kwargs: Options) -> ShardedTensor:
    """Sums and means over neighbourhoods."""
    x, index, ptr, weight, num_out, reduce, transpose = args
    if reduce not in ("sum", "mean"):
        raise NoRuleError
    sources = _rows_of(x)
    destinations = _among(sources, num_out)
    fastest = _fastest_sum(x, index, sources, destinations, transpose, weight)
    grid = grid_of(sources, destinations, COUNTS.aggregation, fastest=fastest)
    if grid is not None:
        of_rank = _block(index, ptr, grid, sources, destinations, transpose)
        return by_blocks.weighted_sum(of_rank, x, weight, reduce)
    graph = _graph(index, ptr, sources, destinations, transpose)
    weight = graph.of_edges(weight)
    edges = functools.partial(graph.edges_of, numbered=weight is not None)

    def compute(part: Part) -> Results:
        local = part.of_sources(x), part.edges.index, part.edges.ptr, part.of_edges(weight)
        return Results(PRECISION.run(SPMM, *local, part.num_rows, reduce, False))

    found = computed(graph, graph.local, edges, [x], compute, sums=reduce == "sum")
    return ShardedTensor(found.out, graph.destinations, 0)


@rule("fastgraph::segment_reduce")
def extremum(func: Any, args: Arguments, kwargs: Options) -> tuple[ShardedTensor, Tensor]:
    """Maxima and minima over neighbourhoods."""
    x, index, ptr, weight, num_out, reduce, transpose, ties = args
    sources = _rows_of(x)
    destinations = _among(sources, num_out)
    why_not = "the gradient of ties goes to one edge of all" if ties == "winner" else ""
    fastest = _fastest_sum(x, index, sources, destinations, transpose, weight, is_extremum=True)
    grid = grid_of(sources, destinations, COUNTS.aggregation, why_not, fastest)
    if grid is not None:
        of_rank = _block(index, ptr, grid, sources, destinations, transpose)
        return by_blocks.extremum(of_rank, x, weight, reduce, ties)
    graph = _graph(index, ptr, sources, destinations, transpose)
    edges, rows = graph.edges_of(numbered=weight is not None), graph.destinations
    local = graph.of_sources(x), edges.index, edges.ptr, graph.of_edges(weight)
    out, record = PRECISION.run(SEGMENT_REDUCE, *local, rows.mine, reduce, False, ties)
    if ties != "none":
        record = ShardedTensor(record, rows, 0)
    return ShardedTensor(out, rows, 0), record


@rule("fastgraph::gcn")
def normalised_sum(func: Any, args: Arguments, kwargs: Options) -> ShardedTensor:
    """Sums with the normalisation of graph convolutions."""
    x, index, weight, loop_weight, transpose, adjoint = args
    if adjoint:
        raise NoRuleError
    rows = _rows_of(x)
    fastest = _fastest_sum(x, index, rows, rows, transpose, weight)
    grid = grid_of(rows, rows, COUNTS.aggregation, fastest=fastest)
    if grid is not None:
        loops = rows.n if loop_weight else 0
        of_rank = _block(index, None, grid, rows, rows, transpose, loops)
        return by_blocks.normalised_sum(of_rank, x, weight, loop_weight)
    graph = _graph(index, None, rows, rows, transpose)
    local, normalised = graph.normalised(weight, loop_weight, x.dtype)
    csr = local.by_destination

    def compute(part: Part) -> Results:
        edges, weights = part.edges, part.of_edges(normalised)
        operands = part.of_sources(x), edges.index, edges.ptr, weights
        return Results(PRECISION.run(SPMM, *operands, part.num_rows, "sum", False))

    edges = Edges(csr.col, csr.ptr)
    found = computed(graph, local, lambda: edges, [x], compute, sums=True)
    return ShardedTensor(found.out, rows, 0)


def _attention(
    operator: operators.Attention, kernel: Callable[..., Any], args: Arguments
) -> tuple[ShardedTensor, ShardedTensor, Tensor]:
    call = Call.of(args)
    places = [str(operand.shape[0]) for operand in operator.operands]
    sources = _rows_of(call.inputs[places.index("sources")])
    aggregating = call.inputs[places.index("destinations")]
    if is_sharded(aggregating):
        destinations = _rows_of(aggregating)
    else:
        destinations = _among(sources, aggregating.shape[0])
    shapes = [operand.shape for operand in operator.operands]
    mode, grid = _mode(shapes, call, sources, destinations)
    if grid is not None:
        of_block = _attended_block(call, grid, sources, destinations)
        return by_blocks.attend(of_block, call, kernel, operator)
    if mode == "heads":
        adds_edges = operator is operators.ATTENTION
        attention = by_heads.Attention(kernel, shapes, SUMMED[operator.name], adds_edges)
        return by_heads.attend(attention, call, sources, destinations)
    graph = _attended(call, sources, destinations)
    of_rank: _OfPlaces = {
        "sources": lambda x: x,  # which a part takes
        "destinations": graph.of_destinations,
        "edges": graph.of_edges,
    }
    inputs = _each(of_rank, shared, places, call.inputs)

    def operands(part: Part) -> list[Any]:
        of_part: _OfPlaces = {
            "sources": part.of_sources,
            "destinations": part.of_destinations,
            "edges": part.of_edges,
        }
        return _each(of_part, lambda x: x, places, inputs)

    given = dict(zip(operator.names, inputs, strict=True))
    return _attend(call, graph, operator, kernel, operands, given)


_OfPlaces = dict[str, Callable[[Tensor], Any]]


def _each(
    of_places: _OfPlaces, other: Callable[[Tensor], Any], places: list[str], inputs: Sequence[Any]
) -> list[Any]:
    """The local operands that are given, each converted by the function for its place."""
    pairs = zip(places, inputs, strict=True)
    return [None if x is None else of_places.get(place, other)(x) for place, x in pairs]


def _attended(call: Call, sources: Layout, destinations: Layout) -> Neighbourhoods:
    if call.ptr is not None or call.seed is not None:
        raise NoRuleError
    return neighbourhoods(
        call.index,
        sources,
        destinations,
        transpose=call.transpose,
        self_loops=call.self_loops,
    )


def _attended_block(call: Call, grid: Grid, sources: Layout, destinations: Layout) -> Block:
    if call.seed is not None:
        raise NoRuleError
    return _block(
        call.index, call.ptr, grid, sources, destinations, call.transpose, call.self_loops
    )


def _mode(
    shapes: Sequence[Sequence[Size]], call: Call, sources: Layout, destinations: Layout
) -> tuple[str, Grid | None]:
    def fastest(names: Sequence[str]) -> Chosen:
        plan = functools.partial(_attended, call, sources, destinations)
        key = sources, destinations, call.transpose, call.self_loops
        layer = planner.layer_of(shapes, call.inputs, num_heads)
        return planner.choose(call.index, layer, key, plan, names)

    num_heads = by_heads.num_heads(call)
    return of_attention(num_heads, sources, destinations, fastest)


def _attend(
    call: Call,
    graph: Neighbourhoods,
    operator: operators.Attention,
    kernel: Callable[..., Any],
    operands: Callable[[Part], list[Any]],
    given: dict[str, Any],
) -> tuple[ShardedTensor, ShardedTensor, Tensor]:
    """The results of an operator of attention for the rows of this rank.

    Args:
        call: its arguments.
        graph: the edges to these rows.
        operator: which has the same operands, or scores for the same weights.
        kernel: computes it.
        operands: gives its operands for some of the edges.
        given: the operands of this rank by name.
    """
    shapes = {operand.name: operand.shape for operand in operator.operands}
    present = {name: shape for name, shape in shapes.items() if given.get(name) is not None}
    gathered = [given[name] for name, shape in present.items() if shape[0] == "sources"]
    of_edges = [shape for shape in present.values() if shape[0] == "edges"]
    check_dropout(call, operator, has_features=bool(of_edges))
    edges = functools.partial(graph.edges_of, numbered=needs_weights(call) or bool(of_edges))
    addend, rows = graph.of_destinations(call.addend), graph.destinations
    factor = dropout_of_weights(call, graph)

    def compute(part: Part) -> Results:
        own, kept = part.of_addend(addend), part.of_edges(factor)
        how = call, operator, kernel
        found = PRECISION.run(
            local_attention, *how, operands(part), part.edges, part.num_rows, kept, own
        )
        return Results(*found)

    # Values of edges are copied for parts, and features of theirs may be wider than those of nodes.
    splits = all("heads" in shape for shape in of_edges)
    found = computed(graph, graph.local, edges, gathered if splits else [], compute, addend=addend)
    stats = ShardedTensor(found.stats, rows, 0)
    alpha = found.weights
    alpha = stats.local.new_empty(0) if alpha is None else ShardedTensor(alpha, graph.edges, 0)
    return ShardedTensor(found.out, rows, 0), stats, alpha


def attention_rule(name: str) -> Callable[[Callable[[Arguments], Any]], Callable[..., Any]]:
    """Register a rule for an operator of attention, which draws a seed where there is none.

    Nobody has drawn one for sharded tensors, and on the whole an operator needs it.
    """

    def register(function: Callable[[Arguments], Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(func: Any, args: Arguments, kwargs: Options) -> Any:
            try:
                return function(args)
            except NoRuleError:
                found = Call.of(args)
                if found.dropout == 0 or found.seed is not None:
                    raise
                *before, seed = args[:-5]
                seed = dropout_seed(found.dropout, seed)
                return on_the_whole(func, name, (*before, seed, *args[-5:]), kwargs)

        return rule(name)(call)

    return register


@attention_rule("fastgraph::gat")
def gat(args: Arguments) -> Any:
    """Attention from one score for each node and head."""
    return _attention(operators.GAT, GAT, args)


@attention_rule("fastgraph::gatv2")
def gatv2(args: Arguments) -> Any:
    """Additive attention."""
    return _attention(operators.GATV2, GATV2, args)


@attention_rule("fastgraph::attention")
def attention(args: Arguments) -> Any:
    """Attention by dot products."""
    return _attention(operators.ATTENTION, ATTENTION, args)


_WITH_SCORES = by_heads.Attention(
    GAT_WITH_SCORES,
    [("sources", "heads", "channels"), (2, "heads", "channels"), ("edges", "heads")],
    summed=0,
)


@attention_rule("fastgraph::gat_with_scores")
def gat_with_scores(args: Arguments) -> Any:
    """Attention among nodes of one kind: the halo is scored where it is needed."""
    x, att, score_edge, *rest = args
    rows = _rows_of(x)
    call = Call.of((x, att, score_edge, *rest))
    mode, grid = _mode(_WITH_SCORES.shapes, call, rows, rows)
    if grid is not None:
        return *by_blocks.attend_with_scores(_attended_block(call, grid, rows, rows), call), None
    if mode == "heads":
        return *by_heads.attend(_WITH_SCORES, call, rows, rows), None
    graph = _attended(call, rows, rows)
    att, score_edge = shared(att), graph.of_edges(score_edge)
    kernel = GAT if call.dropout else GAT_WITH_SCORES

    def operands(part: Part) -> list[Any]:
        features = part.of_sources(x)
        of_edges = part.of_edges(score_edge)
        if not call.dropout:
            return [features, att, of_edges]
        scores = HEAD_SCORES(features, att)
        return [features, scores[0], scores[1, : part.num_rows], of_edges]

    given = {"x": x, "score_edge": score_edge}
    return *_attend(call, graph, operators.GAT, kernel, operands, given), None


@rule("fastgraph::head_scores")
def head_scores(func: Any, args: Arguments, kwargs: Options) -> ShardedTensor:
    """Each rank scores its own nodes."""
    x, att = args
    rows = _rows_of(x)
    return ShardedTensor(HEAD_SCORES(local_rows(x, rows), shared(att)), rows, 1)


@rule("fastgraph::sddmm")
def products(func: Any, args: Arguments, kwargs: Options) -> ShardedTensor:
    """Dot products of the ends of edges."""
    y, x, index, ptr, heads, reduce, transpose = args
    sources = _rows_of(x)
    destinations = _rows_of(y) if is_sharded(y) else _among(sources, y.shape[0])
    why_not = "products are divided by degrees" if reduce != "sum" else ""
    grid = grid_of(sources, destinations, COUNTS.aggregation, why_not)
    if grid is not None:
        of_rank = _block(index, ptr, grid, sources, destinations, transpose)
        return by_blocks.products(of_rank, y, x, heads)
    graph = _graph(index, ptr, sources, destinations, transpose)
    edges = graph.edges_of(numbered=True)
    local = graph.of_destinations(y), graph.of_sources(x), edges.index, edges.ptr
    return ShardedTensor(PRECISION.run(SDDMM, *local, heads, reduce, False), graph.edges, 0)


@rule("fastgraph::edge_softmax")
def edge_softmax(func: Any, args: Arguments, kwargs: Options) -> ShardedTensor:
    """The softmax of scores over neighbourhoods."""
    score, index, ptr, num_out, num_in, transpose = args
    sources = usual(num_in)
    destinations = _among(sources, num_out)
    grid_of(sources, destinations, COUNTS.aggregation, "each edge gets a softmax of all")
    graph = _graph(index, ptr, sources, destinations, transpose)
    edges = graph.edges_of(numbered=True)
    sizes = graph.destinations.mine, graph.sources.mine + len(graph.plan.halo)
    local = graph.of_edges(score), edges.index, edges.ptr
    return ShardedTensor(PRECISION.run(EDGE_SOFTMAX, *local, *sizes, False), graph.edges, 0)


def _remembered(name: str, compute: Callable[..., Any], *given: Any) -> Any:
    """The value of ``compute(*given)``, cached as long as the sharded tensors live unchanged."""
    key: list[Any] = [name]
    tensors: list[tuple[Tensor, bool]] = []
    for value in given:
        if isinstance(value, ShardedTensor):
            key += [value.rows, value.axis]
            tensors.append((value.local, True))
        elif isinstance(value, Tensor):
            tensors.append((value, False))
        else:
            key.append(value)
    # Each tensor keeps what stands for it, and the last one the result by that of all others.
    *others, (last, is_part) = tensors
    key += [remembered(x, ("is the same",), object, is_part=part) for x, part in others]
    return remembered(last, tuple(key), lambda: compute(*given), is_part=is_part)


REMEMBERING[ShardedTensor] = _remembered
DEFINING.add(ShardedTensor)
