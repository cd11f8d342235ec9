"""The route of ``GATConv``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.conv import GATConv

from fastgraph import ops
from fastgraph.graphs.edges import Edges
from fastgraph.layers.attention import (
    Inputs,
    combine_heads,
    folded,
    folded_scores,
    same_dtype,
    terms_of,
)
from fastgraph.layers.modules import parameter_of
from fastgraph.plugins.patching import Patches
from fastgraph.plugins.refusal import Refusal
from fastgraph.pyg.attention import (
    Accepted,
    accepted,
    draws_by_row,
    dropout_rate,
    edge_refusal,
    joint_width,
    located,
    loops_of,
    weights_refusal,
    with_loop_features,
    with_weights,
)
from fastgraph.pyg.modules import LINEAR, project
from fastgraph.routing.dispatch import Computation, replace_method
from fastgraph.routing.sizes import ATTENTION, on_edge_index


def install(patches: Patches) -> None:
    """Replace ``GATConv.forward``."""
    replace_method(
        patches,
        GATConv,
        "forward",
        plan,
        is_small=on_edge_index(ATTENTION, joint_width),
        has_edge_index=True,
    )


def plan(
    module: GATConv,
    x: Any,
    edge_index: Any,
    edge_attr: Tensor | None = None,
    size: Any = None,
    return_attention_weights: bool | None = None,
) -> Computation | Refusal:
    """The forward pass of a call, or the reason to leave it to upstream."""
    call = accepted(module, GATConv, "gat", x, edge_index)
    if isinstance(call, Refusal):
        return call
    refusal = None
    if getattr(parameter_of(module, "att_src"), "device", None) != call.inputs.src.device:
        refusal = Refusal("att_src is not on the device of the features")
    if edge_attr is not None and module.lin_edge is None:
        refusal = refusal or _ignored_edge_refusal(module, edge_attr, edge_index)
        edge_attr = None
    if edge_attr is not None:
        refusal = refusal or edge_refusal(module.lin_edge, edge_attr, edge_index)
    if size is not None:
        refusal = refusal or _size_refusal(size, call.inputs)
    if return_attention_weights:
        refusal = refusal or weights_refusal(edge_index)
    if refusal is not None:
        return refusal
    shared = module.lin is not None and isinstance(x, Tensor)
    weights = bool(return_attention_weights)
    numbered = edge_attr is not None or (weights and not draws_by_row(module, call))
    found = located(call, loops_of(module, call.inputs), numbered=numbered)
    if isinstance(found, Refusal):
        return found
    arguments = (module, call, found.edges, edge_attr, shared, weights)
    return lambda: found.while_computing(_forward, *arguments)


def _ignored_edge_refusal(module: GATConv, edge_attr: object, edge_index: Tensor) -> Refusal | None:
    """Why upstream may refuse features of edges that no score comes of, as it adds self-loops."""
    if not module.add_self_loops:
        return None
    is_nested = isinstance(edge_attr, Tensor) and edge_attr.is_nested
    if is_nested or type(edge_attr) is not Tensor or edge_index.layout != torch.strided:
        return Refusal("edge_attr without edge_dim that is not a tensor beside a plain edge_index")
    if edge_attr.shape[:1] != edge_index.shape[1:]:
        return Refusal(
            f"edge_attr has shape {list(edge_attr.shape)} for {edge_index.shape[1]} edges"
        )
    if edge_attr.layout != torch.strided or edge_attr.device != edge_index.device:
        return Refusal("edge_attr is not a dense tensor on the graph's device")
    fills = isinstance(module.fill_value, (float, int)) or module.fill_value in ("add", "mean")
    is_real = edge_attr.is_floating_point() or edge_attr.dtype in (torch.int64, torch.int32)
    if not fills or not is_real:
        return Refusal(f"edge_attr of {edge_attr.dtype} with fill_value={module.fill_value!r}")
    return None


def _size_refusal(size: Any, inputs: Inputs) -> Refusal | None:
    expected = (len(inputs.src), len(inputs.dst))
    if not isinstance(size, (tuple, list)) or any(isinstance(part, float) for part in size):
        return Refusal("size is not two integers")
    return (
        None if tuple(size) == expected else Refusal(f"size is {tuple(size)}, unlike the features")
    )


def _forward(
    module: GATConv,
    call: Accepted,
    edges: Edges,
    edge_attr: Tensor | None,
    shared: bool,
    need_weights: bool,
) -> Any:
    inputs, shape = call.inputs, (-1, module.heads, module.out_channels)
    residual = None if module.res is None else project(module.res, inputs.dst)
    lin_src, lin_dst = (
        (module.lin_src, module.lin_dst) if module.lin is None else (module.lin, module.lin)
    )
    x_src = project(lin_src, inputs.src).view(shape)
    if edge_attr is not None:
        edge_attr = with_loop_features(module, call, edge_attr)
    score_edge = _edge_scores(module, edge_attr)
    attend: Callable[..., tuple[Tensor, Tensor | None, Tensor]]
    if shared:
        att = torch.cat([module.att_src, module.att_dst])
        x_src, att, score_edge = same_dtype(x_src, att, score_edge)
        attend = functools.partial(ops.gat_with_scores, x_src, att)
    else:
        score_dst = folded_scores(LINEAR, lin_dst, inputs.dst, module.att_dst)
        if score_dst is None:
            score_dst = _scores(project(lin_dst, inputs.dst).view(shape), module.att_dst)
        x_src, score_src, score_dst, score_edge = same_dtype(
            x_src, _scores(x_src, module.att_src), score_dst, score_edge
        )
        attend = functools.partial(ops.gat, x_src, score_src, score_dst)
    terms = terms_of(module.concat, x_src, residual, module.bias)
    out, alpha, _ = attend(
        edges.index,
        score_edge=score_edge,
        addend=terms.addend,
        ptr=edges.ptr,
        self_loops=edges.self_loops,
        negative_slope=module.negative_slope,
        dropout=dropout_rate(module),
        need_weights=need_weights,
    )
    out = combine_heads(module.concat, out, terms)
    return with_weights(module, call, edges, out, alpha)


def _scores(x: Tensor, att: Tensor) -> Tensor:
    return ops.head_scores(*same_dtype(x, att)).squeeze(0)


def _edge_scores(module: GATConv, edge: Tensor | None) -> Tensor | None:
    """``<att_edge, W e>`` of each head as ``<W^T att_edge, e>``, ``[E, heads]``."""
    if edge is None or len(edge) == 0:  # upstream leaves the projection out, too
        return None
    return edge @ folded(module.lin_edge.weight, module.att_edge).t()
