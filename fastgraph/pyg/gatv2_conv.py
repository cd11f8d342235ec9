"""The route of ``GATv2Conv``."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch_geometric.nn.conv import GATv2Conv

from fastgraph import ops
from fastgraph.graphs.edges import Edges
from fastgraph.layers.attention import combine_heads, same_dtype, terms_of
from fastgraph.plugins.patching import Patches
from fastgraph.plugins.refusal import Refusal
from fastgraph.pyg.attention import (
    Accepted,
    accepted,
    draws_by_row,
    dropout_rate,
    edge_projection,
    edge_refusal,
    joint_width,
    located,
    loops_of,
    weights_refusal,
    with_loop_features,
    with_weights,
)
from fastgraph.pyg.modules import project
from fastgraph.routing.dispatch import Computation, replace_method
from fastgraph.routing.sizes import (
    ATTENTION,
    GATV2_OF_ONE_CHANNEL_WITH_EDGES,
    Least,
    on_edge_index,
)


def install(patches: Patches) -> None:
    """Replace ``GATv2Conv.forward``."""
    replace_method(
        patches,
        GATv2Conv,
        "forward",
        plan,
        is_small=on_edge_index(_least, joint_width),
        has_edge_index=True,
    )


def _least(module: GATv2Conv, *_: object) -> Least:
    if module.lin_edge is not None and module.heads * module.out_channels == 1:
        return GATV2_OF_ONE_CHANNEL_WITH_EDGES
    return ATTENTION


def plan(
    module: GATv2Conv,
    x: Any,
    edge_index: Any,
    edge_attr: Tensor | None = None,
    return_attention_weights: bool | None = None,
) -> Computation | Refusal:
    """The forward pass of a call, or the reason to leave it to upstream."""
    call = accepted(module, GATv2Conv, "gatv2", x, edge_index)
    if isinstance(call, Refusal):
        return call
    refusal = None
    if edge_attr is not None:
        refusal = edge_refusal(module.lin_edge, edge_attr, edge_index)
    if return_attention_weights:
        refusal = refusal or weights_refusal(edge_index)
    if refusal is not None:
        return refusal
    shared = module.share_weights and isinstance(x, Tensor)
    weights = bool(return_attention_weights)
    numbered = edge_attr is not None or (weights and not draws_by_row(module, call))
    found = located(call, loops_of(module, call.inputs), numbered=numbered)
    if isinstance(found, Refusal):
        return found
    arguments = (module, call, found.edges, edge_attr, shared, weights)
    return lambda: found.while_computing(_forward, *arguments)


def _forward(
    module: GATv2Conv,
    call: Accepted,
    edges: Edges,
    edge_attr: Tensor | None,
    shared: bool,
    need_weights: bool,
) -> Any:
    inputs, shape = call.inputs, (-1, module.heads, module.out_channels)
    residual = None if module.res is None else project(module.res, inputs.dst)
    x_src = project(module.lin_l, inputs.src).view(shape)
    x_dst = x_src if shared else project(module.lin_r, inputs.dst).view(shape)
    weight_edge = None
    if edge_attr is not None:
        edge_attr = with_loop_features(module, call, edge_attr)
        weight_edge = edge_projection(module).transpose(1, 2)
    x_src, x_dst, att, edge, weight_edge = same_dtype(
        x_src, x_dst, module.att, edge_attr, weight_edge
    )
    terms = terms_of(module.concat, x_src, residual, module.bias)
    out, alpha, _ = ops.gatv2(
        x_src,
        x_dst,
        att,
        edges.index,
        edge=edge,
        weight_edge=weight_edge,
        addend=terms.addend,
        ptr=edges.ptr,
        self_loops=edges.self_loops,
        negative_slope=module.negative_slope,
        dropout=dropout_rate(module),
        need_weights=need_weights,
    )
    out = combine_heads(module.concat, out, terms)
    return with_weights(module, call, edges, out, alpha)
