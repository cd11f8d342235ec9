"""The route of ``NNConv``, whose messages are products with a matrix of each edge.

A linear map makes this matrix of a few values of the edge. So an edge program sums the products of
these values with features, and the map follows the sum: no matrix of an edge is stored.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from dgl import function
from dgl.nn.pytorch.conv import NNConv
from torch import Tensor

from fastgraph.dgl.calls import accepted, edge_values_refusal, program_refusal
from fastgraph.dgl.sizes import ProgramWork, of_program
from fastgraph.dgl.traced import plan_of_layer
from fastgraph.layers.sums import first_rows
from fastgraph.plugins.patching import Patches
from fastgraph.plugins.refusal import Refusal
from fastgraph.routing.dispatch import Computation, replace_method

_REDUCTIONS = {function.sum: "sum", function.mean: "mean"}
"""A map of the sum over edges is not one of their maxima."""


def install(patches: Patches) -> None:
    """Replace ``NNConv.forward``."""
    replace_method(patches, NNConv, "forward", plan, is_small=of_program(_work))


def _work(module: NNConv) -> ProgramWork:
    return ProgramWork(module._in_src_feats * module._out_feats)


def _message(self: NNConv, edges: Any) -> dict[str, Tensor]:
    matrix = self.edge_func(edges.data["e"]).view(-1, self._in_src_feats, self._out_feats)
    return {"m": torch.matmul(edges.src["h"].unsqueeze(1), matrix).squeeze(1)}


def plan(module: NNConv, graph: Any, feat: Any, efeat: Any) -> Computation | Refusal:
    """The forward pass of a call, or the reason to leave it to upstream."""
    if module.reducer not in _REDUCTIONS:
        return Refusal("maxima of products with matrices of edges")
    call = accepted(module, "edge_program", graph, feat)
    if isinstance(call, Refusal):
        return call
    if call.inputs.src.shape[1] != module._in_src_feats:
        return Refusal(
            f"features of {call.inputs.src.shape[1]} channels for {module._in_src_feats}"
        )
    refusal = program_refusal(module, call) or edge_values_refusal("efeat", efeat, call, (None,))
    if refusal is not None:
        return refusal
    features = {"src": {"h": call.inputs.src}, "data": {"e": efeat}}
    summed = plan_of_layer(
        graph, types.MethodType(_message, module), module.reducer("m", "out"), features
    )
    if isinstance(summed, Refusal):
        return summed

    def compute() -> Tensor:
        out = summed()["out"]
        if module.res_fc is not None:
            out = out + module.res_fc(first_rows(call.inputs.dst, call.num_dst))
        return out if module.bias is None else out + module.bias

    return compute
