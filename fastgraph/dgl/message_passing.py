"""The route of DGL's message passing, ``dgl.backend.pytorch.sparse``.

``update_all`` and its kind, ``dgl.ops`` and the layers of ``dgl.nn`` end in a few functions there,
which are looked up when they are called. ``GSpMM`` is replaced for what operators compute:

- sums of the features of sources, or of their products with one weight for each edge or for each
  edge and head, and what DGL makes of sums: means;
- maxima and minima of the features of sources.

The other functions run as they are, and are counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dgl.backend.pytorch.sparse as upstream
import torch
from dgl import is_libxsmm_enabled
from torch import Tensor

from fastgraph import ops
from fastgraph.dgl.conditions import call_refusal
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
    "GSDDMM": "dgl.gsddmm",
    "EdgeSoftmax": "dgl.edge_softmax",
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
    gspmm = upstream.GSpMM

    def apply(gidx: Any, op: str, reduce: str, lhs: Any, rhs: Any) -> Any:
        if not SWITCH.active:
            return gspmm.apply(gidx, op, reduce, lhs, rhs)
        planned = plan(gidx, op, reduce, lhs, rhs)
        has_route = (op, reduce) in _ROUTED and (op != "mul" or _num_heads(lhs, rhs) is not None)
        decided = decide(None, planned, has_route=has_route, name="dgl.gspmm")
        if decided and not isinstance(planned, str):
            return planned()
        return gspmm.apply(gidx, op, reduce, lhs, rhs)

    patches.replace(upstream, "GSpMM", _Replacement(gspmm, apply))
    for function, name in _OTHERS.items():
        found = getattr(upstream, function)
        patches.replace(upstream, function, _Replacement(found, _counting(found, name)))


def _counting(function: Any, name: str) -> Callable[..., Any]:
    reason = f"{name.removeprefix('dgl.')} of single edges has no operator"
    if function.__name__.endswith("_hetero"):
        reason = "several relations at once"

    def apply(*arguments: Any) -> Any:
        if SWITCH.active:
            decide(None, reason, has_route=False, name=name)
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
        return f"{reduce} of {op} has no operator"
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

    heads = 1 if weight is None else _num_heads(x, weight)
    assert heads is not None  # as was looked at

    def compute() -> Tensor:
        edges = (structure.plain() if weight is None else structure.numbered()).edges

        def summed(x: Tensor, weight: Tensor | None) -> Tensor:
            return ops.spmm(
                x,
                edges.index,
                weight,
                ptr=edges.ptr,
                num_out=num_out,
                transpose=is_reversed,
            )

        if heads == 1:
            out = summed(_matrix(x), None if weight is None else weight.reshape(-1))
            return out.squeeze(1) if x.dim() == 1 else out
        # The features of a head are copied on the way, which costs less than DGL's own loops.
        of_heads = x.reshape(len(x), heads, x.shape[-1]).unbind(1)
        weights = weight.reshape(len(weight), heads).unbind(1)
        out = torch.stack([summed(*of_head) for of_head in zip(of_heads, weights, strict=True)], 1)
        return out.view(num_out, *x.shape[1:])

    return compute


def _weight_refusal(structure: Structure, x: Tensor, weight: Any) -> str | None:
    reason = plain_tensor("the features of edges", weight)
    if reason is not None:
        return reason
    if _num_heads(x, weight) is None:
        sizes = f"{list(x.shape[1:])} and {list(weight.shape[1:])}"
        return f"products of features of shapes {sizes} have no operator"
    if len(weight) != len(structure.index):
        return f"features of {len(weight)} edges for a graph with {len(structure.index)}"
    if weight.dim() > x.dim() or weight.layout != torch.strided:
        return "features of edges in another form than those of nodes"
    if weight.dtype != x.dtype or weight.device != x.device:
        return "features of nodes and of edges with different dtypes or devices"
    return None


# Each head is a sum of its own, along the same edges: beyond these DGL is faster.
_MOST_HEADS, _LEAST_CHANNELS = 8, 8


def _num_heads(x: Any, weight: Any) -> int | None:
    """How many weights each edge has, one for each head; ``None`` for what DGL is left with."""
    if not isinstance(x, Tensor) or not isinstance(weight, Tensor) or weight.dim() == 0:
        return None
    heads = weight.shape[1:].numel()
    if heads == 1:
        return 1
    is_by_head = weight.shape[-1] == 1 and weight.shape[1:-1] == x.shape[1:-1]
    fits = is_by_head and weight.dim() == x.dim() and x.shape[-1] >= _LEAST_CHANNELS
    return heads if fits and 1 < heads <= _MOST_HEADS else None


def _extremum(structure: Structure, x: Tensor, reduce: str) -> Computation | str:
    reason = _refusal(structure, "segment_reduce", x, structure.num_src)
    if reason is not None:
        return reason

    def compute() -> Tensor:
        grouped = structure.backwards() if _last_wins(x) else structure.plain()
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


def _last_wins(x: Tensor) -> bool:
    """Whether the last of several extrema gets the gradient in DGL: where LIBXSMM computes."""
    if x.dtype == torch.float64 or not (x.requires_grad and torch.is_grad_enabled()):
        return False
    return bool(is_libxsmm_enabled())


def _matrix(x: Tensor) -> Tensor:
    return x.unsqueeze(1) if x.dim() == 1 else x
