"""The route of ``GATConv``."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch_geometric.nn.conv import GATConv

from fastgraph import ops
from fastgraph.pyg.attention_layer import (
    Inputs,
    Plan,
    combine_heads,
    dropout_rate,
    inputs_of,
    plain_index,
    refusal,
    replace_forward,
    same_dtype,
    with_self_loops,
)
from fastgraph.routing.patching import Patches


def install(patches: Patches) -> None:
    """Replace ``GATConv.forward``."""
    replace_forward(patches, GATConv, plan)


def plan(
    module: GATConv,
    x: Any,
    edge_index: Any,
    edge_attr: Tensor | None = None,
    size: Any = None,
    return_attention_weights: bool | None = None,
) -> Plan | str:
    """The forward pass of a call, or the reason to leave it to upstream."""
    inputs = inputs_of(x)
    reason = refusal(module, GATConv, "gat", inputs, edge_index)
    if reason is not None or isinstance(inputs, str):
        return reason or ""
    # Without a projection of its own upstream ignores edge features.
    if edge_attr is not None and module.lin_edge is not None:
        return "edge features"
    if size is not None:
        return "the size of the graph is given"
    if return_attention_weights:
        return "attention weights are asked for"
    return lambda: _forward(module, inputs, edge_index, isinstance(x, Tensor))


def _forward(module: GATConv, inputs: Inputs, edge_index: Tensor, is_single: bool) -> Tensor:
    shape = (-1, module.heads, module.out_channels)
    residual = None if module.res is None else module.res(inputs.dst)
    lin_src, lin_dst = (
        (module.lin_src, module.lin_dst) if module.lin is None else (module.lin, module.lin)
    )
    x_src = lin_src(inputs.src).view(shape)
    shared = is_single and module.lin is not None
    x_dst = x_src if shared else lin_dst(inputs.dst).view(shape)
    score_src = (x_src * module.att_src).sum(dim=-1)
    score_dst = (x_dst * module.att_dst).sum(dim=-1)
    if module.add_self_loops:
        edge_index = with_self_loops(edge_index, min(len(inputs.src), len(inputs.dst)))
    out, _ = ops.gat(
        *same_dtype(x_src, score_src, score_dst),
        plain_index(edge_index),
        negative_slope=module.negative_slope,
        dropout=dropout_rate(module),
    )
    return combine_heads(module, out, residual)
