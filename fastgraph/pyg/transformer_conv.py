"""The route of ``TransformerConv``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.conv import TransformerConv

from fastgraph import ops
from fastgraph.pyg.attention_layer import (
    Inputs,
    Plan,
    dropout_rate,
    inputs_of,
    plain_index,
    refusal,
    replace_forward,
    same_dtype,
)
from fastgraph.routing.patching import Patches


def install(patches: Patches) -> None:
    """Replace ``TransformerConv.forward``."""
    replace_forward(patches, TransformerConv, plan)


def plan(
    module: TransformerConv,
    x: Any,
    edge_index: Any,
    edge_attr: Tensor | None = None,
    return_attention_weights: bool | None = None,
) -> Plan | str:
    """The forward pass of a call, or the reason to leave it to upstream."""
    inputs = inputs_of(x)
    reason = refusal(module, TransformerConv, "attention", inputs, edge_index)
    if reason is not None or isinstance(inputs, str):
        return reason or ""
    if edge_attr is not None or module.lin_edge is not None:
        return "edge features"
    if isinstance(return_attention_weights, bool):  # upstream returns them for False as well
        return "attention weights are asked for"
    return lambda: _forward(module, inputs, edge_index)


def _forward(module: TransformerConv, inputs: Inputs, edge_index: Tensor) -> Tensor:
    shape = (-1, module.heads, module.out_channels)
    query = module.lin_query(inputs.dst).view(shape)
    key = module.lin_key(inputs.src).view(shape)
    value = module.lin_value(inputs.src).view(shape)
    out, _ = ops.attention(
        *same_dtype(query, key, value), plain_index(edge_index), dropout=dropout_rate(module)
    )
    out = out.flatten(1) if module.concat else out.mean(dim=1)
    if not module.root_weight:
        return out
    root: Tensor = module.lin_skip(inputs.dst)
    if module.lin_beta is None:
        return out + root
    beta: Tensor = module.lin_beta(torch.cat([out, root, out - root], dim=-1)).sigmoid()
    return beta * root + (1 - beta) * out
