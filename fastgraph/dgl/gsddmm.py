"""``GSDDMM``: a function of the features at both ends of each edge.

Replaced for dot products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastgraph import ops
from fastgraph.dgl.conditions import LEAST_CHANNELS, NoOperator, features_refusal
from fastgraph.dgl.sizes import PRODUCT, is_too_small
from fastgraph.dgl.structure import Structure, directed_structure_of
from fastgraph.plugins.refusal import Refusal
from fastgraph.routing.dispatch import Computation
from fastgraph.routing.sizes import TOO_SMALL

# Channels of each head, and of all, where no gradient is needed: DGL is slow in its backward pass.
_LEAST_IN_INFERENCE, _LEAST_OF_ALL_HEADS = 16, 32

_SOURCE, _DESTINATION = ("u", "src"), ("v", "dst")


def plan(
    gidx: Any, op: str, lhs: Any, rhs: Any, lhs_target: str = "u", rhs_target: str = "v"
) -> Computation | Refusal:
    """A call of ``GSDDMM``, or the reason to leave it to upstream.

    Args:
        gidx: DGL's index object of a graph with one relation.
        op: how features are combined.
        lhs: ``[nodes, *heads, channels]``.
        rhs: ``[nodes, *heads, channels]``.
        lhs_target: where ``lhs`` belongs: ``"u"``, ``"v"`` or ``"e"``.
        rhs_target: where ``rhs`` belongs.

    Raises:
        ValueError: features have no rows where the graph has nodes or edges, which DGL takes for
            features that are not there, and reads.
    """
    check(gidx, op, lhs, rhs, lhs_target, rhs_target)
    if type(lhs_target) is not str or type(rhs_target) is not str:
        return NoOperator("targets that are no names")  # of which upstream has an error
    is_forward = lhs_target in _SOURCE and rhs_target in _DESTINATION
    is_backward = lhs_target in _DESTINATION and rhs_target in _SOURCE
    if op != "dot" or not (is_forward or is_backward):
        return NoOperator(f"{op} of {lhs_target} and {rhs_target} has no operator")
    if is_backward:
        lhs, rhs = rhs, lhs
    if is_too_small(PRODUCT, gidx, lhs, lhs.shape[1:].numel()):
        return TOO_SMALL
    refusal = _shapes_refusal(lhs, rhs)
    if refusal is not None:
        return refusal
    directed = directed_structure_of(gidx)
    if isinstance(directed, Refusal):
        return directed
    for name, x in (("sources", lhs), ("destinations", rhs)):
        refusal = directed[0].refusal(f"the features of {name}", x)
        if refusal is not None:
            return refusal
    return _products(*directed, lhs, rhs)


def check(
    gidx: Any, op: str, lhs: Any, rhs: Any, lhs_target: str = "u", rhs_target: str = "v"
) -> None:
    """Refuse features that DGL would read beyond; the arguments are those of :func:`plan`.

    Raises:
        ValueError: as there.
    """
    if op != "copy_rhs" and _may_be_absent(lhs):
        _check_rows(gidx, lhs, lhs_target)
    if op != "copy_lhs" and _may_be_absent(rhs):
        _check_rows(gidx, rhs, rhs_target)


def _may_be_absent(x: Any) -> bool:
    return isinstance(x, Tensor) and x.numel() == 0


def _check_rows(gidx: Any, x: Tensor, target: Any) -> None:
    if x.shape[0] > 0 or gidx.num_edges(0) == 0:
        return
    if target not in (*_SOURCE, *_DESTINATION):
        kind, rows = "edges", gidx.num_edges(0)
    else:
        source, destination = gidx.metagraph.find_edge(0)
        kind, rows = "nodes", gidx.num_nodes(source if target in _SOURCE else destination)
    shape = list(x.shape)
    raise ValueError(
        f"features at {target!r} must have a row for each of {rows} {kind}, got shape {shape}"
    )


def _shapes_refusal(x: Tensor, y: Tensor) -> Refusal | None:
    """Why features have no operator, whatever the graph."""
    if x.shape[1:] != y.shape[1:] or x.dim() < 2 or 0 in x.shape[1:-1]:
        sizes = f"{list(x.shape[1:])} and {list(y.shape[1:])}"
        return NoOperator(f"dot products of features of shapes {sizes} have no operator")
    if not _are_wide(x, y):
        return NoOperator(f"dot products of features {list(x.shape[1:])} have no operator")
    return None


def _products(
    structure: Structure, is_reversed: bool, x: Tensor, y: Tensor
) -> Computation | Refusal:
    num_in, num_out = structure.num_src, structure.num_dst
    if is_reversed:
        num_in, num_out = num_out, num_in
    refusal = features_refusal(structure, "sddmm", x, num_in)
    if refusal is not None:
        return refusal
    if y.layout != torch.strided or len(y) != num_out:
        return Refusal(f"features of shape {list(y.shape)} for {num_out} destinations")
    if y.dtype != x.dtype or y.device != x.device:
        return Refusal("features of both ends with different dtypes or devices")

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
        return out.view(structure.num_edges, *x.shape[1:-1], 1)

    return compute


def _are_wide(x: Tensor, y: Tensor) -> bool:
    """True if there are enough channels for our kernels to be faster than DGL's."""
    if torch.is_grad_enabled() and (x.requires_grad or y.requires_grad):
        return x.shape[-1] >= LEAST_CHANNELS
    is_wide = x.shape[1:].numel() >= _LEAST_OF_ALL_HEADS
    return is_wide and x.shape[-1] >= _LEAST_IN_INFERENCE
