"""``spmm``: weighted sums and means over neighbourhoods, and ``sddmm``, its gradient for weights.

Each is the gradient of the other: that of ``spmm`` for its features is ``spmm`` on the transposed
graph, for its weights ``sddmm``; both gradients of ``sddmm`` are ``spmm``. So derivatives of any
order run through the same kernels.
"""

from __future__ import annotations

from torch import Size, Tensor

from fastgraph.graphs.edges import as_saved, caller_index_of
from fastgraph.ops.coo import coo_kernel, is_checked, most_channels
from fastgraph.ops.library import Arguments, Context, Gradient, define, wanted_gradients
from fastgraph.ops.topology import (
    check_choice,
    check_features,
    check_heads_share,
    check_num_out,
    check_operands,
    flatten,
    topology,
    unflatten,
)
from fastgraph.plugins.backend import device_type
from fastgraph.registry.registry import REGISTRY

REDUCTIONS = ("sum", "mean")

# "mean" divides by the degree of the aggregating node, "mean_adjoint" by that of the gathered one,
# which is what the transposed graph needs in the gradient of a mean.
_ADJOINT = {"sum": "sum", "mean": "mean_adjoint", "mean_adjoint": "mean"}


def spmm(
    x: Tensor,
    index: Tensor,
    weight: Tensor | None = None,
    *,
    ptr: Tensor | None = None,
    num_out: int | None = None,
    reduce: str = "sum",
    transpose: bool = False,
) -> Tensor:
    r"""Aggregate neighbour features: :math:`y_i = \sum_{(j, i) \in E} w_{ji} x_j`, or their mean.

    No message is stored; accumulation is in float32, or float64 for float64 features. Values and
    gradients are bitwise equal for any number of threads. NaN and infinity spread as in a sum of
    all messages: a weight of 0 times an infinite feature is NaN. In float16 the sum of a mean may
    overflow in PyG, which rounds it; here it does not.

    Args:
        x: features ``[nodes, *channels]``, float32, float64, bfloat16 or float16.
        index: int64 or int32 ``[2, E]``, sources in row 0, destinations in row 1; with ``ptr``, the
            sources ``[E]`` grouped by destination, or ``[2, E]`` with the number of each edge in
            row 1.
        weight: one weight for each edge, ``[E]``, of ``x``'s dtype, or for each edge and head,
            ``[E, heads]``, for features ``[nodes, heads, *channels]``. With ``"mean"`` the
            weighted sum is divided by the number of edges, not by the sum of weights.
        ptr: int64 or int32 ``[nodes + 1]``, offsets of the groups in ``index``.
        num_out: number of aggregating nodes; default: that of ``x``.
        reduce: ``"sum"`` or ``"mean"``.
        transpose: reverse every edge (PyG's ``flow="target_to_source"``).

    Returns:
        ``[num_out, *channels]``; zero for nodes without neighbours.

    Raises:
        ValueError: an argument has the wrong shape, dtype, device or value.
        IndexError: ``index`` points outside the nodes.
    """
    check_choice("reduce", reduce, REDUCTIONS)
    num_out = x.shape[0] if num_out is None else num_out
    out: Tensor = SPMM(x, index, ptr, weight, num_out, reduce, transpose)
    return out


def _spmm(
    x: Tensor,
    index: Tensor,
    ptr: Tensor | None,
    weight: Tensor | None,
    num_out: int,
    reduce: str,
    transpose: bool,
) -> Tensor:
    check_operands(x, index, ptr, weight, heads=True)
    out: Tensor
    most = most_channels(index, transpose=transpose)
    if (transpose or weight is not None or is_checked(index)) and (
        kernel := coo_kernel(x, index, ptr, weight, num_out, most)
    ) is not None:
        check_num_out(num_out)
        options = (num_out, reduce, transpose, is_checked(index))
        out = kernel(index, flatten(x), weight, *options)
    else:
        graph = topology(index, ptr, x.shape[0], num_out, transpose)
        kernel = REGISTRY.kernel("spmm", device_type(x), x.dtype)
        out = kernel(graph, flatten(x), weight, reduce, transpose)
    return out if x.dim() == 2 else unflatten(out, num_out, *x.shape[1:])


def _spmm_fake(
    x: Tensor,
    index: Tensor,
    ptr: Tensor | None,
    weight: Tensor | None,
    num_out: int,
    *_: object,
) -> Tensor:
    check_operands(x, index, ptr, weight, heads=True)
    return x.new_empty((num_out, *x.shape[1:]))


def _check_pair(grad: Tensor, x: Tensor, index: Tensor, ptr: Tensor | None, heads: int) -> None:
    check_operands(x, index, ptr, None)
    check_features("the other features", grad)
    if grad.shape[1:] != x.shape[1:] or grad.dtype != x.dtype or grad.device != x.device:
        raise ValueError(
            f"features of both ends must have the same channels, dtype and device, "
            f"got {list(x.shape[1:])} of {x.dtype} on {x.device} "
            f"and {list(grad.shape[1:])} of {grad.dtype} on {grad.device}"
        )
    check_heads_share("heads", heads, x)


def _sddmm(
    grad: Tensor,
    x: Tensor,
    index: Tensor,
    ptr: Tensor | None,
    heads: int,
    reduce: str,
    transpose: bool,
) -> Tensor:
    _check_pair(grad, x, index, ptr, heads)
    graph = topology(index, ptr, x.shape[0], grad.shape[0], transpose)
    kernel = REGISTRY.kernel("sddmm", device_type(x), x.dtype)
    out: Tensor = kernel(graph, flatten(grad), flatten(x), heads, reduce, transpose)
    return out


def _sddmm_fake(
    grad: Tensor, x: Tensor, index: Tensor, ptr: Tensor | None, heads: int, *_: object
) -> Tensor:
    _check_pair(grad, x, index, ptr, heads)
    return x.new_empty(index.shape[-1], heads)


class _OfSum(Context):
    reduce: str
    transpose: bool
    num_in: int
    weight_shape: Size | None


def _spmm_save(ctx: _OfSum, arguments: Arguments, result: Tensor) -> None:
    x, index, ptr, weight, _, ctx.reduce, ctx.transpose = arguments
    ctx.num_in = x.shape[0]
    ctx.weight_shape = None if weight is None else weight.shape
    needs_x = weight is not None and weight.requires_grad
    if needs_x and x.is_inference():
        x = x.clone()  # autograd refuses to save inference tensors; the copy is none
    # Only what a gradient needs: users may edit all else in place before the backward pass.
    edges = as_saved(index, ptr)
    needed = x if needs_x else None, *edges, weight if x.requires_grad else None
    ctx.save_for_backward(*needed, caller_index_of(index))


def _spmm_backward(ctx: _OfSum, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, index, ptr, weight, _ = ctx.saved_tensors
    grad_x = grad_weight = None
    wanted = wanted_gradients(ctx)
    if wanted[0]:
        grad_x = SPMM(grad, index, ptr, weight, ctx.num_in, _ADJOINT[ctx.reduce], not ctx.transpose)
    if wanted[3]:
        assert ctx.weight_shape is not None
        heads = 1 if len(ctx.weight_shape) == 1 else ctx.weight_shape[1]
        grad_weight = SDDMM(grad, x, index, ptr, heads, ctx.reduce, ctx.transpose)
        grad_weight = grad_weight.view(ctx.weight_shape)
    return grad_x, None, None, grad_weight, None, None, None


class _OfProducts(Context):
    reduce: str
    transpose: bool
    num_in: int
    num_out: int


def _sddmm_save(ctx: _OfProducts, arguments: Arguments, result: Tensor) -> None:
    grad, x, index, ptr, _, ctx.reduce, ctx.transpose = arguments
    ctx.num_out, ctx.num_in = grad.shape[0], x.shape[0]
    needed = grad if x.requires_grad else None, x if grad.requires_grad else None
    ctx.save_for_backward(*needed, *as_saved(index, ptr))


def _sddmm_backward(ctx: _OfProducts, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    grad, x, index, ptr = ctx.saved_tensors
    grad_grad = grad_x = None
    wants_grad, wants_x, *_ = wanted_gradients(ctx)
    if wants_grad:
        grad_grad = SPMM(x, index, ptr, grad_out, ctx.num_out, ctx.reduce, ctx.transpose)
    if wants_x:
        grad_x = SPMM(
            grad, index, ptr, grad_out, ctx.num_in, _ADJOINT[ctx.reduce], not ctx.transpose
        )
    return grad_grad, grad_x, None, None, None, None, None


SPMM = define(
    "spmm(Tensor x, Tensor index, Tensor? ptr, Tensor? weight, SymInt num_out, str reduce, "
    "bool transpose) -> Tensor",
    _spmm,
    _spmm_fake,
    Gradient((0, 3), _spmm_save, _spmm_backward),
)
SDDMM = define(
    "sddmm(Tensor grad, Tensor x, Tensor index, Tensor? ptr, SymInt heads, str reduce, "
    "bool transpose) -> Tensor",
    _sddmm,
    _sddmm_fake,
    Gradient((0, 1), _sddmm_save, _sddmm_backward),
)
