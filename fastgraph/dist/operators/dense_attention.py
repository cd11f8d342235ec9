"""Attention of all nodes to all nodes: each rank computes some heads, whatever the mode.

Where there are fewer heads than ranks, it computes some rows
(:mod:`fastgraph.dist.operators.dense_rows`).

There is no halo to exchange, as every node needs all others. torch's own operator, or that of
graphs in a row, does the heads of a rank: the former on keys and values in the order of ranks, as a
sum over all nodes has no order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgraph.dist.operators import own_heads
from fastgraph.dist.operators.dense_rows import by_rows, is_by_rows
from fastgraph.dist.operators.heads.exchange import layout_of_heads, to_heads, to_rows
from fastgraph.dist.operators.heads.graph import inverse
from fastgraph.dist.ranks.counts import COUNTS
from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.tensor.layout import Layout
from fastgraph.dist.tensor.rules.random import dropout_factor
from fastgraph.dist.tensor.sharded import (
    ShardedTensor,
    aligned,
    enter,
    is_sharded,
    on_the_whole,
    whole,
)
from fastgraph.dist.tensor.table import NoRuleError, TorchFunction, rule, unpacked
from fastgraph.ops.dense_attention import DENSE_ATTENTION
from fastgraph.ops.heads import drawn_seed


@rule("scaled_dot_product_attention")
@unpacked
def scaled_dot_product(
    func: TorchFunction,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> ShardedTensor:
    """``[heads, nodes, channels]`` or ``[batch, heads, nodes, channels]``, sharded by nodes."""
    if attn_mask is not None or is_causal or enable_gqa:
        raise NoRuleError
    if not (is_sharded(query) and is_sharded(key) and is_sharded(value)):
        raise NoRuleError
    tensors = query, key, value
    if any(x.dim() not in (3, 4) or x.axis != x.dim() - 2 for x in tensors):
        raise NoRuleError
    if len({x.dim() for x in tensors}) > 1 or len({x.shape[:-2] for x in tensors}) > 1:
        raise NoRuleError
    _check_heads(query.shape[-3])
    targets, rows = query.rows, key.rows
    local = [query.local, key.local, aligned(value, rows, value.axis)]
    batched = [x if x.dim() == 4 else x.unsqueeze(0) for x in local]
    by_rows = [x.permute(2, 1, 0, 3) for x in batched]
    out = _attend(by_rows, targets, rows, None, dropout_p, scale).permute(2, 1, 0, 3)
    return ShardedTensor(out if query.dim() == 4 else out.squeeze(0), targets, query.axis)


@rule("multi_head_attention_forward")
@unpacked
def multi_head(
    func: TorchFunction,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[ShardedTensor, None]:
    """``torch.nn.MultiheadAttention``, ``[nodes, channels]`` or ``[nodes, batch, channels]``."""
    separate = (q_proj_weight, k_proj_weight, v_proj_weight)
    further = (bias_k, bias_v, static_k, static_v, attn_mask, *separate)
    if need_weights or add_zero_attn or use_separate_proj_weight or is_causal:
        raise NoRuleError
    if any(x is not None for x in further):
        raise NoRuleError
    if not (is_sharded(query) and is_sharded(key) and is_sharded(value)):
        raise NoRuleError
    if any(x.axis != 0 or x.dim() not in (2, 3) for x in (query, key, value)):
        raise NoRuleError
    if key.shape != value.shape or query.shape[1:] != key.shape[1:]:
        raise NoRuleError  # upstream's own message
    _check_heads(num_heads)
    targets, rows = query.rows, key.rows
    if query is key and key is value:
        projected = list(
            F.linear(query.local, enter(in_proj_weight), enter(in_proj_bias)).chunk(3, -1)
        )
    else:
        local = query.local, key.local, aligned(value, rows, 0)
        weights = enter(in_proj_weight).chunk(3)
        biases = [None] * 3 if in_proj_bias is None else enter(in_proj_bias).chunk(3)
        projected = [F.linear(*each) for each in zip(local, weights, biases, strict=True)]
    # [nodes, heads, batch, channels of a head]
    batch = query.shape[1] if query.dim() == 3 else 1
    channels = query.shape[-1] // num_heads
    by_rows = [x.reshape(len(x), batch, num_heads, channels) for x in projected]
    by_rows = [x.transpose(1, 2) for x in by_rows]
    padding = key_padding_mask
    if padding is not None and padding.requires_grad:
        raise NoRuleError
    if padding is not None and padding.dim() == 1:
        padding = padding.unsqueeze(0)
    out = _attend(by_rows, targets, rows, padding, dropout_p if training else 0.0, None)
    out = out.transpose(1, 2).reshape(targets.mine, *query.shape[1:])
    return ShardedTensor(
        F.linear(out, enter(out_proj_weight), enter(out_proj_bias)), targets, 0
    ), None


@rule("fastgraph::dense_attention")
@unpacked
def of_graphs(
    func: TorchFunction,
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
    """:func:`fastgraph.ops.dense_attention`: graphs may lie across ranks, which share heads.

    Weights are dropped by pair and head, as on one process.

    Raises:
        ValueError: a bias or types of pairs are sharded: pairs belong to no rank.
    """
    if dropout > 0 and seed is None:  # which sharded tensors draw themselves
        seed = drawn_seed(dropout)
    given = bias, ptr, key_ptr, pair_type, seed, scale, dropout, first_head, first_pair
    try:
        return _of_graphs(query, key, value, *given)
    except NoRuleError:  # on the whole, for which a seed is needed
        found = on_the_whole(func, "fastgraph::dense_attention", (query, key, value, *given), {})
        return cast(tuple[Tensor, Tensor], found)


def _of_graphs(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, ptr: Tensor, *given: Any
) -> tuple[Tensor, Tensor]:
    key_ptr, pair_type, *options, first_head, first_pair = given
    if not (is_by_rows(query) and is_by_rows(key) and is_by_rows(value)) or is_sharded(ptr):
        raise NoRuleError
    for name, tensor in (("bias", bias), ("pair_type", pair_type)):
        if is_sharded(tensor):
            raise ValueError(f"{name} must be a plain tensor in dense_attention, got a sharded one")
    if query.shape[1] < WORLD.size and bias is None:
        options += [first_head, first_pair]
        return by_rows(query, key, value, ptr, key_ptr, None, None, *options)
    _check_heads(query.shape[1])
    targets, rows = query.rows, key.rows
    heads = layout_of_heads(query.shape[1])
    local = [query.local, key.local, aligned(value, rows, 0)]
    COUNTS.attention["heads (dense)"] += 1
    if bias is not None:
        bias = enter(bias).index_select(1, heads.position_on(bias.device))
    sent = to_heads(local, [targets, rows, rows], heads)
    after = bias, ptr, key_ptr, pair_type, *options
    found = _in_order(sent, targets, rows, heads, after, first_head, first_pair)
    out, stats = (to_rows([x], [targets], heads)[0] for x in found)
    return ShardedTensor(out, targets, 0), ShardedTensor(stats, targets, 0)


def _in_order(
    sent: Sequence[Tensor],
    targets: Layout,
    rows: Layout,
    heads: Layout,
    given: Sequence[Any],
    first_head: int = 0,
    first_pair: int = 0,
) -> list[Tensor]:
    """``ops.dense_attention`` of this rank's heads, by pairs that have the numbers of one process.

    Args:
        sent: queries, keys and values of these heads, in the order of ranks, as results are.
        targets: the layout of the queries.
        rows: that of keys and values.
        heads: which each rank has.
        given: the arguments of the operator behind these, up to its rate of dropout.
        first_head: the number of the first head of all ranks.
        first_pair: that of the first pair.
    """
    pairs = zip(sent, (targets, rows, rows), strict=True)
    in_order = [x.index_select(0, layout.order_on(x.device)) for x, layout in pairs]
    first_head += sum(heads.counts[: WORLD.rank])
    found = DENSE_ATTENTION(*in_order, *given, first_head, first_pair)
    of_ranks = _place_of(targets, sent[0].device)
    return [x.index_select(0, of_ranks) for x in found]


def _check_heads(num_heads: int) -> None:
    if num_heads < 2 and WORLD.size > 1:
        raise NoRuleError  # one rank would do all of it


def _place_of(rows: Layout, device: torch.device) -> Tensor:
    """The global position of each row in the order of ranks, on a device."""
    return inverse(rows.order_on(device))


def _attend(
    by_rows: list[Tensor],
    targets: Layout,
    rows: Layout,
    padding: Tensor | None,
    dropout: float,
    scale: float | None,
) -> Tensor:
    """Attention for local queries, keys and values, ``[mine, heads, batch, channels]`` each.

    Args:
        by_rows: queries, keys and values.
        targets: the layout of the queries.
        rows: that of keys and values.
        padding: ``[batch, n]``, of bool, which keys are left out, or of numbers, which are added.
        dropout: of the weights.
        scale: of the scores; default: one over the root of the channels.
    """
    heads = layout_of_heads(by_rows[0].shape[1])
    sent = to_heads(by_rows, [targets, rows, rows], heads)
    query, key, value = (x.permute(2, 1, 0, 3) for x in sent)
    mask = None if padding is None else _mask(whole(padding), rows, query.dtype)
    COUNTS.attention["heads (dense)"] += 1
    is_ours = mask is None and len(query) == 1 and key.shape == value.shape
    if dropout > 0 and is_ours and WORLD.random != "exact":
        given = [x.squeeze(2) for x in sent]
        ptr, key_ptr = (torch.tensor([0, x.n], device=query.device) for x in (targets, rows))
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        options = None, ptr, key_ptr, None, drawn_seed(dropout), factor, dropout
        out = _in_order(given, targets, rows, heads, options)[0][:, :, None].permute(2, 1, 0, 3)
    elif dropout > 0:
        out = _with_dropout(query, key, value, mask, targets, rows, heads, dropout, scale)
    else:
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        out = own_heads.attention(query, key, value, mask, factor)
    (found,) = to_rows([out.permute(2, 1, 0, 3)], [targets], heads)
    return found


def _mask(padding: Tensor, rows: Layout, dtype: torch.dtype) -> Tensor | None:
    """The mask that is added to scores, ``[batch, 1, 1, n]`` in the order of ranks."""
    if not bool(padding.any()):
        return None
    if padding.dtype == torch.bool:
        zeros = torch.zeros(padding.shape, dtype=dtype, device=padding.device)
        padding = zeros.masked_fill_(padding, -torch.inf)
    return padding.index_select(1, _place_of(rows, padding.device))[:, None, None, :]


def _with_dropout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    targets: Layout,
    rows: Layout,
    heads: Layout,
    dropout: float,
    scale: float | None,
) -> Tensor:
    """Attention with weights that are dropped by where they are among those of one process.

    They are made, as by torch on the CPU: ``[batch, heads of this rank, n, n]``. So it is where
    numbers are to be torch's, for padding, for several batches, and values of other channels.
    """
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query * factor) @ key.transpose(-2, -1)
    weights = (scores if mask is None else scores + mask).softmax(-1)
    shape = [query.shape[0], heads.n, targets.n, rows.n]
    of_rows = [_place_of(layout, weights.device) for layout in (targets, rows)]
    at = {1: heads.position, 2: of_rows[0], 3: of_rows[1]}
    return weights * dropout_factor(shape, at, dropout, weights) @ value
