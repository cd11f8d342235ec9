"""The route of ``EGATConv``: features of edges, their scores and attention by one edge program."""

from __future__ import annotations

from typing import Any

from dgl.nn.pytorch.conv import EGATConv
from torch import Tensor

from fastgraph.dgl.calls import Accepted, accepted, edge_values_refusal, program_refusal
from fastgraph.dgl.sizes import WIDE, ProgramWork, of_program
from fastgraph.plugins.patching import Patches
from fastgraph.plugins.refusal import Refusal
from fastgraph.routing.dispatch import Computation, replace_method

_PROGRAM = """
u = gathered {made}
v = row {made}
f = edge {made}
bias = parameter {made}
att = parameter {made}
x = gathered {summed}
t0 = add u v
t1 = add t0 f
t2 = add t1 bias
t3 = constant 0.01
t4 = leaky_relu t2 t3
t5 = dot t4 att {heads}
softmax x t5
edge t4
"""


def install(patches: Patches) -> None:
    """Replace ``EGATConv.forward``."""
    replace_method(patches, EGATConv, "forward", plan, is_small=of_program(_work))


def _work(module: EGATConv) -> ProgramWork:
    width = module._num_heads * max(module._out_node_feats, module._out_edge_feats)
    return ProgramWork(width, has_wide_edges=True, gains_in_training=width >= WIDE)


def plan(
    module: EGATConv,
    graph: Any,
    nfeats: Any,
    efeats: Any,
    edge_weight: Any = None,
    get_attention: bool = False,
) -> Computation | Refusal:
    """The forward pass of a call, or the reason to leave it to upstream."""
    if edge_weight is not None or get_attention:
        return Refusal("weights of edges beside attention, or attention that is returned")
    call = accepted(module, "edge_program", graph, nfeats)
    if isinstance(call, Refusal):
        return call
    if call.shared and call.num_dst != call.structure.num_src:
        return Refusal("one tensor of features for two kinds of nodes")
    refusal = program_refusal(module, call) or edge_values_refusal("efeats", efeats, call, (None,))
    if refusal is None and call.structure.plain().lonely is not None:
        refusal = Refusal("nodes without incoming edges, which the layer does not allow")
    return refusal or (lambda: _forward(module, call, efeats))


def _forward(module: EGATConv, call: Accepted, efeats: Tensor) -> tuple[Tensor, Tensor]:
    source, destination = call.inputs
    of_sources, of_destinations = module.fc_ni(source), module.fc_nj(destination)
    of_edges = module.fc_fij(efeats)
    bias = module.bias
    # DGL's gradients need neither the bias nor the output, which callers may edit.
    bias = module.attn.new_zeros(of_edges.shape[1]) if bias is None else bias.clone()
    given = {
        "u": of_sources,
        "v": of_destinations,
        "f": of_edges,
        "bias": bias,
        "att": module.attn,
        "x": module.fc_node_src(source),
    }
    heads = module._num_heads
    sizes = {"made": of_edges.shape[1], "summed": given["x"].shape[1], "heads": heads}
    out, made = call.program(_PROGRAM.format(**sizes), given)
    if out.requires_grad:
        out = out.clone()
    return (
        out.view(-1, heads, module._out_node_feats),
        made.view(-1, heads, module._out_edge_feats),
    )
