"""``segment_reduce``: maxima and minima over neighbourhoods, with upstream's treatment of ties."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgraph.backends import reference
from fastgraph.graphs.edges import as_saved, callers_of
from fastgraph.graphs.graph import Graph, beside
from fastgraph.ops.coo import NARROW, coo_kernel, is_checked
from fastgraph.ops.library import (
    Arguments,
    Context,
    Gradient,
    define,
    is_defined_by,
    needs_torch_operations,
)
from fastgraph.ops.topology import (
    check_choice,
    check_features,
    check_num_out,
    check_operands,
    flatten,
    topology,
    unflatten,
)
from fastgraph.plugins.backend import Kernel, device_type
from fastgraph.registry.registry import REGISTRY

REDUCTIONS = ("max", "min")
TIES = ("split", "winner")


def segment_reduce(
    x: Tensor,
    index: Tensor,
    weight: Tensor | None = None,
    *,
    ptr: Tensor | None = None,
    num_out: int | None = None,
    reduce: str = "max",
    transpose: bool = False,
    ties: str = "split",
) -> Tensor:
    r"""Element-wise maximum or minimum over neighbours: :math:`y_i = \max_{(j, i)} w_{ji} x_j`.

    Nodes without neighbours get 0, and a NaN among the neighbours gives NaN. No message is stored.
    As in torch, the gradient of a NaN is NaN for all neighbours if ties are split.

    Args:
        x: features ``[nodes, *channels]``, float32, float64, bfloat16 or float16.
        index: int64 or int32 ``[2, E]``, sources in row 0, destinations in row 1; with ``ptr``, the
            sources ``[E]`` grouped by destination, or ``[2, E]`` with the number of each edge in
            row 1.
        weight: one factor for each edge, ``[E]``, of ``x``'s dtype; not differentiable here.
        ptr: int64 or int32 ``[nodes + 1]``, offsets of the groups in ``index``.
        num_out: number of aggregating nodes; default: that of ``x``.
        reduce: ``"max"`` or ``"min"``.
        transpose: reverse every edge (PyG's ``flow="target_to_source"``).
        ties: who receives the gradient of an extremum that several neighbours attain.
            ``"split"`` is what ``torch.scatter_reduce`` does with the zero-initialised output that
            PyG gives it for ``edge_index`` input: an even split, in which the initial zero takes a
            share where the extremum is 0. ``"winner"`` is what ``torch.sparse.mm`` with a CSR
            matrix does: one edge takes all. It is the first of them, but the last of several NaNs,
            and nobody where all messages are the infinity that loses to every number.

    Returns:
        ``[num_out, *channels]``.

    Raises:
        ValueError: an argument has the wrong shape, dtype, device or value, or ``weight`` requires
            a gradient.
        IndexError: ``index`` points outside the nodes.
    """
    check_choice("reduce", reduce, REDUCTIONS)
    check_choice("ties", ties, TIES)
    if weight is not None and weight.requires_grad:
        raise ValueError("weight must not require a gradient in segment_reduce, but it does")
    num_out = x.shape[0] if num_out is None else num_out
    if not (x.requires_grad and torch.is_grad_enabled()):
        ties = "none"  # the record for the gradient costs time and memory
    out: Tensor
    out, _ = SEGMENT_REDUCE(x, index, ptr, weight, num_out, reduce, transpose, ties)
    return out


def _record_shape(x: Tensor, num_out: int, ties: str) -> tuple[int, ...]:
    return (0,) if ties == "none" else (num_out, *x.shape[1:])


def _segment_reduce(
    x: Tensor,
    index: Tensor,
    ptr: Tensor | None,
    weight: Tensor | None,
    num_out: int,
    reduce: str,
    transpose: bool,
    ties: str,
) -> tuple[Tensor, Tensor]:
    check_operands(x, index, ptr, weight)
    if (
        is_checked(index)
        and ties != "winner"
        and (kernel := coo_kernel(x, index, ptr, weight, num_out, NARROW, "segment_reduce"))
        is not None
    ):
        check_num_out(num_out)
        options = (num_out, reduce, transpose, True, ties)
        out, record = kernel(index, flatten(x), weight, *options)
    else:
        graph = _rows(index, ptr, weight, x.shape[0], num_out, transpose)
        kernel = REGISTRY.kernel("segment_reduce", device_type(x), x.dtype)
        out, record = kernel(graph, flatten(x), weight, reduce, transpose, ties)
    return (
        unflatten(out, num_out, *x.shape[1:]),
        unflatten(record, *_record_shape(x, num_out, ties)),
    )


def _rows(
    index: Tensor,
    ptr: Tensor | None,
    weight: Tensor | None,
    num_in: int,
    num_out: int,
    transpose: bool,
) -> Graph:
    """The graph, whose edges are numbered as kernels visit them where nobody else numbers any.

    So what is recorded of a row leads to what is close to each other in memory.
    """
    graph = topology(index, ptr, num_in, num_out, transpose)
    if weight is not None or transpose or graph.by_destination.edge_id is None:
        return graph
    return beside(graph, "renumbered", graph.renumbered)


def _segment_reduce_fake(
    x: Tensor,
    index: Tensor,
    ptr: Tensor | None,
    weight: Tensor | None,
    num_out: int,
    reduce: str,
    transpose: bool,
    ties: str,
) -> tuple[Tensor, Tensor]:
    check_operands(x, index, ptr, weight)
    record = x.new_empty(_record_shape(x, num_out, ties), dtype=torch.int32)
    return x.new_empty((num_out, *x.shape[1:])), record


def _segment_reduce_backward(
    grad: Tensor,
    x: Tensor,
    index: Tensor,
    ptr: Tensor | None,
    weight: Tensor | None,
    out: Tensor,
    record: Tensor,
    transpose: bool,
    ties: str,
) -> Tensor:
    check_operands(x, index, ptr, weight)
    check_features("grad", grad)
    kernel = REGISTRY.kernel("segment_reduce_backward", device_type(x), x.dtype)
    return _gradient(kernel, grad, x, index, ptr, weight, out, record, transpose, ties)


def _gradient(
    kernel: Kernel,
    grad: Tensor,
    x: Tensor,
    index: Tensor,
    ptr: Tensor | None,
    weight: Tensor | None,
    out: Tensor,
    record: Tensor,
    transpose: bool,
    ties: str,
) -> Tensor:
    graph = _rows(index, ptr, weight, x.shape[0], out.shape[0], transpose)
    matrices = flatten(grad), flatten(x), weight, flatten(out), flatten(record)
    grad_x: Tensor = kernel(graph, *matrices, transpose, ties)
    return unflatten(grad_x, *x.shape)


def _segment_reduce_backward_fake(grad: Tensor, x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


class _OfExtremum(Context):
    shapes: tuple[torch.Size, torch.Size]  # of the features and the extrema
    transpose: bool
    ties: str


def _save(ctx: _OfExtremum, arguments: Arguments, result: tuple[Tensor, Tensor]) -> None:
    x, index, ptr, weight, _, _, ctx.transpose, ctx.ties = arguments
    out, record = result
    ctx.mark_non_differentiable(record)
    ctx.shapes = x.shape, out.shape
    compared = _compared(x, out, record, ctx.ties)
    edges = as_saved(index, ptr)
    ctx.save_for_backward(*compared, *edges, weight, record, *callers_of(index))


def _compared(
    x: Tensor, out: Tensor, record: Tensor, ties: str
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """The features and extrema that the backward pass compares, where the record does not say all.

    Upstream keeps the rows that it has gathered, so that its callers may edit theirs. Here a record
    that names a winner for every value needs neither; looking for one that does not costs a
    fraction of the pass that made it. Where edges do tie, a copy of the features is kept, which has
    a row for each node where upstream's has one for each edge.
    """
    if is_defined_by(x) or type(record) is not Tensor or ties == "none":
        return x, out  # what is traced knows no edits
    if ties == "winner":
        return None, None
    kernel = REGISTRY.kernel("segment_reduce_backward", device_type(x), x.dtype)
    goes_by_records = getattr(kernel, "goes_by_records", False)
    if goes_by_records and (record.numel() == 0 or int(record.max()) <= 0):
        return None, None
    return x.clone(), out


def _backward(ctx: _OfExtremum, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    x, out, index, ptr, weight, record, *_callers = ctx.saved_tensors
    if x is None:  # kernels take their shapes, and `grad` may be a batch
        x = record.new_empty(ctx.shapes[0], dtype=grad.dtype)
        out = record.new_empty(ctx.shapes[1], dtype=grad.dtype)
    if ctx.ties == "none":
        raise RuntimeError(
            "segment_reduce ran with ties='none' and recorded nothing, so it has no gradient"
        )
    arguments = (grad, x, index, ptr, weight, out, record, ctx.transpose, ctx.ties)
    if needs_torch_operations(grad):
        grad_x = _gradient(reference.segment_reduce_backward, *arguments)
    else:
        grad_x = SEGMENT_REDUCE_BACKWARD(*arguments)
    return grad_x, None, None, None, None, None, None, None


SEGMENT_REDUCE = define(
    "segment_reduce(Tensor x, Tensor index, Tensor? ptr, Tensor? weight, SymInt num_out, "
    "str reduce, bool transpose, str ties) -> (Tensor, Tensor)",
    _segment_reduce,
    _segment_reduce_fake,
    Gradient((0,), _save, _backward),
)
SEGMENT_REDUCE_BACKWARD = define(
    "segment_reduce_backward(Tensor grad, Tensor x, Tensor index, Tensor? ptr, Tensor? weight, "
    "Tensor out, Tensor record, bool transpose, str ties) -> Tensor",
    _segment_reduce_backward,
    _segment_reduce_backward_fake,
)
