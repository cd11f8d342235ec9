"""The route of ``GATv2Conv``."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch_geometric.nn.conv import GATv2Conv

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
    """Replace ``GATv2Conv.forward``."""
    replace_forward(patches, GATv2Conv, plan)


def plan(
    module: GATv2Conv,
    x: Any,
    edge_index: Any,
    edge_attr: Tensor | None = None,
    return_attention_weights: bool | None = None,
) -> Plan | str:
    """The forward pass of a call, or the reason to leave it to upstream."""
    inputs = inputs_of(x)
    reason = refusal(module, GATv2Conv, "gatv2", inputs, edge_index)
    if reason is not None or isinstance(inputs, str):
        return reason or ""
    if edge_attr is not None:
        return "edge features"
    if return_attention_weights:
        return "attention weights are asked for"
    return lambda: _forward(module, inputs, edge_index, isinstance(x, Tensor))


def _forward(module: GATv2Conv, inputs: Inputs, edge_index: Tensor, is_single: bool) -> Tensor:
    shape = (-1, module.heads, module.out_channels)
    residual = None if module.res is None else module.res(inputs.dst)
    x_src = module.lin_l(inputs.src).view(shape)
    shared = is_single and module.share_weights
    x_dst = x_src if shared else module.lin_r(inputs.dst).view(shape)
    if module.add_self_loops:
        edge_index = with_self_loops(edge_index, min(len(inputs.src), len(inputs.dst)))
    out, _ = ops.gatv2(
        *same_dtype(x_src, x_dst, module.att),
        plain_index(edge_index),
        negative_slope=module.negative_slope,
        dropout=dropout_rate(module),
    )
    return combine_heads(module, out, residual)
