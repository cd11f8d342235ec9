"""Cache of aggregations of features that stay the same from step to step.

A first layer aggregates the data itself, and where a program trains on all nodes at once, at every
step the same. From the second time on the result is kept (:mod:`fastgraph.graphs.memo`), for as
long as the tensors live that it follows from, and is used while a checksum says that they hold what
they did. Reading all features once takes far less time than gathering them along the edges.

In compiled code an operator decides that at each call: compilers see no more than that features
have no gradient.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from fastgraph import ops, settings
from fastgraph.graphs.edges import Edges
from fastgraph.graphs.graph import normal_mode
from fastgraph.graphs.memo import AGGREGATION, MEMO, is_recording, tensor_key
from fastgraph.graphs.sights import Sights
from fastgraph.layers.aggregation import Aggregation
from fastgraph.machine import native
from fastgraph.machine.memory import as_it_is, new_rows
from fastgraph.ops.library import define
from fastgraph.ops.topology import check_operands

_PLAIN = (Tensor, torch.nn.Parameter)


class _Aggregated(Protocol):
    def __call__(self, aggregation: Aggregation, *, is_private: bool) -> Tensor: ...


ELSEWHERE: dict[type, _Aggregated] = {}
"""Replacements of :func:`aggregated` for subclasses of tensors that have no memory of their own."""

_LEAST_GATHERED = 1 << 18
"""Values. Fewer are gathered in the time in which it is found out that this was done before."""

# Edges of a node. To gather along one edge takes as long as the checksum or the copy of a node.
_LEAST_DEGREE = 2
_LEAST_DEGREE_OF_COPY = 4

_SIGHTS = Sights()


def aggregated(aggregation: Aggregation, *, is_private: bool) -> Tensor:
    """The result of ``aggregation.compute()``, computed only once where its features are constant.

    Args:
        aggregation: planned.
        is_private: true if the caller lets nobody have the result, and does not change it: then it
            may be what is kept. Otherwise it is a copy.
    """
    if is_decided_later(aggregation):
        x, edges = aggregation.x, aggregation.edges
        options = (aggregation.num_out, aggregation.reduce, aggregation.ties, edges.transpose)
        found: Tensor = _AGGREGATED(x, edges.index, edges.ptr, aggregation.weight, *options)
        return found
    if not may_be_constant(aggregation, is_private=is_private):
        return aggregation.compute()
    by_subclass = ELSEWHERE.get(type(aggregation.x))
    if by_subclass is not None:
        return by_subclass(aggregation, is_private=is_private)
    edges = aggregation.edges
    given = (aggregation.x, edges.index, edges.ptr, aggregation.weight)
    tensors = [tensor for tensor in given if tensor is not None]
    if any(tensor.is_inference() for tensor in tensors):  # they have no version
        return aggregation.compute()
    key = (
        AGGREGATION,
        *(None if tensor is None else tensor_key(tensor) for tensor in given),
        *(edges.transpose, edges.self_loops),
        *(aggregation.reduce, aggregation.num_out, aggregation.node_dim),
    )
    kept: Tensor | None = MEMO.get(key, *tensors)
    if kept is None:
        # Where other content has come into the tensors, it may come again.
        if MEMO.forget(key) or not _SIGHTS.is_enough(key, tensors):
            return aggregation.compute()
        with normal_mode(), torch.no_grad():  # what is kept must serve training as well
            kept = aggregation.compute()
        if not MEMO.has_room_for(kept.nbytes, kept.get_device()):
            return kept
        MEMO.put(key, kept, *tensors)
    return kept if is_private else new_rows(kept, kept.shape).copy_(kept)


def is_decided_later(aggregation: Aggregation) -> bool:
    """True while compilers record an aggregation that need not have a gradient."""
    x, weight = aggregation.x, aggregation.weight
    return (
        torch.compiler.is_compiling()
        and type(x) in _PLAIN
        and x.device.type == "cpu"
        and not x.requires_grad
        and not (weight is not None and weight.requires_grad)
        and aggregation.node_dim == 0
    )


def decided(
    x: Tensor,
    index: Tensor,
    ptr: Tensor | None,
    weight: Tensor | None,
    num_out: int,
    reduce: str,
    ties: str,
    transpose: bool,
) -> Aggregation:
    """The aggregation that operators for compiled code are called with."""
    return Aggregation(x, Edges(index, ptr, transpose), weight, reduce, num_out, 0, ties)


def _aggregated(*arguments: Any) -> Tensor:
    return aggregated(decided(*arguments), is_private=False)


def _aggregated_fake(
    x: Tensor, index: Tensor, ptr: Tensor | None, weight: Tensor | None, num_out: int, *_: object
) -> Tensor:
    check_operands(x, index, ptr, weight)
    return x.new_empty((num_out, *x.shape[1:]))


SCHEMA = (
    "Tensor x, Tensor index, Tensor? ptr, Tensor? weight, SymInt num_out, str reduce, str ties, "
    "bool transpose"
)
"""Of the arguments of :func:`decided`."""

_AGGREGATED = define(f"aggregated({SCHEMA}) -> Tensor", _aggregated, _aggregated_fake)


def summed(
    x: Tensor, edges: Edges, weight: Tensor | None, reduce: str, num_out: int, *, is_private: bool
) -> Tensor:
    """:func:`fastgraph.ops.spmm`, computed only once where its features are constant.

    Args:
        x: ``[sources, *channels]``.
        edges: along which they are gathered.
        weight: as for the operator.
        reduce: ``"sum"`` or ``"mean"``.
        num_out: the number of destinations.
        is_private: as for :func:`aggregated`.
    """
    planned = Aggregation(x, edges, weight, reduce, num_out, 0, "split")
    if type(x) in _PLAIN and may_be_constant(planned, is_private=is_private):
        return aggregated(planned, is_private=is_private)
    if weight is not None and weight.requires_grad:
        x = as_it_is(x)  # as what upstream keeps of it is a view
    index, ptr, transpose = edges.index, edges.ptr, edges.transpose
    return ops.spmm(x, index, weight, ptr=ptr, num_out=num_out, reduce=reduce, transpose=transpose)


def may_be_constant(aggregation: Aggregation, *, is_private: bool) -> bool:
    """True if it pays to look whether an aggregation was computed before, and nobody would notice.

    On a GPU it does not: whether content has changed is known there only after it was used.
    """
    x, weight, index = aggregation.x, aggregation.weight, aggregation.edges.index
    if x.requires_grad or torch.compiler.is_compiling():
        return False
    num_edges = aggregation.edges.num_edges
    num_rows = max(1, x.shape[aggregation.node_dim])
    degree = _LEAST_DEGREE if is_private else _LEAST_DEGREE_OF_COPY
    if num_edges < degree * num_rows or x.numel() // num_rows * num_edges < _LEAST_GATHERED:
        return False
    tensors = (x, index, weight)
    return (
        x.device.type == "cpu"
        and all(t is None or type(t) in _PLAIN or type(t) in ELSEWHERE for t in tensors)
        and not (weight is not None and weight.requires_grad)
        and not is_recording()
        and not torch.is_autocast_enabled("cpu")
        and settings.current().check_cache
        and native.is_available()
    )
