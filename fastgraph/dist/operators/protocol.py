"""The protocol of modes: the operations that each computes, which it refuses, and the edges."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from torch import Tensor

from fastgraph.dist.operators.attention import FusedAttention
from fastgraph.dist.operators.cost import Cluster, Cost, Distribution, Layer
from fastgraph.dist.ranks.mesh import Mesh
from fastgraph.dist.tensor.layout import Layout
from fastgraph.dist.tensor.sharded import ShardedTensor
from fastgraph.dist.tensor.table import NoRuleError
from fastgraph.edge_programs.program import Program
from fastgraph.ops.heads import Call


class Relation(NamedTuple):
    """The edges of a call, and who owns the nodes at their ends.

    Attributes:
        index: ``edge_index``, sharded or replicated.
        sources: the layout of the nodes whose rows are gathered.
        destinations: that of the nodes which aggregate them.
        transpose: whether every edge is reversed.
        self_loops: replace the self-loops by one for each node whose number is below this.
    """

    index: Tensor  # type: ignore[assignment]  # shadows tuple.index
    sources: Layout
    destinations: Layout
    transpose: bool = False
    self_loops: int = 0


class Operation(NamedTuple):
    """An operation, by all that decides whether a mode can compute it.

    Attributes:
        name: of the method of :class:`Mode`.
        reduce: how a sum, extremum or product is reduced.
        ties: who gets the gradient of an extremum that several edges attain.
        heads: of attention.
    """

    name: str
    reduce: str = "sum"
    ties: str = ""
    heads: int = 1


class Mode(ABC):
    """A way to compute fused operators on sharded tensors.

    A mode overrides the operations that it names. Each takes the edges, then the operands as the
    operator got them, and gives its results, sharded. All ranks call it together. It raises
    ``NoRuleError`` where operands do not fit, before anything is sent.

    Attributes:
        name: as users spell it.
        operations: that it is there for. Others are computed by halo without a word, those of them
            that it refuses by halo as well, and the reason is counted.
        mesh: rows and columns of the ranks, of a mode that has any.
    """

    name: ClassVar[str]
    operations: ClassVar[frozenset[str]]
    mesh: Mesh | None = None

    def on(self, mesh: Mesh | None) -> Mode:
        """The mode on ranks that form a mesh; default: it is the same."""
        return self

    def why_not(self, operation: Operation) -> str | None:
        """Why the mode cannot compute one of its operations, or ``None`` if it can."""
        return None

    def owner_of_edges(self, sources: Tensor, destinations: Tensor) -> Tensor:
        """The rank that holds each edge of a graph that is sharded for this mode.

        Args:
            sources: int64 ``[E]``, the rank of the node where each edge starts.
            destinations: the same for where it leads to; the default is this one.
        """
        return destinations

    @abstractmethod
    def cost(self, layer: Layer, rows: Distribution, cluster: Cluster) -> Cost | None:
        """The messages, bytes, work and memory of a layer; ``None`` if it cannot compute it."""

    def weighted_sum(
        self, relation: Relation, x: Tensor, weight: Tensor | None, reduce: str
    ) -> ShardedTensor:
        """Sums and means over neighbourhoods, see :func:`fastgraph.ops.spmm`."""
        raise NoRuleError

    def normalised_sum(
        self, relation: Relation, x: Tensor, weight: Tensor | None, loop_weight: float
    ) -> ShardedTensor:
        """Sums with the normalisation of graph convolutions, see :func:`fastgraph.ops.gcn`."""
        raise NoRuleError

    def extremum(
        self, relation: Relation, x: Tensor, weight: Tensor | None, reduce: str, ties: str
    ) -> tuple[ShardedTensor, Tensor]:
        """Maxima and minima, and the record of ties, see :func:`fastgraph.ops.segment_reduce`."""
        raise NoRuleError

    def attention(
        self, relation: Relation, call: Call, attention: FusedAttention
    ) -> tuple[ShardedTensor, ShardedTensor, Tensor]:
        """The output, statistics and weights of fused attention; no weights: an empty tensor."""
        raise NoRuleError

    def products(
        self, relation: Relation, y: Tensor, x: Tensor, heads: int, reduce: str
    ) -> ShardedTensor:
        """Dot products of the ends of edges, which stay where the edges are."""
        raise NoRuleError

    def program(
        self, relation: Relation, operands: Sequence[Tensor], program: Program
    ) -> list[Tensor]:
        """The outputs of an edge program, see :func:`fastgraph.ops.edge_program`."""
        raise NoRuleError

    def softmax(self, relation: Relation, score: Tensor) -> ShardedTensor:
        """The softmax of scores over neighbourhoods, see :func:`fastgraph.ops.edge_softmax`."""
        raise NoRuleError


OPERATIONS = frozenset(
    ("weighted_sum", "normalised_sum", "extremum", "attention", "products", "program", "softmax")
)
