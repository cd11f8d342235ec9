"""What the routes of DGL's attention layers share.

They make scores and messages of single edges by several functions of DGL, so that their ``forward``
is replaced as a whole: it does what upstream's does around one operator.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from dgl.heterograph import DGLGraph
from torch import Tensor, nn

from fastgraph.dgl.conditions import call_refusal
from fastgraph.dgl.modules import edge_module_refusal
from fastgraph.dgl.structure import Structure, structure_of, without_edges
from fastgraph.graphs.edges import Edges
from fastgraph.layers.attention import Inputs
from fastgraph.layers.sums import add_to
from fastgraph.machine import capture
from fastgraph.registry.registry import REGISTRY
from fastgraph.routing.conditions import plain_parameters, plain_tensor


class Accepted(NamedTuple):
    """A call that can be routed.

    Attributes:
        inputs: features of sources and of destinations, as upstream takes them from the caller.
        shared: whether all destinations are sources, with the same number.
        num_dst: the number of destinations, which are the first of the sources in a block.
        edges: in their order, numbered only where that matters.
    """

    inputs: Inputs
    shared: bool
    num_dst: int
    edges: Edges


def accepted(
    module: Any, operator: str, graph: object, feat: object, *, need_weights: bool
) -> Accepted | str:
    """Features and graph of a call of an attention layer, or why it must be left to upstream.

    Args:
        module: the layer.
        operator: the name of the operator.
        graph: the caller's.
        feat: the caller's features, one tensor or a pair.
        need_weights: whether attention is returned, edge by edge.
    """
    if not isinstance(graph, DGLGraph):
        return f"the graph is a {type(graph).__name__}"
    structure = structure_of(graph._graph)
    if isinstance(structure, str):
        return structure
    shared = not isinstance(feat, tuple)
    inputs = _inputs_of(feat, structure, bool(graph.is_block))
    if isinstance(inputs, str):
        return inputs
    reason = (
        call_refusal(structure, inputs.src)
        or plain_parameters(module)
        or REGISTRY.refusal(operator, inputs.src.device.type, inputs.src.dtype)
    )
    if reason is not None:
        return reason
    found = structure.numbered() if need_weights else structure.plain()
    if not module._allow_zero_in_degree and without_edges(found.graph) is not None:
        return "nodes without incoming edges, which the layer does not allow"
    return Accepted(inputs, shared, structure.num_dst, found.edges)


def _inputs_of(feat: object, structure: Structure, is_block: bool) -> Inputs | str:
    pair = feat if isinstance(feat, tuple) else (feat, feat)
    if len(pair) != 2:
        return f"features with {len(pair)} entries"
    for features in pair:
        reason = plain_tensor("the features", features)
        if reason is not None:
            return reason
        if features.layout != torch.strided or features.dim() != 2:
            return "features that are not a dense matrix"
    num_dst = structure.num_src if pair is not feat and is_block else structure.num_dst
    if (len(pair[0]), len(pair[1])) != (structure.num_src, num_dst):
        return (
            f"features of {len(pair[0])} sources and {len(pair[1])} destinations for a graph with "
            f"{structure.num_src} and {structure.num_dst}"
        )
    return Inputs(*pair)


def edge_modules_refusal(module: Any, like: Tensor) -> str | None:
    """Why what ``GATConv`` and ``GATv2Conv`` do on single edges cannot be left to an operator."""
    if dropout_rate(module) > 0 and capture.is_capturing(like):
        return "attention dropout in a CUDA graph"
    return edge_module_refusal("attn_drop", module.attn_drop, nn.Dropout) or edge_module_refusal(
        "leaky_relu", module.leaky_relu, nn.LeakyReLU
    )


def dropout_rate(module: Any) -> float:
    """The rate of attention dropout that applies now."""
    dropout = module.attn_drop
    return dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0


def finish(
    module: Any, out: Tensor, others: list[Tensor], alpha: Tensor | None, get_attention: bool
) -> Any:
    """What the layer returns for an operator's output that nothing else refers to.

    Args:
        module: the layer, for its ``activation``.
        out: ``[destinations, heads, channels]``.
        others: what is still to be added, ``[destinations or nothing, heads, channels]``.
        alpha: ``[E, heads]``, by DGL's numbers of edges.
        get_attention: whether it is returned.
    """
    for term in others:
        out = add_to(out, term)
    if module.activation:
        out = module.activation(out)
    if not get_attention:
        return out
    assert alpha is not None
    return out, alpha.unsqueeze(-1)
