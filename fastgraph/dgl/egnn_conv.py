"""The route of ``EGNNConv``: the MLPs of its messages run within an edge program."""

from __future__ import annotations

import types
from typing import Any

import torch
from dgl.nn.pytorch.conv import EGNNConv
from torch import Tensor

from fastgraph.dgl.calls import accepted, edge_values_refusal, program_refusal
from fastgraph.dgl.sizes import WIDE, ProgramWork, of_program
from fastgraph.dgl.traced import plan_of_layer
from fastgraph.plugins.patching import Patches
from fastgraph.plugins.refusal import Refusal
from fastgraph.routing.dispatch import Computation, replace_method


def install(patches: Patches) -> None:
    """Replace ``EGNNConv.forward``."""
    replace_method(patches, EGNNConv, "forward", plan, is_small=of_program(_work))


def _work(module: EGNNConv) -> ProgramWork:
    width = module.hidden_size
    return ProgramWork(width, gains_in_training=width >= WIDE)


def _message(self: EGNNConv, edges: Any) -> dict[str, Tensor]:
    difference = edges.src["x"] - edges.dst["x"]
    radial = difference.square().sum(dim=1).unsqueeze(-1)
    parts = [edges.src["h"], edges.dst["h"], radial]
    if self.edge_feat_size > 0:
        parts.append(edges.data["a"])
    hidden = self.edge_mlp(torch.cat(parts, dim=-1))
    unit = difference / (radial.sqrt() + 1e-30)
    return {"x": self.coord_mlp(hidden) * unit, "h": hidden}


def _reduce(self: EGNNConv, nodes: Any) -> dict[str, Tensor]:
    return {"x": nodes.mailbox["x"].mean(dim=1), "h": nodes.mailbox["h"].sum(dim=1)}


def plan(
    module: EGNNConv, graph: Any, node_feat: Any, coord_feat: Any, edge_feat: Any = None
) -> Computation | Refusal:
    """The forward pass of a call, or the reason to leave it to upstream."""
    if isinstance(node_feat, tuple):
        return Refusal("a pair of features")
    if type(module).message is not EGNNConv.message or "message" in vars(module):
        return Refusal("message is overridden")
    call = accepted(module, "edge_program", graph, node_feat)
    if isinstance(call, Refusal):
        return call
    if graph.is_block or graph._graph.number_of_ntypes() != 1:
        return Refusal("two kinds of nodes, of which DGL's code takes one")
    refusal = program_refusal(module, call) or _coordinates_refusal(coord_feat, node_feat)
    if refusal is None and module.edge_feat_size > 0:
        refusal = edge_values_refusal("edge_feat", edge_feat, call, (module.edge_feat_size,))
    if refusal is not None:
        return refusal
    of_nodes = {"h": node_feat, "x": coord_feat}
    given = {"src": of_nodes, "dst": of_nodes}
    if module.edge_feat_size > 0:
        given["data"] = {"a": edge_feat}
    message, reduce = (types.MethodType(function, module) for function in (_message, _reduce))
    reduced = plan_of_layer(graph, message, reduce, given)
    if isinstance(reduced, Refusal):
        return reduced

    def compute() -> tuple[Tensor, Tensor]:
        found = reduced()
        out = module.node_mlp(torch.cat([node_feat, found["h"]], dim=-1))
        return out, coord_feat + found["x"]

    return compute


def _coordinates_refusal(coordinates: Any, like: Tensor) -> Refusal | None:
    is_tensor = type(coordinates) is type(like)
    if not is_tensor or coordinates.dim() != 2 or len(coordinates) != len(like):
        return Refusal("coordinates that are not a matrix with a row for each node")
    if coordinates.dtype != like.dtype or coordinates.device != like.device:
        return Refusal("coordinates with another dtype or device than features")
    if coordinates.layout != torch.strided or coordinates.shape[1] == 0:
        return Refusal("coordinates that are not dense")
    return None
