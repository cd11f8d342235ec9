"""The route of ``GatedGCNConv``, whose gates and their sums are one edge program."""

from __future__ import annotations

from typing import Any

from dgl.nn.pytorch import conv
from torch import Tensor

from fastgraph.dgl.calls import Accepted, accepted, edge_values_refusal, program_refusal
from fastgraph.dgl.sizes import WIDE, ProgramWork, of_program
from fastgraph.plugins.patching import Patches
from fastgraph.plugins.refusal import Refusal
from fastgraph.routing.dispatch import Computation, replace_method

_PROGRAM = """
b = gathered {0}
d = gathered {0}
e = row {0}
c = edge {0}
t0 = add d e
t1 = add t0 c
t2 = sigmoid t1
t3 = mul b t2
sum t3
sum t2
edge t1
"""


def install(patches: Patches) -> None:
    """Replace ``GatedGCNConv.forward``, which DGL has from 2.0 on."""
    cls = getattr(conv, "GatedGCNConv", None)
    if cls is not None:
        replace_method(patches, cls, "forward", plan, is_small=of_program(_work))


def _work(module: Any) -> ProgramWork:
    width = module.C.out_features
    return ProgramWork(width, has_wide_edges=True, gains_in_training=width >= WIDE)


def plan(module: Any, graph: Any, feat: Any, edge_feat: Any) -> Computation | Refusal:
    """The forward pass of a call, or the reason to leave it to upstream."""
    if isinstance(feat, tuple):
        return Refusal("a pair of features")
    call = accepted(module, "edge_program", graph, feat)
    if isinstance(call, Refusal):
        return call
    if graph.is_block or graph._graph.number_of_ntypes() != 1:
        return Refusal("two kinds of nodes, of which DGL's code takes one")
    refusal = program_refusal(module, call) or edge_values_refusal(
        "edge_feat", edge_feat, call, (None,)
    )
    return refusal or (lambda: _forward(module, call, edge_feat))


def _forward(module: Any, call: Accepted, edge_feat: Tensor) -> tuple[Tensor, Tensor]:
    x = call.inputs.src
    own = module.A(x)
    given = {"b": module.B(x), "d": module.D(x), "e": module.E(x), "c": module.C(edge_feat)}
    program = _PROGRAM.format(own.shape[1])
    gated, gates, of_edges = call.program(program, given)
    out = own + gated / (gates + 1e-6)
    if module.batch_norm:
        out, of_edges = module.bn_node(out), module.bn_edge(of_edges)
    if module.activation:
        out, of_edges = module.activation(out), module.activation(of_edges)
    if module.residual:
        out, of_edges = x + out, edge_feat + of_edges
    return module.dropout(out), module.dropout(of_edges)
