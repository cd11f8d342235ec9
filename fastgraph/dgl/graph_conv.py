"""The route of ``GraphConv``: its normalisation is cached as one weight for each edge.

DGL multiplies the features of all nodes by the normalisation before and after it adds them up. What
has no such route is DGL's own ``forward``, whose sums take the route of message passing.
"""

from __future__ import annotations

from typing import Any

import torch
from dgl.nn.pytorch.conv import GraphConv
from torch import Tensor

from fastgraph.dgl.calls import Accepted, accepted, one_for_each_edge
from fastgraph.dgl.normalisation import WEIGHTED, edge_weights, node_scales
from fastgraph.graphs.edges import Grouped
from fastgraph.layers.constant import summed
from fastgraph.layers.linear import linear
from fastgraph.layers.modules import parameter_of
from fastgraph.layers.sums import add_to
from fastgraph.machine.memory import new_rows
from fastgraph.ops.library import is_defined_by
from fastgraph.plugins.patching import Patches
from fastgraph.plugins.refusal import Refusal
from fastgraph.routing.conditions import plain_tensor
from fastgraph.routing.dispatch import Computation, replace_method


def install(patches: Patches) -> None:
    """Replace ``GraphConv.forward``."""
    replace_method(patches, GraphConv, "forward", plan)


def plan(
    module: GraphConv,
    graph: Any,
    feat: Any,
    weight: Tensor | None = None,
    edge_weight: Tensor | None = None,
) -> Computation | None:
    """The forward pass of a call, or ``None`` where it is left to message passing."""
    call = accepted(module, "spmm", graph, feat)
    own = parameter_of(module, "weight")
    if isinstance(call, Refusal) or (weight is not None and own is not None):
        return None
    x = call.inputs.src
    if x.shape[1] == 0:  # DGL's kernels raise an error
        return None
    matrix = own if weight is None else weight
    if matrix is not None:
        if plain_tensor("weight", matrix) is not None or matrix.dim() != 2:
            return None
        if (matrix.dtype, matrix.device) != (x.dtype, x.device) or len(matrix) != x.shape[1]:
            return None
    if call.inputs.dst.dtype != x.dtype or module._norm not in ("none", "both", "right", "left"):
        return None
    if edge_weight is None:
        return lambda: _forward(module, call, matrix, None)
    flat = one_for_each_edge("edge_weight", edge_weight, call)
    return None if isinstance(flat, Refusal) else lambda: _forward(module, call, matrix, flat)


def _forward(
    module: GraphConv, call: Accepted, matrix: Tensor | None, edge_weight: Tensor | None
) -> Tensor:
    x, bias = call.inputs.src, parameter_of(module, "bias")
    relation = call.relation(numbered=edge_weight is not None)
    edges, weight = relation.edges, edge_weight
    scales = None
    may_scale = module._norm in WEIGHTED and edge_weight is None and isinstance(relation, Grouped)
    if may_scale and matrix is not None and _are_rows_scaled(call, min(matrix.shape)):
        assert isinstance(relation, Grouped)
        scales = node_scales(relation, module._norm, x.dtype)
    if module._norm in WEIGHTED and scales is None:
        by_degree = edge_weights(relation, module._norm, x.dtype)
        weight = by_degree if weight is None else by_degree * weight
    is_narrowing = module._in_feats > module._out_feats
    if is_narrowing and matrix is not None:
        if module._norm in ("both", "left") and _may_be_edited(x, matrix):
            x = new_rows(x, x.shape).copy_(x)  # as is upstream's product with the normalisation
        x = linear(x, matrix.t(), None)
    if scales is not None:
        x = x * scales[0]
    reduce = "mean" if module._norm == "right" else "sum"
    is_private = not is_narrowing and matrix is not None
    out = summed(x, edges, weight, reduce, call.num_dst, is_private=is_private)
    if scales is not None and scales[1] is not None:
        out = out * scales[1]
    if not is_narrowing and matrix is not None:
        out = linear(out, matrix.t(), None)
    if bias is not None:
        out = add_to(out, bias)
    return out if module._activation is None else module._activation(out)


_LEAST_DEGREE = 32
"""The edges of a node from which on it takes less time to scale its row than to read weights."""


def _are_rows_scaled(call: Accepted, channels: int) -> bool:
    """True if rows of nodes are multiplied by the normalisation, as DGL does, instead of messages.

    Weights are read along each edge, and in the backward pass from all over memory. Where
    features are constant their sum is computed once, of which the product is a part then.
    """
    x, num_edges = call.inputs.src, call.structure.num_edges
    is_dense = num_edges >= max(_LEAST_DEGREE, channels) * max(len(x), call.num_dst)
    is_trained = x.requires_grad or x.shape[1] > channels
    return is_dense and is_trained and x.is_cpu and not is_defined_by(x)


def _may_be_edited(x: Tensor, matrix: Tensor) -> bool:
    """True if a product saves features that a caller may edit before the backward pass."""
    saves = matrix.requires_grad and torch.is_grad_enabled()
    return saves and not torch.compiler.is_compiling() and not is_defined_by(x)
