"""A layer's aggregation of its neighbours' features, planned before anything is computed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fastgraph import ops
from fastgraph.graphs.edges import (
    Edges,
    KnownGraph,
    OutOfRange,
    graph_of,
    too_large,
    unless_out_of_range,
)
from fastgraph.graphs.memo import is_recording
from fastgraph.machine.memory import as_it_is
from fastgraph.ops.coo import (
    FEW,
    NARROW,
    UngroupedEdges,
    are_few_edges,
    check_edges,
    coo_kernel,
    is_early_use,
    most_channels,
    most_channels_ever,
)
from fastgraph.ops.library import is_defined_by
from fastgraph.ops.spmm import REDUCTIONS
from fastgraph.plugins.refusal import Refusal

SUMS = REDUCTIONS
"""Reductions that are sums, divided by something or not."""


class Aggregation(NamedTuple):
    """A sum, mean, maximum or minimum over neighbourhoods.

    Attributes:
        x: features, the nodes in dimension ``node_dim``.
        edges: along which they are gathered.
        weight: one factor for each edge, ``[E]``.
        reduce: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``.
        num_out: the number of aggregating nodes.
        node_dim: counted from the front.
        ties: as for :func:`fastgraph.ops.segment_reduce`.
        is_product: whether upstream multiplies by a matrix instead of gathering features.
        known: the graph of the edges, where it has been looked up, or edges that need none.
    """

    x: Tensor
    edges: Edges
    weight: Tensor | None
    reduce: str
    num_out: int
    node_dim: int
    ties: str
    is_product: bool = False
    known: KnownGraph | UngroupedEdges | None = None

    @property
    def is_owned(self) -> bool:
        """True if nothing else refers to the result, and no gradient needs it."""
        return self.reduce in SUMS and self.node_dim == 0

    def look_up(self) -> Aggregation | Refusal:
        """The same with its graph, so that computing does not look at the edges once more.

        Or the reason why upstream's code must run, which is not for products with matrices: these
        would read other memory where operators raise.
        """
        edges = self.edges
        if self.is_product or edges.ptr is not None or is_recording():
            return self
        if is_defined_by(self.x, edges.index):
            return self
        num_in = self.x.shape[self.node_dim]
        ends = (self.num_out, num_in) if edges.transpose else (num_in, self.num_out)
        if refusal := too_large(*ends, edges.num_edges):
            return refusal
        if self._needs_no_graph(*ends):
            refusal = unless_out_of_range(check_edges, edges.index, *ends)
            return refusal or self._replace(known=UngroupedEdges(edges.index))
        graph = unless_out_of_range(graph_of, edges.index, None, *ends)
        if isinstance(graph, OutOfRange):
            return graph
        return self._replace(known=KnownGraph(graph, edges.index))

    def _needs_no_graph(self, num_src: int, num_dst: int) -> bool:
        """True for a reduction of few channels that would be the only one to use grouped edges."""
        edges, weight = self.edges, self.weight
        if self.reduce not in SUMS:
            may_wait = self.ties != "winner" and self._has_coo_kernel(NARROW)
            return may_wait and is_early_use(edges.index, num_src, num_dst)
        if edges.transpose:
            return self._has_coo_kernel(most_channels(edges.index, transpose=True))
        if self._has_coo_kernel(NARROW):
            return weight is not None or is_early_use(edges.index, num_src, num_dst)
        may_wait = are_few_edges(edges.index) and self._has_coo_kernel(FEW)
        return may_wait and is_early_use(edges.index, num_src, num_dst)

    def _has_coo_kernel(self, most: int) -> bool:
        edges, operator = self.edges, "spmm" if self.reduce in SUMS else "segment_reduce"
        given = self.rows(), edges.index, edges.ptr, self.weight, self.num_out
        return coo_kernel(*given, most, operator) is not None

    def compute(self) -> Tensor:
        """The aggregated features."""
        return self._sum() if self.known is None else self.known.while_computing(self._sum)

    def _sum(self) -> Tensor:
        operator: Callable[..., Tensor] = ops.spmm
        if self.reduce not in SUMS:
            operator = functools.partial(ops.segment_reduce, ties=self.ties)
        out = operator(
            self._rows_to_keep(),
            self.edges.index,
            self._weight_to_keep(),
            ptr=self.edges.ptr,
            num_out=self.num_out,
            reduce=self.reduce,
            transpose=self.edges.transpose,
        )
        return self._placed(out)

    def compute_by(self, operator: Callable[..., Tensor]) -> Tensor:
        """The same by an operator ``(x, index, weight, transpose=...)`` that does more than sum.

        The graph must be a plain ``edge_index`` among one set of nodes.
        """
        edges = self.edges
        out = operator(self.rows(), edges.index, self.weight, transpose=edges.transpose)
        return self._placed(out)

    def count_rows(self) -> int:
        """The number of rows of the result up to the last one with edges: those behind are zero.

        All where sums may be computed without a graph: what follows from this number must not
        depend on whether there is one.
        """
        known = self.known
        if not isinstance(known, KnownGraph) or self.node_dim != 0 or not self.x.is_cpu:
            return self.num_out
        edges = self.edges
        most = NARROW
        if self.reduce in SUMS:
            most = most_channels_ever(edges.index, transpose=edges.transpose)
        if self._has_coo_kernel(most):
            return self.num_out
        return known.graph.count_rows(transpose=edges.transpose)

    def rows(self) -> Tensor:
        """The features, nodes first."""
        return self.x if self.node_dim == 0 else self.x.movedim(self.node_dim, 0)

    def _rows_to_keep(self) -> Tensor:
        """The rows, copied where the operator keeps them for the gradient of weights.

        Upstream keeps what it has gathered, so that its callers may edit the features before the
        backward pass; a copy has a row for each node, where upstream's has one for each edge.
        """
        rows, weight = self.rows(), self.weight
        if weight is None or not weight.requires_grad or not torch.is_grad_enabled():
            return rows
        if torch.compiler.is_compiling() or is_defined_by(rows):
            return rows  # graphs of compilers know no edits
        return rows.clone()

    def _weight_to_keep(self) -> Tensor | None:
        """The weights, as a view where the operator keeps them for the gradient of features.

        Upstream keeps a view, too.
        """
        weight = self.weight
        return weight if weight is None or not self.x.requires_grad else as_it_is(weight)

    def _placed(self, out: Tensor) -> Tensor:
        if self.node_dim == 0:
            return out
        # Users call `view` on upstream's result, which is contiguous, and change it in place, which
        # a view of ours would refuse.
        return out.movedim(0, self.node_dim).clone(memory_format=torch.contiguous_format)
