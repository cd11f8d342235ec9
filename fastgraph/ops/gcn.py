"""``gcn``: sums over neighbourhoods with the symmetric normalisation of graph convolutions."""

from __future__ import annotations

from torch import Tensor

from fastgraph.graphs.edges import as_saved
from fastgraph.graphs.memo import is_recording, remembered
from fastgraph.graphs.normalisation import WeightedGraph, normalised_graph
from fastgraph.ops.library import Arguments, Context, Gradient, define, is_defined_by
from fastgraph.ops.spmm import spmm
from fastgraph.ops.topology import check_operands, flatten, unflatten
from fastgraph.plugins.backend import device_type
from fastgraph.registry.registry import REGISTRY


def gcn(
    x: Tensor,
    index: Tensor,
    weight: Tensor | None = None,
    *,
    loop_weight: float = 1.0,
    transpose: bool = False,
) -> Tensor:
    r"""Aggregate neighbour features: :math:`y = \hat D^{-1/2} \hat A \hat D^{-1/2} x`.

    :math:`\hat A` is the adjacency matrix, in which every node has a self-loop, and :math:`\hat D`
    the diagonal matrix of its row sums (Kipf and Welling, "Semi-supervised classification with
    graph convolutional networks", ICLR 2017, equation 2). The graph and its normalisation are
    remembered for as long as ``index`` and ``weight`` live unchanged.

    NaN and infinity spread as in :func:`spmm`. An infinite degree scales by 0, a negative one by
    NaN; so does -infinity, of which torch's power is 0 in float16 alone.

    Args:
        x: features ``[nodes, *channels]``, float32, float64, bfloat16 or float16.
        index: int64 or int32 ``[2, E]``, sources in row 0, destinations in row 1.
        weight: one weight for each edge, ``[E]``, of ``x``'s dtype, which gets no gradient.
        loop_weight: of the self-loops of nodes that have none; where ``index`` has one, the last
            one's weight is kept. 0: add none.
        transpose: reverse every edge (PyG's ``flow="target_to_source"``).

    Returns:
        Of the shape of ``x``; zero for nodes without neighbours.

    Raises:
        ValueError: an argument has the wrong shape, dtype, device or value, or ``weight`` requires
            a gradient.
        IndexError: ``index`` points outside the nodes.
    """
    if weight is not None and weight.requires_grad:
        raise ValueError("weight must not require a gradient")
    if is_recording() or is_defined_by(x, index, weight):
        out: Tensor = GCN(x, index, weight, float(loop_weight), transpose, False)
        return out
    found = normalised(x, index, weight, float(loop_weight), transpose)
    return sum_normalised(x, found, transpose=transpose)


def sum_normalised(x: Tensor, normalised: WeightedGraph, *, transpose: bool) -> Tensor:
    """:func:`gcn` of a graph that is normalised already, see :func:`normalised`."""
    # The gradient goes by tensors of our own, as upstream's does: a caller may edit theirs, or have
    # made them in inference mode.
    graph, weight = normalised
    rows = graph.by_destination
    return spmm(x, rows.col, weight, ptr=rows.ptr, transpose=transpose)


def normalised(
    x: Tensor, index: Tensor, weight: Tensor | None, loop_weight: float, transpose: bool
) -> WeightedGraph:
    """The graph that :func:`gcn` aggregates along, with its weights, remembered.

    Arguments and errors are those of :func:`gcn`; of ``x``, shape and dtype matter.
    """
    check_operands(x, index, None, weight)
    options = (x.shape[0], loop_weight, transpose, x.dtype)
    return remembered("normalised", normalised_graph, index, weight, *options)


def _gcn(
    x: Tensor,
    index: Tensor,
    weight: Tensor | None,
    loop_weight: float,
    transpose: bool,
    adjoint: bool,
) -> Tensor:
    graph, weight = normalised(x, index, weight, loop_weight, transpose)
    kernel = REGISTRY.kernel("spmm", device_type(x), x.dtype)
    out: Tensor = kernel(graph, flatten(x), weight, "sum", transpose is not adjoint)
    return unflatten(out, *x.shape)


def _gcn_fake(x: Tensor, index: Tensor, weight: Tensor | None, *_: object) -> Tensor:
    check_operands(x, index, None, weight)
    return x.new_empty(x.shape)


class _OfGcn(Context):
    loop_weight: float
    transpose: bool
    adjoint: bool


def _save(ctx: _OfGcn, arguments: Arguments, result: Tensor) -> None:
    _, index, weight, ctx.loop_weight, ctx.transpose, ctx.adjoint = arguments
    index, _ = as_saved(index, None)
    ctx.save_for_backward(index, weight)


def _backward(ctx: _OfGcn, grad: Tensor) -> tuple[Tensor | None, ...]:
    grad_x = GCN(grad, *ctx.saved_tensors, ctx.loop_weight, ctx.transpose, not ctx.adjoint)
    return grad_x, None, None, None, None, None


# With `adjoint` the features travel against the edges, whose weights stay what they are.
GCN = define(
    "gcn(Tensor x, Tensor index, Tensor? weight, float loop_weight, bool transpose, bool adjoint)"
    " -> Tensor",
    _gcn,
    _gcn_fake,
    Gradient((0,), _save, _backward),
)
