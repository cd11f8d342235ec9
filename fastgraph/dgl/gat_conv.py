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
    Projected,
    dropout_rate,
    edge_modules_refusal,
    finish,
    projected,
    residual_of,
)
from fastgraph.dgl.calls import Accepted, accepted, edge_values_refusal
from fastgraph.graphs.edges import Edges
from fastgraph.layers.attention import same_dtype, terms_of
from fastgraph.layers.weighing import sum_of_heads
from fastgraph.plugins.patching import Patches
from fastgraph.plugins.refusal import Refusal
from fastgraph.routing.dispatch import Computation, replace_method


def install(patches: Patches) -> None:
    """Replace ``GATConv.forward``."""
    replace_method(patches, GATConv, "forward", plan)


def plan(
    module: GATConv,
    graph: Any,
    feat: Any,
    edge_weight: Tensor | None = None,
    get_attention: bool = False,
) -> Computation | Refusal:
    """The forward pass of a call, or the reason to leave it to upstream."""
    call = accepted(module, "gat", graph, feat)
    if isinstance(call, Refusal):
        return call
    if call.shared and hasattr(module, "fc_src"):
        return Refusal("one tensor of features for a layer that was made for pairs")
    refusal = edge_modules_refusal(module, call.inputs.src)
    if refusal is None and edge_weight is not None:
        refusal = edge_values_refusal("edge_weight", edge_weight, call, ())
    return refusal or (lambda: _forward(module, call, edge_weight, bool(get_attention)))


def _forward(
    module: GATConv, call: Accepted, edge_weight: Tensor | None, get_attention: bool
) -> Any:
    found = projected(module, call)
    x_src, residual = found.x_src, residual_of(module, found.h_dst)
    bias = module.bias.view(1, *x_src.shape[1:]) if module.has_explicit_bias else None
    edges = call.edges(numbered=get_attention or edge_weight is not None)
    options = {
        "ptr": edges.ptr,
        "negative_slope": module.leaky_relu.negative_slope,
        "dropout": dropout_rate(module),
    }
    if edge_weight is not None:
        # As in upstream a copy, so that the caller may edit theirs before the backward pass.
        weighted = _attention(module, found, edges, options) * edge_weight[:, None].clone()
        x_src, weighted = same_dtype(x_src, weighted)
        out = sum_of_heads(x_src, weighted, edges, call.num_dst)
        others = [term for term in (residual, bias) if term is not None]
        return finish(module, out, others, weighted, get_attention)
    attend: Callable[..., tuple[Tensor, Tensor | None, Tensor]]
    if found.score_dst is None:
        x_src, att = same_dtype(x_src, torch.cat([module.attn_l, module.attn_r]))
        attend = functools.partial(ops.gat_with_scores, x_src, att)
    else:
        x_src, *scores = same_dtype(x_src, *found.scores(module))
        attend = functools.partial(ops.gat, x_src, *scores)
    terms = terms_of(True, x_src, residual, bias)
    out, alpha, _ = attend(edges.index, addend=terms.addend, need_weights=get_attention, **options)
    return finish(module, out, terms.others, alpha, get_attention)


def _attention(module: GATConv, found: Projected, edges: Edges, options: dict[str, Any]) -> Tensor:
    """Attention itself, ``[E, heads]``: of features without channels nothing is added up."""
    src, dst = same_dtype(*found.scores(module))
    nothing = src.new_empty(*src.shape, 0)
    _, alpha, _ = ops.gat(nothing, src, dst, edges.index, need_weights=True, **options)
    assert alpha is not None
    return alpha
