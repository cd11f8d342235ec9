"""The routes of DGL's message passing, ``dgl.backend.pytorch.sparse``.

``update_all`` and its kind, ``apply_edges``, ``dgl.ops`` and the layers of ``dgl.nn`` end in a few
functions there, which are looked up when they are called. Replaced for what operators compute are

- ``GSpMM``: sums of the features of sources, or of their products with one weight for each edge or
  for each edge and head, and what DGL makes of sums: means; maxima and minima of the features of
  sources;
- ``GSDDMM``: dot products of the features of both ends of edges;
- ``EdgeSoftmax``: the softmax over the edges of each destination, or source.

The other functions run as they are, and are counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dgl.backend.pytorch.sparse as upstream
import torch
from dgl.base import ALL, is_all
from torch import Tensor

from fastgraph import ops
from fastgraph.dgl.conditions import call_refusal, last_wins
from fastgraph.dgl.structure import (
    Structure,
    directed_structure_of,
    structure_of,
    without_edges,
)
from fastgraph.registry.registry import REGISTRY
from fastgraph.routing.conditions import plain_tensor
from fastgraph.routing.dispatch import Computation, decide
from fastgraph.routing.patching import Patches
from fastgraph.routing.switch import SWITCH

_OTHERS = {
    "GSpMM_hetero": "dgl.gspmm",
    "GSDDMM_hetero": "dgl.gsddmm",
    "EdgeSoftmax_hetero": "dgl.edge_softmax",
}
"""Functions without a route, by the name under which they are counted."""


class _Replacement:
    """In place of one of DGL's autograd functions, whose ``apply`` is all that DGL uses."""

    def __init__(self, function: Any, apply: Callable[..., Any]) -> None:
        self._function = function
        self.apply = apply

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)


def install(patches: Patches) -> None:
    """Replace the functions in DGL's module."""
    for function, name, route in (
        ("GSpMM", "dgl.gspmm", plan),
        ("GSDDMM", "dgl.gsddmm", plan_products),
        ("EdgeSoftmax", "dgl.edge_softmax", plan_softmax),
    ):
        found = getattr(upstream, function)
        patches.replace(upstream, function, _Replacement(found, _routed(found, name, route)))
    for function, name in _OTHERS.items():
        found = getattr(upstream, function)
        patches.replace(upstream, function, _Replacement(found, _counting(found, name)))


# For heads of fewer, what kernels do for each edge outweighs the channels.
_LEAST_CHANNELS = 8


class _NoOperator(str):
    """Why there is no route for a call, which ``strict`` does not take for an error."""


def _routed(function: Any, name: str, plan: Callable[..., Computation | str]) -> Callable[..., Any]:
    def apply(*arguments: Any) -> Any:
        if SWITCH.active:
            planned = plan(*arguments)
            has_route = not isinstance(planned, _NoOperator)
            decided = decide(None, planned, has_route=has_route, name=name)
            if decided and not isinstance(planned, str):
                return planned()
        return function.apply(*arguments)

    return apply


def _counting(function: Any, name: str) -> Callable[..., Any]:
    def apply(*arguments: Any) -> Any:
        if SWITCH.active:
            decide(None, "several relations at once", has_route=False, name=name)
        return function.apply(*arguments)

    return apply


_ROUTED = {("copy_lhs", "sum"), ("mul", "sum"), ("copy_lhs", "max"), ("copy_lhs", "min")}
"""What is combined how, and reduced how, in calls that have a route."""


def plan(gidx: Any, op: str, reduce: str, lhs: Any, rhs: Any) -> Computation | str:
    """A call of ``GSpMM``, or the reason to leave it to upstream.

    Args:
        gidx: DGL's index object of a graph with one relation.
        op: how features of sources and of edges are combined.
        reduce: ``"sum"``, ``"max"`` or ``"min"``.
        lhs: features of sources, ``[sources, *channels]`` or ``[sources]``.
        rhs: features of edges, ``[E, *channels]`` or ``[E]``.
    """
    if (op, reduce) not in _ROUTED:
        return _NoOperator(f"{reduce} of {op} has no operator")
    refusal = plain_tensor("the features of sources", lhs)
    if refusal is not None:
        return refusal
    if reduce == "sum":
        directed = directed_structure_of(gidx)
        if isinstance(directed, str):
            return directed
        return _sum(*directed, lhs, rhs if op == "mul" else None)
    structure = structure_of(gidx)
    if isinstance(structure, str):
        return structure
    return _extremum(structure, lhs, reduce)


def _refusal(structure: Structure, operator: str, x: Tensor, num_in: int) -> str | None:
    if x.layout != torch.strided:
        return f"features of layout {x.layout}"
    if x.dim() == 0 or len(x) != num_in:
        return f"features of shape {list(x.shape)} for {num_in} sources"
    return call_refusal(structure, x) or REGISTRY.refusal(operator, x.device.type, x.dtype)


def _sum(structure: Structure, is_reversed: bool, x: Tensor, weight: Any) -> Computation | str:
    num_in, num_out = structure.num_src, structure.num_dst
    if is_reversed:
        num_in, num_out = num_out, num_in
    reason = _refusal(structure, "spmm", x, num_in)
    if reason is None and weight is not None:
        reason = _weight_refusal(structure, x, weight)
    if reason is not None:
        return reason

    def compute() -> Tensor:
        edges = (structure.plain() if weight is None else structure.numbered()).edges
        out = ops.spmm(
            _matrix(x),
            edges.index,
            None if weight is None else weight.reshape(len(weight), weight.shape[1:].numel()),
            ptr=edges.ptr,
            num_out=num_out,
            transpose=is_reversed,
        )
        return out.squeeze(1) if x.dim() == 1 else out

    return compute


def _weight_refusal(structure: Structure, x: Tensor, weight: Any) -> str | None:
    reason = plain_tensor("the features of edges", weight)
    if reason is not None:
        return reason
    if weight.dim() == 0 or not _is_of_heads(weight, x):
        sizes = f"{list(x.shape[1:])} and {list(weight.shape[1:])}"
        return _NoOperator(f"products of features of shapes {sizes} have no operator")
    if len(weight) != len(structure.index):
        return f"features of {len(weight)} edges for a graph with {len(structure.index)}"
    if weight.dim() > x.dim() or weight.layout != torch.strided:
        return "features of edges in another form than those of nodes"
    if weight.dtype != x.dtype or weight.device != x.device:
        return "features of nodes and of edges with different dtypes or devices"
    return None


def _is_of_heads(weight: Tensor, x: Tensor) -> bool:
    """Whether each edge has one weight, or one for each head."""
    heads = weight.shape[1:].numel()
    is_by_head = weight.shape[-1:] == (1,) and weight.shape[1:-1] == x.shape[1:-1]
    return heads == 1 or (heads > 0 and is_by_head and x.shape[-1] >= _LEAST_CHANNELS)


def _extremum(structure: Structure, x: Tensor, reduce: str) -> Computation | str:
    reason = _refusal(structure, "segment_reduce", x, structure.num_src)
    if reason is not None:
        return reason

    def compute() -> Tensor:
        grouped = structure.backwards() if last_wins(x) else structure.plain()
        out = ops.segment_reduce(
            _matrix(x),
            grouped.edges.index,
            ptr=grouped.edges.ptr,
            num_out=structure.num_dst,
            reduce=reduce,
            ties="winner",
        )
        lonely = without_edges(grouped.graph)
        # DGL's callers make zeros of it; of a graph without any edge DGL does so itself.
        if lonely is not None and len(structure.index) > 0:
            least = float("-inf" if reduce == "max" else "inf")
            out = out.masked_fill(lonely.view(-1, *(1,) * (out.dim() - 1)), least)
        return out.squeeze(1) if x.dim() == 1 else out

    return compute


_SOURCE, _DESTINATION = ("u", "src"), ("v", "dst")


def plan_products(
    gidx: Any, op: str, lhs: Any, rhs: Any, lhs_target: str = "u", rhs_target: str = "v"
) -> Computation | str:
    """A call of ``GSDDMM``, or the reason to leave it to upstream.

    Args:
        gidx: DGL's index object of a graph with one relation.
        op: how features are combined.
        lhs: ``[nodes, *heads, channels]``.
        rhs: ``[nodes, *heads, channels]``.
        lhs_target: where ``lhs`` belongs: ``"u"``, ``"v"`` or ``"e"``.
        rhs_target: where ``rhs`` belongs.
    """
    is_forward = lhs_target in _SOURCE and rhs_target in _DESTINATION
    is_backward = lhs_target in _DESTINATION and rhs_target in _SOURCE
    if op != "dot" or not (is_forward or is_backward):
        return _NoOperator(f"{op} of {lhs_target} and {rhs_target} has no operator")
    if is_backward:
        lhs, rhs = rhs, lhs
    for name, x in (("sources", lhs), ("destinations", rhs)):
        refusal = plain_tensor(f"the features of {name}", x)
        if refusal is not None:
            return refusal
    directed = directed_structure_of(gidx)
    return directed if isinstance(directed, str) else _products(*directed, lhs, rhs)


def _products(structure: Structure, is_reversed: bool, x: Tensor, y: Tensor) -> Computation | str:
    num_in, num_out = structure.num_src, structure.num_dst
    if is_reversed:
        num_in, num_out = num_out, num_in
    if x.shape[1:] != y.shape[1:] or x.dim() < 2 or 0 in x.shape[1:-1]:
        sizes = f"{list(x.shape[1:])} and {list(y.shape[1:])}"
        return _NoOperator(f"dot products of features of shapes {sizes} have no operator")
    if x.shape[-1] < _LEAST_CHANNELS:
        return _NoOperator(f"dot products of {x.shape[-1]} channels have no operator")
    reason = _refusal(structure, "sddmm", x, num_in)
    if reason is not None:
        return reason
    if y.layout != torch.strided or len(y) != num_out:
        return f"features of shape {list(y.shape)} for {num_out} destinations"
    if y.dtype != x.dtype or y.device != x.device:
        return "features of both ends with different dtypes or devices"

    def compute() -> Tensor:
        edges = structure.numbered().edges
        by_head = (x.shape[1:-1].numel(), x.shape[-1])
        out = ops.sddmm(
            x.reshape(num_in, *by_head),
            y.reshape(num_out, *by_head),
            edges.index,
            ptr=edges.ptr,
            transpose=is_reversed,
        )
        return out.view(len(structure.index), *x.shape[1:-1], 1)

    return compute


def plan_softmax(gidx: Any, score: Any, eids: Any = ALL, norm_by: str = "dst") -> Computation | str:
    """A call of ``EdgeSoftmax``, or the reason to leave it to upstream.

    Args:
        gidx: DGL's index object of a graph with one relation.
        score: ``[E, *heads]``.
        eids: numbers of the edges that take part, or ``dgl.base.ALL``.
        norm_by: ``"dst"`` or ``"src"``, the nodes whose edges share a softmax.
    """
    if not is_all(eids):
        return _NoOperator("a softmax of some of the edges has no operator")
    refusal = plain_tensor("the scores of edges", score)
    if refusal is not None:
        return refusal
    directed = directed_structure_of(gidx)
    if isinstance(directed, str):
        return directed
    structure, is_reversed = directed
    num_edges = len(structure.index)
    if score.layout != torch.strided or score.dim() == 0 or len(score) != num_edges:
        return f"scores of shape {list(score.shape)} for {num_edges} edges"
    device_type = score.device.type
    reason = call_refusal(structure, score)
    reason = reason or REGISTRY.refusal("edge_softmax", device_type, score.dtype)
    if reason is not None:
        return reason
    transpose = is_reversed != (norm_by == "src")

    def compute() -> Tensor:
        edges = structure.numbered().edges
        sizes = (structure.num_src, structure.num_dst)
        num_in, num_out = reversed(sizes) if transpose else sizes
        return ops.edge_softmax(
            score,
            edges.index,
            ptr=edges.ptr,
            num_out=num_out,
            num_in=num_in,
            transpose=transpose,
        )

    return compute


def _matrix(x: Tensor) -> Tensor:
    return x.unsqueeze(1) if x.dim() == 1 else x
