"""``dense_attention``: all pairs of nodes of each graph of a batch, without padding."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgraph.backends import reference
from fastgraph.ops.heads import check_heads, dropout_seed, logsum_gradient, seed_number
from fastgraph.ops.library import Arguments, Context, Gradient, define, needs_torch_operations
from fastgraph.ops.topology import check_values
from fastgraph.plugins.backend import accumulator, device_type
from fastgraph.registry.registry import REGISTRY


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ptr: Tensor,
    *,
    key_ptr: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Attention of each node to all nodes of its graph, in a batch of graphs of any sizes.

    :math:`y_i = \sum_j \alpha_{ij} v_j`, where :math:`\alpha_i` is the softmax of :math:`scale
    \cdot q_i^\top k_j` over all nodes j of the graph of i, for each head on its own (Vaswani et
    al., "Attention is all you need", NIPS 2017, equation 1). Numbers are those of
    :func:`attention` on complete graphs with self-loops, without the pairs in memory: scores are
    computed in blocks that stay in caches, and once more in the backward pass (Dao et al.,
    "FlashAttention", NeurIPS 2022). Values and gradients are bitwise equal for any number of
    threads.

    On the CPU what is stored grows with nodes: the result, two numbers for each node and head, and
    while gradients are computed, up to eight copies of the query of graphs of 512 nodes and more.
    The backward pass needs the result, too, which may not be edited before. Where no backend has a
    kernel, torch's operations compute graph by graph, and store all pairs.

    Dropout is that of :func:`attention`: a weight is kept if the first word of Philox4x32-10 for
    the key ``seed`` and the counter ``(pair, head, 0, 0)`` is at least ``dropout * 2^32``. Pairs
    are numbered graph by graph, query by query, key by key; of a number beyond 32 bits the upper
    half is the third counter.

    Args:
        query: ``[nodes, heads, channels]``, float32, float64, bfloat16 or float16.
        key: of the same shape, or with ``key_ptr`` ``[keys, heads, channels]``.
        value: like ``key``.
        ptr: int64 or int32 ``[graphs + 1]``: graph g has the nodes ``ptr[g]`` to
            ``ptr[g + 1] - 1``. There may be graphs without nodes.
        key_ptr: the same for keys and values, if these are of other nodes than queries; a query in
            a graph without keys gets 0.
        scale: default: ``1 / sqrt(channels)``.
        dropout: probability with which a pair's weight is set to zero; the others are scaled up.
        seed: one int64 on the CPU that determines which weights are dropped; default: drawn from
            torch's default generator.

    Returns:
        ``(out, stats)``, both differentiable: the output, like ``query``, and what is known of each
        softmax, ``[nodes, heads, 2]``, by which :func:`merge` joins outputs.

    Raises:
        ValueError: an argument has the wrong shape, dtype, device or value.
        TypeError: ``seed`` is not a tensor.
    """
    if scale is None:
        scale = max(query.shape[-1], 1) ** -0.5
    seed = dropout_seed(dropout, seed, query, key, value)
    out, stats = DENSE_ATTENTION(query, key, value, ptr, key_ptr, seed, scale, dropout)
    return out, stats


def _check(query: Tensor, key: Tensor, value: Tensor, ptr: Tensor, key_ptr: Tensor | None) -> None:
    check_values("query", query)
    check_heads("query", query, ("nodes", "heads", "channels"), query)
    keys = query.shape[0] if key_ptr is None else "keys"
    check_heads("key", key, (keys, *query.shape[1:]), query)
    check_heads("value", value, list(key.shape), query)
    _check_offsets("ptr", ptr, query)
    if key_ptr is not None:
        _check_offsets("key_ptr", key_ptr, query)
        if key_ptr.shape != ptr.shape:
            raise ValueError(
                f"key_ptr must have as many offsets as ptr, {ptr.shape[0]}, got {key_ptr.shape[0]}"
            )


def _check_offsets(name: str, ptr: Tensor, query: Tensor) -> None:
    if ptr.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{name} must be int64 or int32, got {ptr.dtype}")
    if ptr.layout is not torch.strided or ptr.dim() != 1 or ptr.shape[0] < 1:
        raise ValueError(
            f"{name} must be dense [graphs + 1], got shape {list(ptr.shape)}, layout {ptr.layout}"
        )
    if ptr.device != query.device:
        raise ValueError(f"{name} must be on query's device {query.device}, got {ptr.device}")


def _offsets(ptr: Tensor, key_ptr: Tensor | None) -> tuple[Tensor, Tensor]:
    """Offsets of queries and of keys, as kernels take them."""
    of_queries = ptr.to(torch.int64).contiguous()
    return of_queries, of_queries if key_ptr is None else key_ptr.to(torch.int64).contiguous()


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ptr: Tensor,
    key_ptr: Tensor | None,
    seed: Tensor | None,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    _check(query, key, value, ptr, key_ptr)
    kernel = REGISTRY.kernel("dense_attention", device_type(query), query.dtype)
    inputs = (query.contiguous(), key.contiguous(), value.contiguous())
    return kernel(*inputs, *_offsets(ptr, key_ptr), scale, dropout, seed_number(seed))  # type: ignore[no-any-return]


def _fake(
    query: Tensor, key: Tensor, value: Tensor, ptr: Tensor, key_ptr: Tensor | None, *_: object
) -> tuple[Tensor, Tensor]:
    _check(query, key, value, ptr, key_ptr)
    stats = query.new_empty((*query.shape[:2], 2), dtype=accumulator(query.dtype))
    return query.new_empty(query.shape), stats


def _backward(
    grad: Tensor,
    grad_logsum: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ptr: Tensor,
    key_ptr: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    stats: Tensor,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    _check(query, key, value, ptr, key_ptr)
    check_heads("grad", grad, list(query.shape), query)
    check_heads("out", out, list(query.shape), query)
    kernel = REGISTRY.kernel("dense_attention_backward", device_type(query), query.dtype)
    if grad_logsum is not None:
        grad_logsum = grad_logsum.contiguous()
    inputs = (query.contiguous(), key.contiguous(), value.contiguous())
    known = (out.contiguous(), stats.contiguous())
    options = (scale, dropout, seed_number(seed))
    offsets = _offsets(ptr, key_ptr)
    return kernel(grad.contiguous(), grad_logsum, *inputs, *offsets, *known, *options)  # type: ignore[no-any-return]


def _backward_fake(
    grad: Tensor, grad_logsum: Tensor | None, query: Tensor, key: Tensor, value: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


class _OfDense(Context):
    options: tuple[float, float]  # scale and dropout


def _save(ctx: _OfDense, arguments: Arguments, result: tuple[Tensor, Tensor]) -> None:
    *tensors, scale, dropout = arguments
    ctx.options = scale, dropout
    ctx.save_for_backward(*tensors, *result)


def _gradient(
    ctx: _OfDense, grad: Tensor | None, grad_stats: Tensor | None
) -> tuple[Tensor | None, ...]:
    query, key, value, ptr, key_ptr, seed, out, stats = ctx.saved_tensors
    if grad is None:  # only the statistics were used
        grad = torch.zeros_like(query)
    grads = (grad, logsum_gradient(grad_stats, stats))
    if needs_torch_operations(*grads):
        found = reference.dense_attention_backward(
            *grads,
            *(query, key, value),
            *_offsets(ptr, key_ptr),
            *(out, stats),
            *ctx.options,
            seed_number(seed),
        )
    else:
        tensors = (query, key, value, ptr, key_ptr, seed, out, stats)
        found = DENSE_ATTENTION_BACKWARD(*grads, *tensors, *ctx.options)
    return *found, None, None, None, None, None


DENSE_ATTENTION_BACKWARD = define(
    "dense_attention_backward(Tensor grad, Tensor? grad_logsum, Tensor query, Tensor key, "
    "Tensor value, Tensor ptr, Tensor? key_ptr, Tensor? seed, Tensor out, Tensor stats, "
    "float scale, float dropout) -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
DENSE_ATTENTION = define(
    "dense_attention(Tensor query, Tensor key, Tensor value, Tensor ptr, Tensor? key_ptr, "
    "Tensor? seed, float scale, float dropout) -> (Tensor, Tensor)",
    _forward,
    _fake,
    Gradient((0, 1, 2), _save, _gradient),
)
