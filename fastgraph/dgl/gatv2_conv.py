"""The route of ``GATv2Conv``."""

from __future__ import annotations

from typing import Any

from dgl.nn.pytorch.conv import GATv2Conv

from fastgraph import ops
from fastgraph.dgl.attention import (
    dropout_rate,
    edge_modules_refusal,
    finish,
)
from fastgraph.dgl.calls import Accepted, accepted
from fastgraph.dgl.modules import project
from fastgraph.layers.attention import same_dtype, terms_of
from fastgraph.layers.sums import first_rows
from fastgraph.plugins.patching import Patches
from fastgraph.plugins.refusal import Refusal
from fastgraph.routing.dispatch import Computation, replace_method


def install(patches: Patches) -> None:
    """Replace ``GATv2Conv.forward``."""
    replace_method(patches, GATv2Conv, "forward", plan)


def plan(
    module: GATv2Conv, graph: Any, feat: Any, get_attention: bool = False
) -> Computation | Refusal:
    """The forward pass of a call, or the reason to leave it to upstream."""
    call = accepted(module, "gatv2", graph, feat)
    if isinstance(call, Refusal):
        return call
    refusal = edge_modules_refusal(module, call.inputs.src)
    return refusal or (lambda: _forward(module, call, bool(get_attention)))


def _forward(module: GATv2Conv, call: Accepted, get_attention: bool) -> Any:
    shape = (-1, module._num_heads, module._out_feats)
    h_src = module.feat_drop(call.inputs.src)
    h_dst = h_src if call.shared else module.feat_drop(call.inputs.dst)
    if call.num_dst != len(h_dst):  # a block, whose destinations are the first of its sources
        h_dst = h_dst[: call.num_dst]
    x_src = project(module.fc_src, h_src).view(shape)
    if call.shared and module.share_weights:
        x_dst = first_rows(x_src, call.num_dst)
    else:
        x_dst = project(module.fc_dst, h_dst).view(shape)
    residual = None if module.res_fc is None else project(module.res_fc, h_dst)
    x_src, x_dst, att = same_dtype(x_src, x_dst, module.attn)
    terms = terms_of(True, x_src, residual)
    edges = call.edges(numbered=get_attention)
    out, alpha, _ = ops.gatv2(
        x_src,
        x_dst,
        att,
        edges.index,
        addend=terms.addend,
        ptr=edges.ptr,
        negative_slope=module.leaky_relu.negative_slope,
        dropout=dropout_rate(module),
        need_weights=get_attention,
    )
    others = [term.view(*term.shape[:-1], *shape[1:]) for term in terms.others]
    return finish(module, out, others, alpha, get_attention)
