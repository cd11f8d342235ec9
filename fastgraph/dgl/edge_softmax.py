"""``EdgeSoftmax``: the softmax over the edges of each destination, or source."""

from __future__ import annotations

from typing import Any

import torch
from dgl.base import ALL, is_all
from torch import Tensor

from fastgraph import ops
from fastgraph.dgl.conditions import NoOperator, call_refusal, is_layer_too_small
from fastgraph.dgl.sizes import SOFTMAX, is_too_small
from fastgraph.dgl.structure import directed_structure_of, sizes_of
from fastgraph.plugins.refusal import Refusal
from fastgraph.registry.registry import REGISTRY
from fastgraph.routing.dispatch import Computation
from fastgraph.routing.sizes import TOO_SMALL

_LEAST_OF_ROWS = 16
"""Edges for each node, on average, from which a single score for each edge gains something."""


def plan(gidx: Any, score: Any, eids: Any = ALL, norm_by: str = "dst") -> Computation | Refusal:
    """A call of ``EdgeSoftmax``, or the reason to leave it to upstream.

    Args:
        gidx: DGL's index object of a graph with one relation.
        score: ``[E, *heads]``.
        eids: numbers of the edges that take part, or ``dgl.base.ALL``.
        norm_by: ``"dst"`` or ``"src"``, the nodes whose edges share a softmax.

    Raises:
        ValueError: there are fewer scores than edges, beyond which DGL reads and writes.
    """
    check(gidx, score, eids)
    if not is_all(eids):
        return NoOperator("a softmax of some of the edges has no operator")
    if is_too_small(SOFTMAX, gidx, score) or is_layer_too_small():
        return TOO_SMALL
    # Before anything is read of the graph, which may be new.
    if isinstance(score, Tensor) and score.dim() > 0 and score.shape[1:].numel() == 1:
        num_rows = sizes_of(gidx)[0 if norm_by == "src" else 1]
        if gidx.num_edges(0) < _LEAST_OF_ROWS * num_rows:
            return NoOperator("a softmax of single scores over few edges has no operator")
    directed = directed_structure_of(gidx)
    if isinstance(directed, Refusal):
        return directed
    structure, is_reversed = directed
    refusal = structure.refusal("the scores of edges", score)
    if refusal is not None:
        return refusal
    num_edges = structure.num_edges
    if score.layout != torch.strided or score.dim() == 0 or len(score) != num_edges:
        return Refusal(f"scores of shape {list(score.shape)} for {num_edges} edges")
    transpose = is_reversed != (norm_by == "src")
    sizes = (structure.num_src, structure.num_dst)
    num_in, num_out = reversed(sizes) if transpose else sizes
    device_type = score.device.type
    refusal = call_refusal(structure.device, num_edges, score)
    refusal = refusal or REGISTRY.refusal("edge_softmax", device_type, score.dtype)
    if refusal is not None:
        return refusal

    def compute() -> Tensor:
        edges = structure.numbered().edges
        return ops.edge_softmax(
            score,
            edges.index,
            ptr=edges.ptr,
            num_out=num_out,
            num_in=num_in,
            transpose=transpose,
        )

    return compute


def check(gidx: Any, score: Any, eids: Any = ALL, norm_by: str = "dst") -> None:
    """Look at a call, whose arguments are those of :func:`plan`, with :func:`check_rows`."""
    if is_all(eids):
        check_rows(score, gidx.num_edges(0))
    else:
        check_rows(score, eids.numel() if isinstance(eids, Tensor) else 0)


def check_several(gidx: Any, eids: Any = ALL, norm_by: str = "dst", *scores: Any) -> None:
    """Look at a call of ``EdgeSoftmax_hetero``, which has no route, with :func:`check_rows`."""
    if is_all(eids):
        for relation, score in enumerate(scores):
            check_rows(score, gidx.num_edges(relation))


def check_rows(score: Any, num_edges: int) -> None:
    """Refuse scores beyond which DGL would read and write.

    Args:
        score: ``[E, *heads]``.
        num_edges: of how many edges.

    Raises:
        ValueError: there are fewer.
    """
    if isinstance(score, Tensor) and (score.dim() == 0 or len(score) < num_edges):
        raise ValueError(
            f"logits must have a row for each of {num_edges} edges, got shape {list(score.shape)}"
        )
