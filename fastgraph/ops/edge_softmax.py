"""``edge_softmax``: the softmax of scores of edges over neighbourhoods."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastgraph.backends import reference
from fastgraph.graphs.edges import as_saved, caller_index_of
from fastgraph.graphs.graph import Graph
from fastgraph.ops.library import Arguments, Context, Gradient, define, needs_torch_operations
from fastgraph.ops.topology import check_index, check_values, flatten, topology, unflatten
from fastgraph.plugins.backend import device_type
from fastgraph.registry.registry import REGISTRY


def edge_softmax(
    score: Tensor,
    index: Tensor,
    *,
    ptr: Tensor | None = None,
    num_out: int,
    num_in: int | None = None,
    transpose: bool = False,
) -> Tensor:
    r"""The softmax of the scores of the edges that lead to a node.

    .. math::
        a_{ji} = \exp(s_{ji}) / \sum_{k : (k, i) \in E} \exp(s_{ki})

    for each head, relative to the largest score of a node, so that nothing overflows. The backward
    pass needs the result and no other tensor. Values and gradients are bitwise equal for any number
    of threads.

    Args:
        score: ``[E, *heads]``, float32, float64, bfloat16 or float16.
        index: int64 or int32 ``[2, E]``, sources in row 0, destinations in row 1; with ``ptr``, the
            sources ``[E]`` grouped by destination, or ``[2, E]`` with the number of each edge in
            row 1.
        ptr: int64 or int32 ``[nodes + 1]``, offsets of the groups in ``index``.
        num_out: number of nodes whose edges share a softmax: the destinations.
        num_in: number of the nodes at the other end; default: the same.
        transpose: reverse every edge: the edges of a source share a softmax.

    Returns:
        ``[E, *heads]``. Where all scores of a node are minus infinity, or one is infinity or NaN,
        all are NaN.

    Raises:
        ValueError: an argument has the wrong shape, dtype, device or value.
        IndexError: ``index`` points outside the nodes.
    """
    out: Tensor = EDGE_SOFTMAX(
        score, index, ptr, num_out, num_out if num_in is None else num_in, transpose
    )
    return out


def _check(name: str, values: Tensor, index: Tensor, ptr: Tensor | None) -> None:
    check_values(name, values)
    check_index(index, ptr, values)
    if values.dim() == 0 or values.shape[0] != index.shape[-1]:
        raise ValueError(
            f"{name} must be [E, *heads] for {index.shape[-1]} edges, "
            f"got shape {list(values.shape)}"
        )


def _graph(
    score: Tensor, index: Tensor, ptr: Tensor | None, num_out: int, num_in: int, transpose: bool
) -> Graph:
    _check("score", score, index, ptr)
    if num_in < 0 <= num_out:  # else num_out is named below
        raise ValueError(f"num_in must be an integer >= 0, got {num_in}")
    return topology(index, ptr, num_in, num_out, transpose)


def _of_heads(values: Tensor) -> Tensor:
    return values.contiguous().unsqueeze(1) if values.dim() == 1 else flatten(values)


def _forward(
    score: Tensor, index: Tensor, ptr: Tensor | None, num_out: int, num_in: int, transpose: bool
) -> Tensor:
    graph = _graph(score, index, ptr, num_out, num_in, transpose)
    kernel = REGISTRY.kernel("edge_softmax", device_type(score), score.dtype)
    return unflatten(kernel(graph, _of_heads(score), transpose), *score.shape)


def _fake(score: Tensor, index: Tensor, ptr: Tensor | None, *_: object) -> Tensor:
    _check("score", score, index, ptr)
    return score.new_empty(score.shape)


def _backward(
    out: Tensor,
    grad: Tensor,
    index: Tensor,
    ptr: Tensor | None,
    num_out: int,
    num_in: int,
    transpose: bool,
) -> Tensor:
    _check_gradient(out, grad, index, ptr)
    graph = _graph(out, index, ptr, num_out, num_in, transpose)
    kernel = REGISTRY.kernel("edge_softmax_backward", device_type(out), out.dtype)
    grad_score = kernel(graph, _of_heads(out), _of_heads(grad), transpose)
    return unflatten(grad_score, *out.shape)


def _check_gradient(out: Tensor, grad: Tensor, index: Tensor, ptr: Tensor | None) -> None:
    _check("out", out, index, ptr)
    if grad.shape != out.shape or grad.dtype != out.dtype:
        raise ValueError(
            f"grad must be like out, {list(out.shape)} of {out.dtype}, "
            f"got {list(grad.shape)} of {grad.dtype}"
        )


def _backward_fake(
    out: Tensor, grad: Tensor, index: Tensor, ptr: Tensor | None, *_: object
) -> Tensor:
    _check_gradient(out, grad, index, ptr)
    return out.new_empty(out.shape)


class _OfSoftmax(Context):
    options: list[Any]  # num_out, num_in and transpose


def _save(ctx: _OfSoftmax, arguments: Arguments, result: Tensor) -> None:
    _, index, ptr, *ctx.options = arguments
    ctx.save_for_backward(result, *as_saved(index, ptr), caller_index_of(index))


def _gradient(ctx: _OfSoftmax, grad: Tensor) -> tuple[Tensor | None, ...]:
    out, index, ptr, _ = ctx.saved_tensors
    if needs_torch_operations(grad):
        graph = _graph(out, index, ptr, *ctx.options)
        of_heads = (out.shape[0], out.shape[1:].numel())
        grad_score = reference.edge_softmax_backward(
            graph, out.reshape(of_heads), grad.reshape(of_heads), ctx.options[-1]
        ).reshape(out.shape)
    else:
        grad_score = EDGE_SOFTMAX_BACKWARD(out, grad, index, ptr, *ctx.options)
    return grad_score, None, None, None, None, None


EDGE_SOFTMAX_BACKWARD = define(
    "edge_softmax_backward(Tensor out, Tensor grad, Tensor index, Tensor? ptr, SymInt num_out, "
    "SymInt num_in, bool transpose) -> Tensor",
    _backward,
    _backward_fake,
)
EDGE_SOFTMAX = define(
    "edge_softmax(Tensor score, Tensor index, Tensor? ptr, SymInt num_out, SymInt num_in, "
    "bool transpose) -> Tensor",
    _forward,
    _fake,
    Gradient((0,), _save, _gradient),
)
