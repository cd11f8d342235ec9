"""The route of ``TransformerConv``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn.conv import TransformerConv

from fastgraph import ops
from fastgraph.graphs.edges import Edges
from fastgraph.layers.attention import (
    Inputs,
    Terms,
    combine_heads,
    join_heads,
    same_dtype,
    terms_of,
)
from fastgraph.layers.edge_projection import (
    is_folded_by_operator,
    project_edge_channels,
    with_edge_channels,
)
from fastgraph.machine.memory import as_it_is
from fastgraph.plugins.patching import Patches
from fastgraph.plugins.refusal import Refusal
from fastgraph.pyg.attention import (
    accepted,
    dropout_rate,
    edge_projection,
    edge_refusal,
    joint_width,
    located,
    weights_refusal,
)
from fastgraph.pyg.modules import project
from fastgraph.routing.conditions import is_plain, operand
from fastgraph.routing.dispatch import Computation, replace_method
from fastgraph.routing.sizes import (
    ATTENTION,
    NARROW_ATTENTION_WITH_EDGES,
    Least,
    on_edge_index,
)

_NARROW = 16
"""Up to so many channels of all heads, edges with features gain less than new graphs cost."""


def install(patches: Patches) -> None:
    """Replace ``TransformerConv.forward``."""
    replace_method(
        patches,
        TransformerConv,
        "forward",
        plan,
        is_small=on_edge_index(_least, joint_width),
        has_edge_index=True,
    )


_WIDE = 4
"""The most features of edges, in channels of a head, that an operator folds faster than upstream
projects them on any graph (32 for 16 channels were measured, `2026-11-30-edge-features-routed`).
Folded around one, they are wide from twice as many as channels on."""

_FEW_NEIGHBOURS = 3
"""The mean number of neighbours from which on products with wide features of edges, which are made
for each node, are less work than upstream's for each edge, with gradients."""


def _least(module: TransformerConv, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Least:
    if module.lin_edge is None:
        return ATTENTION
    if module.heads * module.out_channels <= _NARROW:
        return NARROW_ATTENTION_WITH_EDGES
    if module.edge_dim < 2 * module.out_channels:
        return ATTENTION
    x = args[0] if args else kwargs.get("x")
    target = x[-1] if isinstance(x, (tuple, list)) and x else x
    if not isinstance(target, Tensor) or target.dim() == 0:
        return ATTENTION
    if module.edge_dim <= _WIDE * module.out_channels and is_folded_by_operator(target):
        return ATTENTION
    least = max(ATTENTION.training, _FEW_NEIGHBOURS * target.shape[0])
    return ATTENTION._replace(training=least)


def plan(
    module: TransformerConv,
    x: Any,
    edge_index: Any,
    edge_attr: Tensor | None = None,
    return_attention_weights: bool | None = None,
) -> Computation | Refusal:
    """The forward pass of a call, or the reason to leave it to upstream."""
    call = accepted(module, TransformerConv, "attention", x, edge_index)
    if isinstance(call, Refusal):
        return call
    refusal = None
    if edge_attr is not None or module.lin_edge is not None:
        refusal = _edge_refusal(module, edge_attr, edge_index)
        if dropout_rate(module) > 0 and not is_plain(*call.inputs, edge_index, edge_attr):
            refusal = refusal or Refusal(
                "attention dropout and features of edges that are not plain tensors"
            )
    # Upstream returns weights for False as well, and those without dropout.
    need_weights = isinstance(return_attention_weights, bool)
    if need_weights and edge_index.layout != torch.strided:
        refusal = refusal or weights_refusal(edge_index)
    if need_weights and dropout_rate(module) > 0:
        refusal = refusal or Refusal("attention weights without the dropout that is applied")
    if refusal is not None:
        return refusal
    found = located(call, None, numbered=need_weights or edge_attr is not None)
    if isinstance(found, Refusal):
        return found
    arguments = (module, call.inputs, found.edges, edge_attr, need_weights)
    if not need_weights:
        return lambda: found.while_computing(_forward, *arguments)[0]

    def with_weights() -> Any:
        out, alpha = found.while_computing(_forward, *arguments)
        return out, (edge_index, alpha)

    return with_weights


def _edge_refusal(module: TransformerConv, edge_attr: Any, edge_index: Tensor) -> Refusal | None:
    if module.lin_edge is not None:
        return edge_refusal(module.lin_edge, edge_attr, edge_index, num_dims=(2,))
    # Without a projection upstream adds what it gets to values [E, heads, channels].
    refusal = operand("edge_attr", edge_attr)
    if refusal is not None:
        return refusal
    channels = (1, module.out_channels)
    if (
        edge_index.layout != torch.strided
        or edge_attr.dim() != 3
        or edge_attr.shape[:2] != (edge_index.shape[1], 1)
        or edge_attr.shape[2] not in channels
        or edge_attr.dtype != module.lin_value.weight.dtype
    ):
        return Refusal(
            f"edge_attr of shape {list(edge_attr.shape)}, {edge_attr.dtype}, without edge_dim"
        )
    return None


def _forward(
    module: TransformerConv,
    inputs: Inputs,
    edges: Edges,
    edge_attr: Tensor | None,
    need_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    shape = (-1, module.heads, module.out_channels)
    query = project(module.lin_query, inputs.dst).view(shape)
    key = project(module.lin_key, inputs.src).view(shape)
    value = project(module.lin_value, inputs.src).view(shape)
    root = project(module.lin_skip, inputs.dst) if module.root_weight else None
    out, alpha, terms = _attend(module, query, key, value, root, edges, edge_attr, need_weights)
    if root is None or module.lin_beta is None:
        return combine_heads(module.concat, out, terms), alpha
    return _with_gate(module, join_heads(module.concat, out, changed=False), root), alpha


def _attend(
    module: TransformerConv,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    root: Tensor | None,
    edges: Edges,
    edge_attr: Tensor | None,
    need_weights: bool,
) -> tuple[Tensor, Tensor | None, Terms]:
    edge = None if edge_attr is None else as_it_is(edge_attr).flatten(1)
    weight: Tensor | None = None
    if edge is not None:
        if module.lin_edge is None:  # only values get them, to which a query has nothing to say
            query = F.pad(query, (0, edge.shape[1]))
        else:
            weight = edge_projection(module).to(query.dtype)
            edge = edge.to(query.dtype)  # as autocast does before a projection
    is_folded = weight is not None and is_folded_by_operator(query)
    if weight is not None and not is_folded:
        query = with_edge_channels(query, weight)
    tensors = same_dtype(query, key, value, edge)
    if query.is_cuda and torch.is_autocast_enabled("cuda") and tensors[0].dtype != torch.float64:
        # There, and not on the CPU, autocast adds up scores in float32, and so what follows.
        tensors = [None if tensor is None else tensor.float() for tensor in tensors]
    query, key, value, edge = tensors
    if (edge is None or is_folded) and module.lin_beta is None:
        terms = terms_of(module.concat, value, root)
    else:  # the operator's output is not what the root is added to
        terms = Terms(None, [] if root is None else [root])
    rest: dict[str, Any] = {
        "edge": edge,
        "addend": terms.addend,
        "ptr": edges.ptr,
        "dropout": dropout_rate(module),
        "need_weights": need_weights,
    }
    if weight is not None and is_folded:
        rest["weight_edge"] = weight.to(query.dtype).transpose(1, 2)
        out, alpha, _ = ops.edge_attention(query, key, value, edges.index, **rest)
        return out, alpha, terms
    out, alpha, _ = ops.attention(query, key, value, edges.index, **rest)
    if edge is None:
        return out, alpha, terms
    if weight is not None:
        return project_edge_channels(out, weight.to(out.dtype)), alpha, terms
    out, of_edges = out.split([module.out_channels, edge.shape[1]], dim=-1)
    return out + of_edges, alpha, terms


def _with_gate(module: TransformerConv, out: Tensor, root: Tensor) -> Tensor:
    beta: Tensor = module.lin_beta(torch.cat([out, root, out - root], dim=-1)).sigmoid()
    return beta * root + (1 - beta) * out
