"""The route of ``CFConv``, whose MLP of features of edges is part of an edge program."""

from __future__ import annotations

import types
from typing import Any

from dgl import function
from dgl.nn.pytorch.conv import CFConv
from torch import Tensor

from fastgraph.dgl.calls import accepted, edge_values_refusal, program_refusal
from fastgraph.dgl.sizes import ProgramWork, of_program
from fastgraph.dgl.traced import plan_of_layer
from fastgraph.plugins.patching import Patches
from fastgraph.plugins.refusal import Refusal
from fastgraph.routing.dispatch import Computation, replace_method


def install(patches: Patches) -> None:
    """Replace ``CFConv.forward``."""
    replace_method(patches, CFConv, "forward", plan, is_small=of_program(_work))


def _work(module: CFConv) -> ProgramWork:
    width = module.project_node.out_features
    return ProgramWork(width, has_wide_edges=True, gains_in_training=False)


def _message(self: CFConv, edges: Any) -> dict[str, Tensor]:
    return {"m": self.project_node(edges.src["x"]) * self.project_edge(edges.data["e"])}


def plan(module: CFConv, g: Any, node_feats: Any, edge_feats: Any) -> Computation | Refusal:
    """The forward pass of a call, or the reason to leave it to upstream."""
    call = accepted(module, "edge_program", g, node_feats)
    if isinstance(call, Refusal):
        return call
    refusal = program_refusal(module, call) or edge_values_refusal(
        "edge_feats", edge_feats, call, (None,)
    )
    if refusal is not None:
        return refusal
    given = {"src": {"x": call.inputs.src}, "data": {"e": edge_feats}}
    summed = plan_of_layer(g, types.MethodType(_message, module), function.sum("m", "out"), given)
    if isinstance(summed, Refusal):
        return summed
    return lambda: module.project_out(summed()["out"])
