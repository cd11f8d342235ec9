"""The route of ``APPNPConv``: sums without the ones that DGL multiplies every message by.

DGL makes a weight for each edge, so that some can be dropped. Where none are, as in evaluation, its
steps are sums of features that are scaled by degree. What has no such route is DGL's own
``forward``, whose sums take the route of message passing.
"""

from __future__ import annotations

from typing import Any

import torch
from dgl.nn.pytorch.conv import APPNPConv
from torch import Tensor, nn

from fastgraph.dgl.calls import Accepted, accepted
from fastgraph.dgl.modules import edge_module_refusal
from fastgraph.dgl.normalisation import edge_weights, node_scales
from fastgraph.graphs.edges import Grouped
from fastgraph.layers.constant import summed
from fastgraph.ops.library import is_defined_by
from fastgraph.plugins.patching import Patches
from fastgraph.plugins.refusal import Refusal
from fastgraph.routing.dispatch import Computation, replace_method


def install(patches: Patches) -> None:
    """Replace ``APPNPConv.forward``."""
    replace_method(patches, APPNPConv, "forward", plan)


def plan(
    module: APPNPConv, graph: Any, feat: Any, edge_weight: Tensor | None = None
) -> Computation | None:
    """The forward pass of a call, or ``None`` where it is left to message passing."""
    if edge_weight is not None or isinstance(feat, tuple) or _drops(module.edge_drop):
        return None
    steps, alpha = module._k, module._alpha
    if type(steps) is not int or type(alpha) not in (int, float):
        return None
    call = accepted(module, "spmm", graph, feat)
    if isinstance(call, Refusal) or len(graph.ntypes) != 1 or is_defined_by(feat):
        return None
    # The ones have torch's default dtype, and DGL's kernels take features of the same alone.
    if feat.shape[1] == 0 or feat.dtype != torch.get_default_dtype():
        return None
    relation = call.relation(numbered=False)
    if not isinstance(relation, Grouped):
        return None
    return lambda: _forward(call, relation, steps, alpha)


def _drops(module: Any) -> bool:
    """True if edges may be dropped, or somebody sees the weights."""
    if edge_module_refusal("edge_drop", module, nn.Dropout) is not None:
        return True
    return bool(module.training and module.p != 0)


def _forward(call: Accepted, relation: Grouped, steps: int, alpha: float) -> Tensor:
    first = x = call.inputs.src
    edges, num_nodes = relation.edges, call.num_dst
    # Weights are read along each edge, and scales at each channel of a node.
    if call.structure.num_edges < x.numel():
        weight = edge_weights(relation, "both", x.dtype)
        for _ in range(steps):
            x = summed(x, edges, weight, "sum", num_nodes, is_private=True)
            x = x * (1 - alpha) + alpha * first
        return x
    of_sources, of_destinations = node_scales(relation, "both", x.dtype)
    assert of_destinations is not None  # by both degrees
    of_destinations = of_destinations * (1 - alpha)
    for _ in range(steps):
        x = summed(x * of_sources, edges, None, "sum", num_nodes, is_private=True)
        x = x * of_destinations + alpha * first
    return x
