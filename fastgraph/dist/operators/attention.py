"""Fused attention as modes compute it: operators, and their call for the edges of a rank.

Dropout is that of all ranks: weights are made, dropped by where their edges are among those of one
process, and sources are summed by those that are left. With a seed these are the weights that the
operator drops on one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fastgraph.dist.operators.dropout import Dropped, computed_again, dropout_of
from fastgraph.dist.operators.rank_graph import RankGraph, part_of
from fastgraph.dist.tensor.sharded import enter, is_sharded
from fastgraph.dist.tensor.table import NoRuleError
from fastgraph.graphs.edges import Edges
from fastgraph.layers.sums import add_to
from fastgraph.ops.attention import ATTENTION, BIASED_ATTENTION
from fastgraph.ops.block_attention import BLOCK_ATTENTION
from fastgraph.ops.edge_attention import EDGE_ATTENTION
from fastgraph.ops.gat import GAT
from fastgraph.ops.gat_with_scores import GAT_WITH_SCORES
from fastgraph.ops.gatv2 import GATV2
from fastgraph.ops.head_scores import HEAD_SCORES
from fastgraph.ops.heads import Call
from fastgraph.ops.spmm import SPMM
from fastgraph.registry import operators

Operand = Tensor | None
Convert = Callable[[Tensor], Operand]


class FusedAttention(NamedTuple):
    """An operator of attention.

    Attributes:
        spec: its operands.
        kernel: the operator.
        by_scores: for one that scores nodes itself, the operator that is given the scores.
    """

    spec: operators.Attention
    kernel: Callable[..., Any]
    by_scores: FusedAttention | None = None

    def check(self, call: Call) -> None:
        """Modes can compute a call.

        Raises:
            NoRuleError: a seed is given and self-loops are replaced, whose numbers on one process
                are not known; or features of edges are summed that would be dropped.
        """
        if call.seed is not None and call.self_loops:
            raise NoRuleError
        if call.dropout > 0 and self.spec.adds_edges and self._of(call, "edge") is not None:
            raise NoRuleError

    def _of(self, call: Call, name: str) -> Operand:
        """An operand of a call by its name."""
        found: Operand = call.inputs[self.spec.names.index(name)]
        return found

    def has_values_of_edges(self, call: Call) -> bool:
        """True if an operand with a row for each edge is given."""
        pairs = zip(self.spec.places, call.inputs, strict=True)
        return any(place == "edges" and x is not None for place, x in pairs)

    def given_scores(
        self, inputs: list[Operand], num_destinations: int
    ) -> tuple[FusedAttention, list[Operand]]:
        """The operator that is given the scores of nodes, and its operands.

        Args:
            inputs: operands of this one.
            num_destinations: how many of the sources, which come first, aggregate.
        """
        if self.by_scores is None:
            return self, inputs
        x, att, of_edges = inputs
        scores = HEAD_SCORES(x, att)
        return self.by_scores, [x, scores[0], scores[1, :num_destinations], of_edges]


_GAT = FusedAttention(operators.GAT, GAT)

FUSED_ATTENTIONS = {
    attention.spec.name: attention
    for attention in (
        _GAT,
        FusedAttention(operators.GAT_WITH_SCORES, GAT_WITH_SCORES, _GAT),
        FusedAttention(operators.GATV2, GATV2),
        FusedAttention(operators.ATTENTION, ATTENTION),
        FusedAttention(operators.EDGE_ATTENTION, EDGE_ATTENTION),
        FusedAttention(operators.BIASED_ATTENTION, BIASED_ATTENTION),
        FusedAttention(operators.BLOCK_ATTENTION, BLOCK_ATTENTION),
    )
}
"""By the names of operators."""


def num_heads(call: Call) -> int:
    """The number of heads of a call; 0 where its features have another shape than they must."""
    x: Tensor = call.inputs[0]
    return x.shape[1] if x.dim() == 3 else 0


def needs_weights(call: Call) -> bool:
    """True if weights are made, ``[edges, heads]``."""
    return bool(call.weights or call.dropout > 0)


def dropout_of_weights(call: Call, graph: RankGraph) -> Dropped | None:
    """The dropout of the weights of local edges; ``None`` without any."""
    if call.dropout == 0:
        return None
    edges, like = graph.edges, part_of(call.inputs[0])
    return dropout_of(call, edges.position_on(like.device), edges.n, num_heads(call), None, like)


def local_attention(
    call: Call,
    attention: FusedAttention,
    inputs: Sequence[Operand],
    edges: Edges,
    num_destinations: int,
    dropped: Dropped | None,
    addend: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The output, statistics and weights of an operator for some edges of this rank.

    Args:
        call: what was asked for.
        attention: the operator.
        inputs: its operands for the nodes of these edges.
        edges: the edges.
        num_destinations: how many nodes they lead to.
        dropped: of their weights.
        addend: added to the output.

    Returns:
        The output, the statistics, and the weights after dropout if they are asked for.
    """
    topology = edges.index, edges.ptr
    if dropped is None:
        rest = (*topology, None, 0, False, call.option, 0.0, call.weights)
        out, stats, alpha, *_ = attention.kernel(*inputs, addend, *rest)
        return out, stats, alpha if call.weights else None

    def compute(given: Sequence[Operand]) -> tuple[Tensor, Tensor, Tensor]:
        rest = (*topology, None, 0, False, call.option, 0.0, True)
        _, stats, alpha, *_ = attention.kernel(*_for_weights(given, attention), None, *rest)
        alpha = alpha * dropped.factors(alpha)
        values = given[attention.spec.summed]
        return SPMM(values, *topology, alpha, num_destinations, "sum", False), stats, alpha

    weights = None
    if call.weights or dropped.seed is None:
        out, stats, weights = compute(inputs)
    else:
        out, stats = computed_again(lambda given: compute(given)[:2], inputs)
    out = out if addend is None else add_to(out, addend)
    return out, stats, weights if call.weights else None


def each(
    of_places: Mapping[str, Convert],
    other: Convert,
    places: Sequence[str],
    inputs: Sequence[Operand],
) -> list[Operand]:
    """The operands that are given, each converted by the function for its place, or by another."""
    pairs = zip(places, inputs, strict=True)
    return [None if x is None else of_places.get(place, other)(x) for place, x in pairs]


def together(
    kind: str,
    convert: Callable[[list[Tensor]], list[Tensor]],
    places: Sequence[str],
    inputs: list[Operand],
) -> None:
    """Convert the operands of one place that are given, all at once."""
    pairs = zip(places, inputs, strict=True)
    given = [(i, x) for i, (place, x) in enumerate(pairs) if place == kind and x is not None]
    if given:
        found = convert([x for _, x in given])
        for (i, _), x in zip(given, found, strict=True):
            inputs[i] = x


def shared(x: Tensor) -> Tensor:
    """An operand that is the same for all nodes and edges.

    Raises:
        NoRuleError: it is sharded.
    """
    if is_sharded(x):
        raise NoRuleError
    return enter(x)


def _for_weights(inputs: Sequence[Operand], attention: FusedAttention) -> Sequence[Operand]:
    """Operands that give the same weights, and the smallest output that an operator can have.

    Others than GAT's score the features that they add up.
    """
    if attention is not _GAT:
        return inputs
    x, *scores = inputs
    assert x is not None
    return [x.new_zeros((*x.shape[:2], 1)), *scores]
