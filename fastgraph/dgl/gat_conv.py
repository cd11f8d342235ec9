"""The route of ``GATConv``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from dgl.nn.pytorch.conv import GATConv
from torch import Tensor

from fastgraph import ops
from fastgraph.dgl.attention import (
    Accepted,
    accepted,
    dropout_rate,
    edge_modules_refusal,
    finish,
)
from fastgraph.dgl.modules import project
from fastgraph.layers.attention import same_dtype, terms_of
from fastgraph.routing.dispatch import Computation, replace_method
from fastgraph.routing.patching import Patches


def install(patches: Patches) -> None:
    """Replace ``GATConv.forward``."""
    replace_method(patches, GATConv, "forward", plan)


def plan(
    module: GATConv,
    graph: Any,
    feat: Any,
    edge_weight: Tensor | None = None,
    get_attention: bool = False,
) -> Computation | str:
    """The forward pass of a call, or the reason to leave it to upstream."""
    if edge_weight is not None:
        return "edge_weight, by which attention is multiplied"
    call = accepted(module, "gat", graph, feat, need_weights=bool(get_attention))
    if isinstance(call, str):
        return call
    if call.shared and hasattr(module, "fc_src"):
        return "one tensor of features for a layer that was made for pairs"
    reason = edge_modules_refusal(module, call.inputs.src)
    return reason or (lambda: _forward(module, call, bool(get_attention)))


def _forward(module: GATConv, call: Accepted, get_attention: bool) -> Any:
    shape = (-1, module._num_heads, module._out_feats)
    h_src = module.feat_drop(call.inputs.src)
    h_dst = h_src if call.shared else module.feat_drop(call.inputs.dst)
    has_one = not hasattr(module, "fc_src")
    x_src = project(module.fc if has_one else module.fc_src, h_src).view(shape)
    if call.shared:
        x_dst = x_src
        if call.num_dst != len(x_src):  # a block, whose destinations are the first of its sources
            x_dst, h_dst = x_src[: call.num_dst], h_dst[: call.num_dst]
    else:
        x_dst = project(module.fc if has_one else module.fc_dst, h_dst).view(shape)
    residual = None if module.res_fc is None else project(module.res_fc, h_dst)
    attend: Callable[..., tuple[Tensor, Tensor | None, Tensor]]
    if x_dst is x_src:
        x_src, att = same_dtype(x_src, torch.cat([module.attn_l, module.attn_r]))
        attend = functools.partial(ops.gat_with_scores, x_src, att)
    else:
        x_src, score_src, score_dst = same_dtype(
            x_src, _scores(x_src, module.attn_l), _scores(x_dst, module.attn_r)
        )
        attend = functools.partial(ops.gat, x_src, score_src, score_dst)
    bias = module.bias if module.has_explicit_bias else None
    terms = terms_of(True, x_src, residual, bias)
    out, alpha, _ = attend(
        call.edges.index,
        addend=terms.addend,
        ptr=call.edges.ptr,
        negative_slope=module.leaky_relu.negative_slope,
        dropout=dropout_rate(module),
        need_weights=get_attention,
    )
    others = [term.view(*term.shape[:-1], *shape[1:]) for term in terms.others]
    return finish(module, out, others, alpha, get_attention)


def _scores(x: Tensor, att: Tensor) -> Tensor:
    return ops.head_scores(*same_dtype(x, att)).squeeze(0)
