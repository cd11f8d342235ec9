"""The route of ``EdgeConv``, whose messages are linear maps of differences."""

from __future__ import annotations

import types
from typing import Any

from dgl import function
from dgl.nn.pytorch.conv import EdgeConv
from torch import Tensor

from fastgraph.dgl.calls import accepted, program_refusal
from fastgraph.dgl.sizes import WIDE, ProgramWork, of_program
from fastgraph.dgl.traced import plan_of_layer
from fastgraph.layers.sums import first_rows
from fastgraph.plugins.patching import Patches
from fastgraph.plugins.refusal import Refusal
from fastgraph.routing.dispatch import Computation, replace_method


def install(patches: Patches) -> None:
    """Replace ``EdgeConv.forward``."""
    replace_method(patches, EdgeConv, "forward", plan, is_small=of_program(_work))


def _work(module: EdgeConv) -> ProgramWork:
    width = max(module.theta.weight.shape)
    return ProgramWork(width, has_winners=True, gains_in_training=width >= WIDE)


def _message(self: EdgeConv, edges: Any) -> dict[str, Tensor]:
    x = edges.dst["x"]
    return {"m": self.theta(x - edges.src["x"]) + self.phi(x)}


def plan(module: EdgeConv, g: Any, feat: Any) -> Computation | Refusal:
    """The forward pass of a call, or the reason to leave it to upstream."""
    if module.batch_norm:
        return Refusal("batch statistics of all edges")
    call = accepted(module, "edge_program", g, feat)
    if isinstance(call, Refusal):
        return call
    refusal = program_refusal(module, call)
    if refusal is not None:
        return refusal
    source, destination = call.inputs
    given = {"src": {"x": source}, "dst": {"x": first_rows(destination, call.num_dst)}}
    largest = plan_of_layer(g, types.MethodType(_message, module), function.max("m", "out"), given)
    if isinstance(largest, Refusal):
        return largest

    def compute() -> Tensor:
        out = largest()["out"]
        return out.masked_fill(out.isinf(), 0)  # as upstream, of nodes without edges

    return compute
