"""The route of ``DotGatConv``."""

from __future__ import annotations

from typing import Any

from dgl.nn.pytorch.conv import DotGatConv

from fastgraph import ops
from fastgraph.dgl.calls import Accepted, accepted
from fastgraph.dgl.modules import project
from fastgraph.layers.sums import first_rows
from fastgraph.plugins.patching import Patches
from fastgraph.plugins.refusal import Refusal
from fastgraph.routing.dispatch import Computation, replace_method


def install(patches: Patches) -> None:
    """Replace ``DotGatConv.forward``."""
    replace_method(patches, DotGatConv, "forward", plan)


def plan(
    module: DotGatConv, graph: Any, feat: Any, get_attention: bool = False
) -> Computation | Refusal:
    """The forward pass of a call, or the reason to leave it to upstream."""
    call = accepted(module, "attention", graph, feat)
    if isinstance(call, Refusal):
        return call
    if call.shared == hasattr(module, "fc_src"):
        return Refusal("features in another form than the layer was made for")
    if not call.shared and graph._graph.number_of_ntypes() == 1:
        return Refusal(
            "a pair of features of the same nodes, of which DGL's code uses the second only"
        )
    return lambda: _forward(module, call, bool(get_attention))


def _forward(module: DotGatConv, call: Accepted, get_attention: bool) -> Any:
    shape = (-1, module._num_heads, module._out_feats)
    if call.shared:
        x_src = project(module.fc, call.inputs.src).view(shape)
        x_dst = first_rows(x_src, call.num_dst)
    else:
        x_src = project(module.fc_src, call.inputs.src).view(shape)
        x_dst = project(module.fc_dst, call.inputs.dst).view(shape)
    edges = call.edges(numbered=get_attention)
    out, alpha, _ = ops.attention(
        x_dst, x_src, x_src, edges.index, ptr=edges.ptr, need_weights=get_attention
    )
    return (out, alpha.unsqueeze(-1)) if alpha is not None else out
