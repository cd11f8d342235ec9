"""A layer's aggregation of its neighbours' features, planned before anything is computed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fastgraph import ops
from fastgraph.graphs.edges import Edges
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
            self._rows(),
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

    def _placed(self, out: Tensor) -> Tensor:
        if self.node_dim == 0:
            return out
        # Users call `view` on upstream's result, which is contiguous, and change it in place, which
        # a view of ours would refuse.
        return out.movedim(0, self.node_dim).clone(memory_format=torch.contiguous_format)
