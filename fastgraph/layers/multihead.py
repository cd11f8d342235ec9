"""``torch.nn.MultiheadAttention`` on the nodes of graphs, or other sets, in a row, not padded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import MultiheadAttention
from torch.nn.modules.module import _has_any_global_hook

from fastgraph import ops
from fastgraph.layers.linear import linear
from fastgraph.layers.modules import KnownModules, parameter_of
from fastgraph.plugins.backend import device_type
from fastgraph.plugins.refusal import Refusal
from fastgraph.registry.registry import REGISTRY
from fastgraph.routing.conditions import plain_parameters

_KNOWN = KnownModules(MultiheadAttention)


def self_attention_refusal(module: Any, x: Tensor) -> Refusal | None:
    """Why attention of nodes among each other must be left to torch.

    Args:
        module: a ``MultiheadAttention``, or an instance of a subclass.
        x: features of the nodes, a plain tensor.
    """
    refusal = module_refusal(module)
    if refusal is not None:
        return refusal
    if torch.is_autocast_enabled(x.device.type):
        return Refusal("MultiheadAttention under autocast")
    weight = module.in_proj_weight
    if x.layout != torch.strided or x.dim() != 2 or x.shape[1] != module.embed_dim:
        return Refusal("features that are not a dense matrix as wide as MultiheadAttention")
    if x.dtype != weight.dtype or x.device != weight.device:
        return Refusal("features that have not the dtype and device of MultiheadAttention")
    return plain_parameters(module) or REGISTRY.refusal("dense_attention", device_type(x), x.dtype)


def module_refusal(module: Any) -> Refusal | None:
    """Why a ``MultiheadAttention`` means something else than attention of all pairs."""
    if type(module) is not MultiheadAttention:
        return Refusal("attention is a subclass of MultiheadAttention")
    if _KNOWN.is_watched(module) or _has_any_global_hook():
        return Refusal("MultiheadAttention has hooks or another forward")
    if not module._qkv_same_embed_dim:
        return Refusal("MultiheadAttention with kdim or vdim")
    if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
        return Refusal("MultiheadAttention with add_bias_kv or add_zero_attn")
    if not module.batch_first:
        return Refusal("MultiheadAttention without batch_first")
    rate = module.dropout
    if type(rate) not in (int, float) or not 0 <= rate <= 1 or type(module.training) is not bool:
        return Refusal("dropout is no rate, or training no bool")
    return None


def self_attention(
    module: Any,
    x: Tensor,
    ptr: Tensor,
    bias: Tensor | None = None,
    pair_type: Tensor | None = None,
) -> Tensor:
    """The rows of ``module(h, h, h)`` for each node, where h are the nodes of its graph.

    Args:
        module: one that :func:`module_refusal` has nothing against.
        x: ``[nodes, channels]``, which may be edited before the backward pass.
        ptr: int64 ``[graphs + 1]``, the offsets of graphs among the nodes.
        bias: added to the scores; see :func:`fastgraph.ops.dense_attention`.
        pair_type: of pairs, likewise.

    Returns:
        ``[nodes, channels]``.
    """
    if torch.is_grad_enabled() and module.in_proj_weight.requires_grad:
        x = x.clone()  # a padded copy is torch's: the caller may edit x before the backward pass
    return attention(module, x, x, ptr, bias=bias, pair_type=pair_type)


def attention(
    module: Any,
    x: Tensor,
    y: Tensor,
    ptr: Tensor,
    key_ptr: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    pair_type: Tensor | None = None,
) -> Tensor:
    """The rows of ``module(h, g, g)`` for each row of x, where h and g are those of its set.

    Args:
        module: one that :func:`module_refusal` has nothing against.
        x: ``[rows, channels]``, the queries; not to be edited before the backward pass.
        y: ``[other rows, channels]``, of which keys and values are made; x itself for attention of
            the rows of a set among each other. A row without any gets 0 for what it attends to.
        ptr: int64 ``[sets + 1]``, the offsets of sets among the rows of x.
        key_ptr: the same among those of y, if it is not x.
        bias: added to the scores; see :func:`fastgraph.ops.dense_attention`.
        pair_type: of pairs, likewise.

    Returns:
        ``[rows, channels]``.
    """
    weight, own_bias = module.in_proj_weight, parameter_of(module, "in_proj_bias")
    shape = (module.num_heads, module.head_dim)
    if x is y:
        query, key, value = linear(x, weight, own_bias).view(len(x), 3, *shape).unbind(1)
    else:
        sizes = (module.embed_dim, 2 * module.embed_dim)
        weights = weight.split(sizes)
        biases = (None, None) if own_bias is None else own_bias.split(sizes)
        query = linear(x, weights[0], biases[0]).view(len(x), *shape)
        key, value = linear(y, weights[1], biases[1]).view(len(y), 2, *shape).unbind(1)
    if bias is not None:
        bias = bias.to(query.dtype)  # that of products under autocast
    rate = module.dropout if module.training else 0.0
    out, _ = ops.dense_attention(
        query, key, value, ptr, key_ptr=key_ptr, bias=bias, pair_type=pair_type, dropout=rate
    )
    out_proj = module.out_proj
    return linear(out.view(x.shape), out_proj.weight, parameter_of(out_proj, "bias"))
