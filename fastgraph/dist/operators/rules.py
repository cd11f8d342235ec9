"""Rules for the operators of fastgraph: each asks for the mode of a call, which computes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from fastgraph.dist.operators.attention import FUSED_ATTENTIONS, FusedAttention, num_heads, shared
from fastgraph.dist.operators.cost import Layer
from fastgraph.dist.operators.modes import HALO
from fastgraph.dist.operators.planner import layer_of, layer_of_sum, mode_of
from fastgraph.dist.operators.protocol import Mode, Operation, Relation
from fastgraph.dist.operators.rank_graph import local_rows, part_of
from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.counts import COUNTS
from fastgraph.dist.ranks.mesh import GRID
from fastgraph.dist.tensor.digests import DIGESTS
from fastgraph.dist.tensor.layout import Layout, usual
from fastgraph.dist.tensor.memo import cached, cached_with_all
from fastgraph.dist.tensor.sharded import ShardedTensor, is_sharded, on_the_whole
from fastgraph.dist.tensor.table import (
    Arguments,
    NoRuleError,
    Options,
    TorchFunction,
    rule,
    unpacked,
)
from fastgraph.edge_programs.program import parse
from fastgraph.graphs.edges import index_of_groups
from fastgraph.ops.head_scores import HEAD_SCORES
from fastgraph.ops.heads import Call, dropout_seed
from fastgraph.ops.library import DEFINING
from fastgraph.registry.operators import Attention


def _rows(x: Tensor) -> Layout:
    """The layout of the nodes that features belong to."""
    if not isinstance(x, ShardedTensor):
        return usual(x.shape[0])
    if x.axis != 0:
        raise NoRuleError
    return x.rows


def _relation(
    index: Tensor, ptr: Tensor | None, sources: Layout, destinations: Layout, transpose: bool
) -> Relation:
    if ptr is not None:
        raise NoRuleError
    return Relation(index, sources, destinations, transpose)


def _among(sources: Layout, n: int) -> Layout:
    """The layout of ``n`` aggregating nodes: that of the sources, if they may be the same nodes."""
    return sources if n == sources.n else usual(n)


def _mode(
    operation: Operation, relation: Relation, layer: Callable[[], Layer] | None = None
) -> Mode:
    """The mode of a call that is none of attention; see :func:`mode_of`, which is for a choice."""
    if relation.sources.mode == relation.destinations.mode == HALO.name:
        return HALO
    return mode_of(operation, relation, layer)


@rule("fastgraph::spmm")
@unpacked
def weighted_sum(
    func: TorchFunction,
    x: Tensor,
    index: Tensor,
    ptr: Tensor | None,
    weight: Tensor | None,
    num_out: int,
    reduce: str,
    transpose: bool,
) -> ShardedTensor:
    """Sums and means over neighbourhoods."""
    if reduce not in ("sum", "mean"):
        raise NoRuleError
    sources = _rows(x)
    relation = _relation(index, ptr, sources, _among(sources, num_out), transpose)
    mode = _mode(Operation("weighted_sum", reduce), relation, _sum(x, weight))
    return mode.weighted_sum(relation, x, weight, reduce)


@rule("fastgraph::segment_reduce")
@unpacked
def extremum(
    func: TorchFunction,
    x: Tensor,
    index: Tensor,
    ptr: Tensor | None,
    weight: Tensor | None,
    num_out: int,
    reduce: str,
    transpose: bool,
    ties: str,
) -> tuple[ShardedTensor, Tensor]:
    """Maxima and minima over neighbourhoods."""
    sources = _rows(x)
    relation = _relation(index, ptr, sources, _among(sources, num_out), transpose)
    operation = Operation("extremum", reduce, ties)
    mode = _mode(operation, relation, _sum(x, weight, is_extremum=True))
    return mode.extremum(relation, x, weight, reduce, ties)


@rule("fastgraph::gcn")
@unpacked
def normalised_sum(
    func: TorchFunction,
    x: Tensor,
    index: Tensor,
    weight: Tensor | None,
    loop_weight: float,
    transpose: bool,
    adjoint: bool,
) -> ShardedTensor:
    """Sums with the normalisation of graph convolutions."""
    if adjoint:
        raise NoRuleError
    rows = _rows(x)
    relation = Relation(index, rows, rows, transpose)
    mode = _mode(Operation("normalised_sum"), relation, _sum(x, weight))
    return mode.normalised_sum(relation, x, weight, loop_weight)


def _sum(
    x: Tensor, weight: Tensor | None, *, is_extremum: bool = False
) -> Callable[[], Layer] | None:
    """Gives the layer of a sum; ``None`` where weights would move to blocks at each call."""
    return None if weight is not None else lambda: layer_of_sum(x, is_extremum=is_extremum)


def _register(attention: FusedAttention) -> None:
    """Register the rule for an operator of attention, which draws a seed where there is none.

    Nobody has drawn one for sharded tensors, and on the whole an operator needs it.
    """
    name = f"fastgraph::{attention.spec.name}"

    def call(func: TorchFunction, args: Arguments, kwargs: Options) -> object:
        found = Call.of(args)
        try:
            results = _attended(attention, found)
        except NoRuleError:
            if found.dropout == 0 or found.seed is not None:
                raise
            seed = dropout_seed(found.dropout, found.seed)
            return on_the_whole(func, name, (*args[:-6], seed, *args[-5:]), kwargs)
        # Nobody asks for the scores that an operator makes, which are its last result.
        return results if attention.by_scores is None else (*results, None)

    rule(name)(call)


def _attended(attention: FusedAttention, call: Call) -> tuple[ShardedTensor, ShardedTensor, Tensor]:
    attention.check(call)
    _check_types(call.inputs, attention.spec)
    call, spec = _by_ends(call), attention.spec
    sources = destinations = _rows(call.inputs[spec.gathered])
    if "destinations" in spec.places:
        aggregating = call.inputs[spec.places.index("destinations")]
        destinations = _rows_or(aggregating, sources)
    relation = Relation(call.index, sources, destinations, call.transpose, call.self_loops)
    heads = num_heads(call)
    layer = lambda: layer_of(spec.shapes, call.inputs, heads, spec.made)  # noqa: E731
    mode = mode_of(Operation("attention", heads=heads), relation, layer)
    return mode.attention(relation, call, attention)


def _check_types(inputs: Sequence[Tensor | None], spec: Attention) -> None:
    """The table of biases has the types of the edges of all ranks.

    A kernel would tell the rank alone whose edge has such a type, and the others would wait for it.

    Raises:
        NoRuleError: on all ranks, as it has not: one process names the type.
    """
    of_names = dict(zip(spec.names, inputs, strict=True))
    table, types = of_names.get("table"), of_names.get("bias_index")
    if table is None or types is None:
        return
    local, num_types, is_part = part_of(types), table.shape[0], is_sharded(types)

    def make() -> bool:
        has_all = not local.numel() or (int(local.min()) >= 0 and int(local.max()) < num_types)
        return transport.agree(has_all) if is_part else has_all

    if not cached(local, ("types of a table", num_types), make, is_part=is_part):
        raise NoRuleError


def _by_ends(call: Call) -> Call:
    """A call whose edges are given by groups as one by both ends, in the order of their numbers.

    The ends are made once for groups that all ranks have.

    Raises:
        NoRuleError: groups are sharded, or none, of which one process says what is wrong.
    """
    if call.ptr is None:
        return call
    if is_sharded(call.index) or is_sharded(call.ptr):
        raise NoRuleError
    given = call.index, call.ptr
    DIGESTS.compare(call.ptr)
    index = cached_with_all(
        [(x, False) for x in given], ("ends of groups",), lambda: _ends_of_groups(*given)
    )
    return call._replace(index=index, ptr=None)


def _ends_of_groups(index: Tensor, ptr: Tensor) -> Tensor:
    num_edges, counts = index.shape[-1], ptr.diff()
    if int(ptr[0]) or int(ptr[-1]) != num_edges or bool((counts < 0).any()):
        raise NoRuleError
    if index.dim() == 2 and len(index[1].unique()) != num_edges:
        raise NoRuleError
    return index_of_groups(index, ptr)


def _rows_or(x: Tensor, sources: Layout) -> Layout:
    """The layout of the nodes that aggregate, given their features and the layout of sources."""
    return _rows(x) if isinstance(x, ShardedTensor) else _among(sources, x.shape[0])


for _attention in FUSED_ATTENTIONS.values():
    _register(_attention)


@rule("fastgraph::head_scores")
@unpacked
def head_scores(func: TorchFunction, x: Tensor, att: Tensor) -> ShardedTensor:
    """Each rank scores its own nodes."""
    rows = _rows(x)
    return ShardedTensor(HEAD_SCORES(local_rows(x, rows), shared(att)), rows, 1)


@rule("fastgraph::sddmm")
@unpacked
def products(
    func: TorchFunction,
    y: Tensor,
    x: Tensor,
    index: Tensor,
    ptr: Tensor | None,
    heads: int,
    reduce: str,
    transpose: bool,
) -> ShardedTensor:
    """Dot products of the ends of edges."""
    sources = _rows(x)
    relation = _relation(index, ptr, sources, _rows_or(y, sources), transpose)
    mode = _mode(Operation("products", reduce), relation)
    return mode.products(relation, y, x, heads, reduce)


@rule("fastgraph::edge_program")
@unpacked
def program(
    func: TorchFunction,
    operands: Sequence[Tensor],
    index: Tensor,
    ptr: Tensor | None,
    text: str,
    num_in: int,
    num_out: int,
    transpose: bool,
) -> list[Tensor]:
    """Messages of any kind, reduced over neighbourhoods."""
    made = parse(text)
    of_place = dict(zip((operand.place for operand in made.operands), operands, strict=True))
    sources = _rows(of_place["gathered"]) if "gathered" in of_place else usual(num_in)
    destinations = _among(sources, num_out)
    if "row" in of_place:
        destinations = _rows_or(of_place["row"], sources)
    relation = _relation(index, ptr, sources, destinations, transpose)
    if sources.mode == HALO.name and destinations.mode == GRID:
        # Pairs of nodes and types lie where their edges are: nothing travels but to other blocks.
        COUNTS.aggregation[f"{HALO.name}: gathered rows are laid out for it"] += 1
        return HALO.program(relation, operands, made)
    return _mode(Operation("program"), relation).program(relation, operands, made)


@rule("fastgraph::edge_softmax")
@unpacked
def edge_softmax(
    func: TorchFunction,
    score: Tensor,
    index: Tensor,
    ptr: Tensor | None,
    num_out: int,
    num_in: int,
    transpose: bool,
) -> ShardedTensor:
    """The softmax of scores over neighbourhoods."""
    sources = usual(num_in)
    relation = _relation(index, ptr, sources, _among(sources, num_out), transpose)
    return _mode(Operation("softmax"), relation).softmax(relation, score)


DEFINING.add(ShardedTensor)
