"""``GSpMM``: messages of edges, reduced at their destinations.

Replaced for

- sums of the features of sources, or of their products with one weight for each edge or for each
  edge and head;
- maxima and minima of the features of sources;
- sums, maxima and minima of the features of edges.

DGL makes means out of sums.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastgraph import ops
from fastgraph.dgl.conditions import (
    LEAST_CHANNELS,
    NoOperator,
    features_refusal,
    is_layer_too_small,
    last_wins,
)
from fastgraph.dgl.index_objects import FEWEST
from fastgraph.dgl.sizes import (
    EXTREMUM,
    EXTREMUM_OF_EDGES,
    FEW,
    SUM,
    SUM_OF_EDGES,
    WEIGHTED_SUM,
    is_too_small,
)
from fastgraph.dgl.structure import Relation, Structure, directed_structure_of
from fastgraph.layers.constant import summed
from fastgraph.plugins.refusal import Refusal
from fastgraph.routing.dispatch import Computation
from fastgraph.routing.sizes import TOO_SMALL

# For fewer, DGL's loops over single numbers are as fast, or faster.
_LEAST_OF_EDGES = 16
_LEAST_OF_EDGES_IN_INFERENCE = 128  # DGL adds them up well, and is slow in its backward pass
_LEAST_OF_LEARNED_WEIGHTS = 4

_BOUNDS = {
    ("copy_lhs", "sum"): SUM,
    ("copy_lhs", "max"): EXTREMUM,
    ("copy_lhs", "min"): EXTREMUM,
    ("copy_rhs", "sum"): SUM_OF_EDGES,
    ("copy_rhs", "max"): EXTREMUM_OF_EDGES,
    ("copy_rhs", "min"): EXTREMUM_OF_EDGES,
    ("mul", "sum"): WEIGHTED_SUM,
}
"""The sizes of calls that have a route, by how features are combined and how they are reduced."""


def bound(gidx: Any, op: Any = None, reduce: Any = None, *_: object) -> int:
    """The number of edges from which on a call may gain, whatever its features."""
    least = _BOUNDS.get((op, reduce)) if type(op) is type(reduce) is str else None
    return FEWEST if least is None else least.bound()


def plan(gidx: Any, op: str, reduce: str, lhs: Any, rhs: Any) -> Computation | Refusal:
    """A call of ``GSpMM``, or the reason to leave it to upstream.

    Args:
        gidx: DGL's index object of a graph with one relation.
        op: how features of sources and of edges are combined.
        reduce: ``"sum"``, ``"max"`` or ``"min"``.
        lhs: features of sources, ``[sources, *channels]`` or ``[sources]``.
        rhs: features of edges, ``[E, *channels]`` or ``[E]``.
    """
    # By names alone: what a user gives in place of one need not have a hash.
    least = _BOUNDS.get((op, reduce)) if type(op) is type(reduce) is str else None
    if least is None:
        return NoOperator(f"{reduce} of {op} has no operator")
    of_edges = op == "copy_rhs"
    x = rhs if of_edges else lhs
    if not isinstance(x, Tensor):
        return NoOperator("features that are no tensor")  # of which upstream has an error
    channels = x.shape[1:].numel()
    if channels == 0:
        return NoOperator("features without channels have no operator")
    if of_edges and channels < _least_of_edges(reduce, x):
        return NoOperator(f"{reduce} of {channels} channels of edges has no operator")
    if op == "mul" and channels < _LEAST_OF_LEARNED_WEIGHTS and _are_learned(rhs):
        return NoOperator(f"{reduce} of {channels} channels by learned weights has no operator")
    if is_too_small(least, gidx, x, channels) or (channels <= FEW and is_layer_too_small()):
        return TOO_SMALL
    if op == "mul" and isinstance(rhs, Tensor) and not (rhs.dim() > 0 and _is_of_heads(rhs, x)):
        sizes = f"{list(x.shape[1:])} and {list(rhs.shape[1:])}"
        return NoOperator(f"products of features of shapes {sizes} have no operator")
    # The order of edges does not matter for sums, so that those of a reversed graph are found.
    directed = directed_structure_of(gidx, may_turn=reduce == "sum")
    if isinstance(directed, Refusal):
        return directed
    structure, is_reversed = directed
    refusal = structure.refusal(f"the features of {'edges' if of_edges else 'sources'}", x)
    if refusal is not None:
        return refusal
    if reduce != "sum":
        return _extremum(structure, x, reduce, of_edges)
    if of_edges:
        return _sum_of_edges(structure, is_reversed, x)
    return _sum(structure, is_reversed, x, rhs if op == "mul" else None)


def _least_of_edges(reduce: str, x: Tensor) -> int:
    if reduce == "sum" and not _has_gradient(x):
        return _LEAST_OF_EDGES_IN_INFERENCE
    return _LEAST_OF_EDGES


def _are_learned(weights: Any) -> bool:
    """True if weights get a gradient, or in a backward pass of DGL's own for weights that do."""
    return _has_gradient(weights) or torch._C._current_graph_task_id() != -1


def _has_gradient(features: Any) -> bool:
    return isinstance(features, Tensor) and features.requires_grad and torch.is_grad_enabled()


def _sum(structure: Structure, is_reversed: bool, x: Tensor, weight: Any) -> Computation | Refusal:
    num_in, num_out = structure.num_src, structure.num_dst
    if is_reversed:
        num_in, num_out = num_out, num_in
    refusal = features_refusal(structure, "spmm", x, num_in)
    if refusal is None and weight is not None:
        refusal = _weight_refusal(structure, x, weight)
    if refusal is not None:
        return refusal

    def compute() -> Tensor:
        edges = (structure.plain() if weight is None else structure.numbered()).edges
        heads = None if weight is None else weight.reshape(len(weight), weight.shape[1:].numel())
        if is_reversed:  # in a backward pass, where nothing is constant
            out = ops.spmm(
                _matrix(x), edges.index, heads, ptr=edges.ptr, num_out=num_out, transpose=True
            )
        else:
            out = summed(_matrix(x), edges, heads, "sum", num_out, is_private=False)
        return out.squeeze(1) if x.dim() == 1 else out

    return compute


def _weight_refusal(structure: Structure, x: Tensor, weight: Any) -> Refusal | None:
    refusal = structure.refusal("the features of edges", weight)
    if refusal is not None:
        return refusal
    if len(weight) != structure.num_edges:
        return Refusal(f"features of {len(weight)} edges for a graph with {structure.num_edges}")
    if weight.dim() > x.dim() or weight.layout != torch.strided:
        return Refusal("features of edges in another form than those of nodes")
    if weight.dtype != x.dtype or weight.device != x.device:
        return Refusal("features of nodes and of edges with different dtypes or devices")
    return None


def _is_of_heads(weight: Tensor, x: Tensor) -> bool:
    """True if each edge has one weight, or one for each head."""
    heads = weight.shape[1:].numel()
    is_by_head = weight.shape[-1:] == (1,) and weight.shape[1:-1] == x.shape[1:-1]
    return heads == 1 or (heads > 0 and is_by_head and x.shape[-1] >= LEAST_CHANNELS)


def _sum_of_edges(structure: Structure, is_reversed: bool, x: Tensor) -> Computation | Refusal:
    refusal = features_refusal(structure, "spmm", x, structure.num_edges)
    if refusal is not None:
        return refusal

    def compute() -> Tensor:
        edges = structure.incidence(transpose=is_reversed).edges
        num_out = structure.num_src if is_reversed else structure.num_dst
        out = ops.spmm(_matrix(x), edges.index, ptr=edges.ptr, num_out=num_out)
        return out.squeeze(1) if x.dim() == 1 else out

    return compute


def _extremum(
    structure: Structure, x: Tensor, reduce: str, of_edges: bool
) -> Computation | Refusal:
    num_edges = structure.num_edges
    if num_edges == 0:
        # DGL's zeros lead to the first node in its backward pass.
        return NoOperator(f"{reduce} without any edge has no operator")
    num_in = num_edges if of_edges else structure.num_src
    refusal = features_refusal(structure, "segment_reduce", x, num_in)
    if refusal is not None:
        return refusal

    def compute() -> Tensor:
        grouped = _ordered(structure, of_edges, backwards=last_wins(x))
        return extremum(structure.num_dst, grouped, x, reduce)

    return compute


def extremum(num_out: int, grouped: Relation, x: Tensor, reduce: str) -> Tensor:
    """Maxima or minima as DGL has them: of ties one has the gradient, and of no edges infinity.

    Args:
        num_out: the number of destinations.
        grouped: the edges, the first of which that has the extremum wins.
        x: ``[rows, *channels]`` or ``[rows]``, what they gather.
        reduce: ``"max"`` or ``"min"``.
    """
    out = ops.segment_reduce(
        _matrix(x),
        grouped.edges.index,
        ptr=grouped.edges.ptr,
        num_out=num_out,
        reduce=reduce,
        ties="winner",
    )
    lonely = grouped.lonely
    if lonely is not None:  # DGL's callers make zeros of it
        least = float("-inf" if reduce == "max" else "inf")
        out = out.masked_fill(lonely.view(-1, *(1,) * (out.dim() - 1)), least)
    return out.squeeze(1) if x.dim() == 1 else out


def _ordered(structure: Structure, of_edges: bool, *, backwards: bool) -> Relation:
    if of_edges:
        return structure.incidence(backwards=backwards)
    return structure.backwards() if backwards else structure.plain()


def _matrix(x: Tensor) -> Tensor:
    return x.unsqueeze(1) if x.dim() == 1 else x
