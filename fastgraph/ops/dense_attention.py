"""``dense_attention``: all pairs of nodes of each graph of a batch, without padding."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgraph.backends import reference
from fastgraph.machine.memory import contiguous
from fastgraph.ops.heads import check_heads, dropout_seed, logsum_gradient, seed_number
from fastgraph.ops.library import (
    Arguments,
    Context,
    Gradient,
    define,
    needs_torch_operations,
    wanted_gradients,
)
from fastgraph.ops.score_bias import check_entry_types, refuse_types_alone
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
    bias: Tensor | None = None,
    pair_type: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Attention of each node to all nodes of its graph, in a batch of graphs of any sizes.

    :math:`y_i = \sum_j \alpha_{ij} v_j`, where :math:`\alpha_i` is the softmax of :math:`scale
    \cdot q_i^\top k_j + b_{ij}` over all nodes j of the graph of i, for each head on its own
    (Vaswani et al., "Attention is all you need", NIPS 2017, equation 1; with a bias by distances
    Ying et al., "Do transformers really perform bad for graph representation?", NeurIPS 2021,
    equation 6). Numbers are those of
    :func:`attention` on complete graphs with self-loops, without the pairs in memory: scores are
    computed in blocks that stay in caches, and once more in the backward pass (Dao et al.,
    "FlashAttention", NeurIPS 2022). Values and gradients are bitwise equal for any number of
    threads.

    On the CPU what is stored grows with nodes: the result, two numbers for each node and head, and
    while gradients are computed, up to eight copies of the query of graphs of 512 nodes and more,
    and 128 of a table of biases. The gradient of a bias of pairs has the size of that.
    The backward pass needs the result, too, which may not be edited before.

    GPUs have no kernel of their own: there torch's operations compute graphs of one size together
    and large ones by some of their queries, :math:`2^{23}` scores at a time (:math:`2^{21}` with
    dropout), a few tensors of which are stored besides what grows with nodes. Dropout and
    statistics are the same, and sums have a fixed order. Derivatives of gradients store all pairs.

    A query of whose pairs a bias makes all scores -infinity gets 0, as from torch's
    ``scaled_dot_product_attention``.

    Dropout is that of :func:`attention`: a weight is kept if word ``head % 4`` of Philox4x32-10 for
    the key ``seed`` and the counter ``(pair, head // 4, 0, 0)`` is at least ``dropout * 2^32``.
    Pairs are numbered graph by graph, query by query, key by key; of a number beyond 32 bits the
    upper half is the third counter.

    Args:
        query: ``[nodes, heads, channels]``, float32, float64, bfloat16 or float16.
        key: of the same shape, or with ``key_ptr`` ``[keys, heads, channels]``.
        value: like ``key``.
        ptr: int64 or int32 ``[graphs + 1]``: graph g has the nodes ``ptr[g]`` to
            ``ptr[g + 1] - 1``. There may be graphs without nodes.
        key_ptr: the same for keys and values, if these are of other nodes than queries; a query in
            a graph without keys gets 0.
        bias: added to the scores, in the dtype of the query: ``[pairs, heads]``, in the order in
            which dropout numbers pairs, or with ``pair_type`` a table ``[types, heads]``.
        pair_type: which row of the table each pair takes, uint8, int16, int32 or int64
            ``[pairs]``.
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
        IndexError: ``pair_type`` holds a type that the table lacks.
    """
    if scale is None:
        scale = max(query.shape[-1], 1) ** -0.5
    seed = dropout_seed(dropout, seed, query, key, value)
    tensors = (query, key, value, bias, ptr, key_ptr, pair_type)
    out, stats = DENSE_ATTENTION(*tensors, seed, scale, dropout, 0, 0)
    return out, stats


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    ptr: Tensor,
    key_ptr: Tensor | None,
    pair_type: Tensor | None,
) -> None:
    """Check all but what is in the values of ``ptr``, ``key_ptr`` and ``pair_type``."""
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
    refuse_types_alone("pair_type", pair_type, bias)
    if bias is not None:
        rows = "pairs" if pair_type is None else "types"
        check_heads("bias", bias, (rows, query.shape[1]), query)
    if pair_type is not None:
        check_entry_types("pair_type", pair_type, "pairs", query)


def _check_offsets(name: str, ptr: Tensor, query: Tensor) -> None:
    if ptr.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{name} must be int64 or int32, got {ptr.dtype}")
    if ptr.layout is not torch.strided or ptr.dim() != 1 or ptr.shape[0] < 1:
        raise ValueError(
            f"{name} must be dense [graphs + 1], got shape {list(ptr.shape)}, layout {ptr.layout}"
        )
    if ptr.device != query.device:
        raise ValueError(f"{name} must be on query's device {query.device}, got {ptr.device}")


def _topology(
    ptr: Tensor, key_ptr: Tensor | None, pair_type: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Offsets of queries and of keys, and types of pairs, as kernels take them."""
    of_queries = ptr.to(torch.int64).contiguous()
    of_keys = of_queries if key_ptr is None else key_ptr.to(torch.int64).contiguous()
    return of_queries, of_keys, None if pair_type is None else pair_type.contiguous()


def _contiguous(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if x is None else contiguous(x) for x in tensors)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    ptr: Tensor,
    key_ptr: Tensor | None,
    pair_type: Tensor | None,
    seed: Tensor | None,
    scale: float,
    dropout: float,
    first_head: int,
    first_pair: int,
) -> tuple[Tensor, Tensor]:
    _check(query, key, value, bias, ptr, key_ptr, pair_type)
    kernel = REGISTRY.kernel("dense_attention", device_type(query), query.dtype)
    inputs = (*_contiguous(query, key, value, bias), *_topology(ptr, key_ptr, pair_type))
    return kernel(*inputs, scale, dropout, seed_number(seed), first_head, first_pair)  # type: ignore[no-any-return]


def _fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    ptr: Tensor,
    key_ptr: Tensor | None,
    pair_type: Tensor | None,
    *_: object,
) -> tuple[Tensor, Tensor]:
    _check(query, key, value, bias, ptr, key_ptr, pair_type)
    stats = query.new_empty((*query.shape[:2], 2), dtype=accumulator(query.dtype))
    return query.new_empty(query.shape), stats


def _backward(
    grad: Tensor,
    grad_logsum: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    ptr: Tensor,
    key_ptr: Tensor | None,
    pair_type: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    stats: Tensor,
    scale: float,
    dropout: float,
    first_head: int,
    first_pair: int,
    wants_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check(query, key, value, bias, ptr, key_ptr, pair_type)
    check_heads("grad", grad, list(query.shape), query)
    check_heads("out", out, list(query.shape), query)
    kernel = REGISTRY.kernel("dense_attention_backward", device_type(query), query.dtype)
    inputs = (*_contiguous(query, key, value, bias), *_topology(ptr, key_ptr, pair_type))
    options = (
        scale,
        dropout,
        seed_number(seed),
        first_head,
        first_pair,
        wants_bias and bias is not None,
    )
    known = _contiguous(out, stats)
    *found, of_bias = kernel(*_contiguous(grad, grad_logsum), *inputs, *known, *options)
    return *found, grad.new_empty(0) if of_bias is None else of_bias


def _backward_fake(
    grad: Tensor,
    grad_logsum: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    *arguments: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    is_wanted = bias is not None and arguments[-1]
    of_bias = query.new_empty(bias.shape if is_wanted else 0)  # type: ignore[union-attr]
    return *(x.new_empty(x.shape) for x in (query, key, value)), of_bias  # type: ignore[return-value]


class _OfDense(Context):
    # Scale, dropout and the numbers of the first head and pair.
    options: tuple[float, float, int, int]


def _save(ctx: _OfDense, arguments: Arguments, result: tuple[Tensor, Tensor]) -> None:
    *tensors, scale, dropout, first_head, first_pair = arguments
    ctx.options = scale, dropout, first_head, first_pair
    ctx.save_for_backward(*tensors, *result)


def _gradient(
    ctx: _OfDense, grad: Tensor | None, grad_stats: Tensor | None
) -> tuple[Tensor | None, ...]:
    query, key, value, bias, ptr, key_ptr, pair_type, seed, out, stats = ctx.saved_tensors
    wants_bias = bias is not None and wanted_gradients(ctx)[3]
    if grad is None:  # only the statistics were used
        grad = torch.zeros_like(query)
    grads = (grad, logsum_gradient(grad_stats, stats))
    if needs_torch_operations(*grads):
        of_queries, of_keys, types = _topology(ptr, key_ptr, pair_type)
        scale, dropout, first_head, first_pair = ctx.options
        *found, of_bias = reference.dense_attention_backward(
            *grads,
            query,
            key,
            value,
            bias,
            of_queries,
            of_keys,
            types,
            out,
            stats,
            scale,
            dropout,
            seed_number(seed),
            first_head,
            first_pair,
            wants_bias,
        )
    else:
        tensors = (query, key, value, bias, ptr, key_ptr, pair_type, seed, out, stats)
        *found, of_bias = DENSE_ATTENTION_BACKWARD(*grads, *tensors, *ctx.options, wants_bias)
    return *found, of_bias if wants_bias else None, None, None, None, None, None, None, None, None


DENSE_ATTENTION_BACKWARD = define(
    "dense_attention_backward(Tensor grad, Tensor? grad_logsum, Tensor query, Tensor key, "
    "Tensor value, Tensor? bias, Tensor ptr, Tensor? key_ptr, Tensor? pair_type, Tensor? seed, "
    "Tensor out, Tensor stats, float scale, float dropout, int first_head, "
    "int first_pair, bool wants_bias) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
DENSE_ATTENTION = define(
    "dense_attention(Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor ptr, "
    "Tensor? key_ptr, Tensor? pair_type, Tensor? seed, float scale, float dropout, int first_head, "
    "int first_pair) "
    "-> (Tensor, Tensor)",
    _forward,
    _fake,
    Gradient((0, 1, 2, 3), _save, _gradient),
)
