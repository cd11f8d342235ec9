"""The route of ``EdgeGATConv``, whose messages are sums of features of sources and of edges.

Those of edges are projected by one matrix, ``W e``. So the score that they add is the product of
``e`` with ``W`` and the attention vector, and what they add to a message is summed before it is
projected: nothing of the size edges x heads x channels exists.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from dgl.nn.pytorch.conv import EdgeGATConv
from torch import Tensor

from fastgraph import ops
from fastgraph.dgl.attention import (
    dropout_rate,
    edge_modules_refusal,
    finish,
    projected,
    residual_of,
)
from fastgraph.dgl.calls import Accepted, accepted, edge_values_refusal
from fastgraph.dgl.modules import LINEAR
from fastgraph.dgl.sizes import EDGE_ATTENTION, of_layer
from fastgraph.dgl.structure import Named, Structure
from fastgraph.graphs.edges import Grouped
from fastgraph.layers.attention import same_dtype
from fastgraph.layers.weighing import sum_of_heads
from fastgraph.machine.memory import as_it_is
from fastgraph.plugins.patching import Patches
from fastgraph.plugins.refusal import Refusal
from fastgraph.routing.dispatch import Computation, replace_method


def install(patches: Patches) -> None:
    """Replace ``EdgeGATConv.forward``."""
    replace_method(
        patches,
        EdgeGATConv,
        "forward",
        plan,
        is_small=of_layer(EDGE_ATTENTION, lambda module: module._num_heads * module._out_feats),
    )


def plan(
    module: EdgeGATConv, graph: Any, feat: Any, edge_feat: Any, get_attention: bool = False
) -> Computation | Refusal:
    """The forward pass of a call, or the reason to leave it to upstream."""
    call = accepted(module, "gat", graph, feat)
    if isinstance(call, Refusal):
        return call
    if call.shared and hasattr(module, "fc_src"):
        return Refusal("one tensor of features for a layer that was made for pairs")
    refusal = edge_modules_refusal(module, call.inputs.src)
    if refusal is None and not LINEAR.knows(module.fc_edge):
        refusal = Refusal("fc_edge has hooks or is replaced")
    if refusal is None:
        size = module.fc_edge.weight.shape[1]
        refusal = edge_values_refusal("edge_feat", edge_feat, call, (size,))
    if refusal is None and module.fc_edge.weight.dtype != edge_feat.dtype:
        refusal = Refusal("parameters with another dtype than features")
    return refusal or (lambda: _forward(module, call, edge_feat, bool(get_attention)))


def _forward(module: EdgeGATConv, call: Accepted, edge_feat: Tensor, get_attention: bool) -> Any:
    found = projected(module, call)
    residual = residual_of(module, found.h_dst)
    # `attn_edge` is made in float32, whatever torch's default.
    edge_feat, weight, att_edge, x_src, score_src, score_dst = same_dtype(
        as_it_is(edge_feat),
        module.fc_edge.weight,
        module.attn_edge[0],
        found.x_src,
        *found.scores(module),
    )
    weight = weight.view(*att_edge.shape, -1)
    score_edge = edge_feat @ torch.einsum("hc,hcd->dh", att_edge, weight)
    edges = call.edges(numbered=True)
    out, alpha, _ = ops.gat(
        x_src,
        score_src,
        score_dst,
        edges.index,
        score_edge=score_edge,
        ptr=edges.ptr,
        negative_slope=module.leaky_relu.negative_slope,
        dropout=dropout_rate(module),
        need_weights=True,
    )
    assert alpha is not None
    from_themselves = from_edges(call.structure).edges
    summed = sum_of_heads(edge_feat.unsqueeze(1), alpha, from_themselves, call.num_dst)
    others = [torch.einsum("nhd,hcd->nhc", summed, weight)]
    if residual is not None:
        others.append(residual)
    if module.bias is not None:
        others.append(module.bias.view(1, *x_src.shape[1:]))
    return finish(module, out, others, alpha, get_attention)


@functools.singledispatch
def from_edges(structure: Structure) -> Named:
    """Every edge as the source of itself, so that features of edges can be gathered."""
    size = structure.num_dst
    return structure.remembered("CSC from edges", _edges_as_sources, size, numbered=True)


def _edges_as_sources(index: Tensor, ptr: Tensor, edge_ids: Tensor | None, num_dst: int) -> Grouped:
    order = torch.arange(len(index), dtype=index.dtype, device=index.device)
    numbers = order if edge_ids is None else edge_ids.clone()
    return Grouped.of(numbers, ptr, None if edge_ids is None else numbers, len(index), num_dst)
