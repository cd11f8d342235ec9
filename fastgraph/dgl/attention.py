"""The steps that the routes of DGL's attention layers share.

They make scores and messages of single edges by several functions of DGL, so that their ``forward``
is replaced as a whole: it does what upstream's does around one operator.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from fastgraph import ops
from fastgraph.dgl.calls import Accepted
from fastgraph.dgl.modules import LINEAR, edge_module_refusal, project
from fastgraph.layers.attention import folded_scores, same_dtype
from fastgraph.layers.sums import add_to
from fastgraph.machine import capture
from fastgraph.plugins.refusal import Refusal


def edge_modules_refusal(module: Any, like: Tensor) -> Refusal | None:
    """Why what ``GATConv`` and ``GATv2Conv`` do on single edges cannot be left to an operator."""
    if dropout_rate(module) > 0 and capture.is_capturing(like):
        return Refusal("attention dropout in a CUDA graph")
    return edge_module_refusal("attn_drop", module.attn_drop, nn.Dropout) or edge_module_refusal(
        "leaky_relu", module.leaky_relu, nn.LeakyReLU
    )


def dropout_rate(module: Any) -> float:
    """The rate of attention dropout that applies now."""
    dropout = module.attn_drop
    return dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0


class Projected(NamedTuple):
    """Features as attention takes them, as ``GATConv`` and ``EdgeGATConv`` project them.

    Attributes:
        x_src: features of sources by heads, ``[sources, heads, channels]``.
        score_dst: what destinations add to scores, ``[destinations, heads]``; ``None`` where these
            are the sources.
        h_dst: features of destinations before the projection.
    """

    x_src: Tensor
    score_dst: Tensor | None
    h_dst: Tensor

    def scores(self, module: Any) -> tuple[Tensor, Tensor]:
        """The terms of sources and of destinations in scores, ``[nodes, heads]`` each."""
        score_dst = self.score_dst
        if score_dst is None:
            score_dst = scores_of(self.x_src, module.attn_r)
        return scores_of(self.x_src, module.attn_l), score_dst


def projected(module: Any, call: Accepted) -> Projected:
    """The features of a call, projected by its layer."""
    shape = (-1, module._num_heads, module._out_feats)
    h_src = module.feat_drop(call.inputs.src)
    h_dst = h_src if call.shared else module.feat_drop(call.inputs.dst)
    has_one = not hasattr(module, "fc_src")
    x_src = project(module.fc if has_one else module.fc_src, h_src).view(shape)
    if not call.shared:
        lin_dst = module.fc if has_one else module.fc_dst
        score_dst = folded_scores(LINEAR, lin_dst, h_dst, module.attn_r)
        if score_dst is None:
            score_dst = scores_of(project(lin_dst, h_dst).view(shape), module.attn_r)
        return Projected(x_src, score_dst, h_dst)
    if call.num_dst == len(x_src):
        return Projected(x_src, None, h_dst)
    # A block, whose destinations are the first of its sources.
    score_dst = scores_of(x_src[: call.num_dst], module.attn_r)
    return Projected(x_src, score_dst, h_dst[: call.num_dst])


def residual_of(module: Any, h_dst: Tensor) -> Tensor | None:
    """The residual that a layer adds to messages, ``[destinations, heads, channels]``."""
    if module.res_fc is None:
        return None
    return project(module.res_fc, h_dst).view(-1, module._num_heads, module._out_feats)


def scores_of(x: Tensor, att: Tensor) -> Tensor:
    """Products of features by heads with an attention vector, ``[nodes, heads]``."""
    return ops.head_scores(*same_dtype(x, att)).squeeze(0)


def finish(
    module: Any, out: Tensor, others: list[Tensor], alpha: Tensor | None, get_attention: bool
) -> Any:
    """The layer's return value for an operator's output that nothing else refers to.

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
