"""A layer's aggregation of its neighbours' features, planned before anything is computed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fastgraph import ops
from fastgraph.graphs.edges import Edges
from fastgraph.ops.library import is_defined_by
from fastgraph.ops.spmm import REDUCTIONS

SUMS = REDUCTIONS
"""Those that are sums, divided by something or not."""


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
    """

    x: Tensor
    edges: Edges
    weight: Tensor | None
    reduce: str
    num_out: int
    node_dim: int
    ties: str

    @property
    def is_owned(self) -> bool:
        """Whether nothing else refers to the result, and no gradient needs it."""
        return self.reduce in SUMS and self.node_dim == 0

    def compute(self) -> Tensor:
        """The aggregated features."""
        operator: Callable[..., Tensor] = ops.spmm
        if self.reduce not in SUMS:
            operator = functools.partial(ops.segment_reduce, ties=self.ties)
        out = operator(
            self._rows_to_keep(),
            self.edges.index,
            self.weight,
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
        out = operator(self._rows(), edges.index, self.weight, transpose=edges.transpose)
        return self._placed(out)

    def _rows(self) -> Tensor:
        return self.x if self.node_dim == 0 else self.x.movedim(self.node_dim, 0)

    def _rows_to_keep(self) -> Tensor:
        """The rows, copied where the operator keeps them for the gradient of weights.

        Upstream keeps what it has gathered, so that its callers may edit the features before the
        backward pass; a copy has a row for each node, where upstream's has one for each edge.
        """
        rows, weight = self._rows(), self.weight
        if weight is None or not weight.requires_grad or not torch.is_grad_enabled():
            return rows
        if torch.compiler.is_compiling() or is_defined_by(rows):
            return rows  # graphs of compilers know no edits
        return rows.clone()

    def _placed(self, out: Tensor) -> Tensor:
        if self.node_dim == 0:
            return out
        # Users call `view` on upstream's result, which is contiguous, and change it in place, which
        # a view of ours would refuse.
        return out.movedim(0, self.node_dim).clone(memory_format=torch.contiguous_format)
