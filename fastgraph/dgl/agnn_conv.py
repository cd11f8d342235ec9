"""The route of ``AGNNConv``, whose attention is the cosine of features."""

from __future__ import annotations

from typing import Any

import torch
from dgl.nn.pytorch.conv import AGNNConv
from torch import Tensor

from fastgraph import ops
from fastgraph.dgl.calls import Accepted, accepted
from fastgraph.layers.attention import join_heads, same_dtype
from fastgraph.layers.cosine import cosine_operands
from fastgraph.plugins.patching import Patches
from fastgraph.plugins.refusal import Refusal
from fastgraph.routing.dispatch import Computation, replace_method


def install(patches: Patches) -> None:
    """Replace ``AGNNConv.forward``."""
    replace_method(patches, AGNNConv, "forward", plan)


def plan(module: AGNNConv, graph: Any, feat: Any) -> Computation | Refusal:
    """The forward pass of a call, or the reason to leave it to upstream."""
    call = accepted(module, "attention", graph, feat)
    if isinstance(call, Refusal):
        return call
    is_one = graph._graph.number_of_ntypes() == 1
    if not call.shared and is_one:
        return Refusal(
            "a pair of features of the same nodes, of which DGL's code normalises one only"
        )
    if call.shared and not is_one and not graph.is_block:
        return Refusal("one tensor of features for two kinds of nodes")
    if call.inputs.src.shape[1] != call.inputs.dst.shape[1]:
        return Refusal("features of sources and of destinations with different sizes")
    if call.inputs.src.dtype != call.inputs.dst.dtype:
        return Refusal("features of sources and of destinations with different dtypes")
    if call.inputs.src.shape[1] == 0:
        return Refusal("features without channels")
    if torch.promote_types(module.beta.dtype, call.inputs.src.dtype) != call.inputs.src.dtype:
        return Refusal("a parameter with a wider dtype than features")
    return lambda: _forward(module, call)


def _forward(module: AGNNConv, call: Accepted) -> Tensor:
    x, beta = same_dtype(call.inputs.src, module.beta)
    query, key, value = cosine_operands(x, beta)
    if not call.shared:
        query = cosine_operands(*same_dtype(call.inputs.dst, module.beta)).query
    elif call.num_dst != len(query):  # a block, whose destinations are the first of its sources
        query = query[: call.num_dst]
    edges = call.edges(numbered=False)
    out, _, _ = ops.attention(
        query.unsqueeze(1),
        key.unsqueeze(1),
        value.unsqueeze(1),
        edges.index,
        ptr=edges.ptr,
        scale=1.0,
    )
    # Upstream's result is no view, which autograd would not let everybody change in place.
    return join_heads(True, out, changed=True)
