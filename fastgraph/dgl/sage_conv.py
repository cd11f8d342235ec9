"""The route of ``SAGEConv``: ``mean``, ``gcn`` and ``pool``.

Nothing stands between an operator and the dense products: DGL divides, looks for maxima of nobody
and adds in passes over the features of all nodes. What has no such route is DGL's own ``forward``,
whose aggregation takes the route of message passing.
"""

from __future__ import annotations

from typing import Any

from dgl.nn.pytorch.conv import SAGEConv
from torch import Tensor

from fastgraph import ops
from fastgraph.dgl.calls import Accepted, accepted, one_for_each_edge
from fastgraph.dgl.conditions import last_wins
from fastgraph.dgl.index_objects import is_tiny_graph
from fastgraph.dgl.modules import LINEAR, project
from fastgraph.dgl.normalisation import with_itself
from fastgraph.dgl.sizes import POOLING, SUM_WITH_ITSELF, of_layer
from fastgraph.layers.constant import summed
from fastgraph.layers.sums import add_to, first_rows
from fastgraph.plugins.patching import Patches
from fastgraph.plugins.refusal import Refusal
from fastgraph.routing.dispatch import Computation, replace_method

_IS_SMALL = {
    "gcn": of_layer(SUM_WITH_ITSELF, lambda module: module._in_src_feats),
    "pool": of_layer(POOLING, lambda module: module._in_src_feats),
}
"""By aggregator; what upstream computes then is too small for message passing, too."""


def install(patches: Patches) -> None:
    """Replace ``SAGEConv.forward``."""
    replace_method(patches, SAGEConv, "forward", plan)


def plan(
    module: SAGEConv, graph: Any, feat: Any, edge_weight: Tensor | None = None
) -> Computation | None:
    """The forward pass of a call, or ``None`` where it is left to message passing."""
    kind = module._aggre_type
    if kind not in ("mean", "gcn", "pool"):
        return None
    if kind in _IS_SMALL and is_tiny_graph(graph):
        return None
    if kind in _IS_SMALL and _IS_SMALL[kind](module, (graph, feat), {}):
        return None
    call = accepted(module, "segment_reduce" if kind == "pool" else "spmm", graph, feat)
    # Without edges DGL computes something else, in float32.
    if isinstance(call, Refusal) or call.structure.num_edges == 0:
        return None
    if (kind == "gcn" and not call.shared) or not _fits(module, call):
        return None
    if edge_weight is None:
        return lambda: _forward(module, call, None)
    if kind != "mean":
        return None
    flat = one_for_each_edge("edge_weight", edge_weight, call)
    return None if isinstance(flat, Refusal) else lambda: _forward(module, call, flat)


def _fits(module: SAGEConv, call: Accepted) -> bool:
    """True if features have the channels and the dtype of the layer.

    For others DGL raises an error, that of a product of other matrices than those of the route.
    """
    src, dst = call.inputs
    if src.shape[1] != module._in_src_feats or src.shape[1] == 0:
        return False
    if not call.shared and dst.shape[1] != module._in_dst_feats:
        return False
    weight = module.fc_neigh._parameters.get("weight")  # of a program's own module, maybe none
    return weight is None or weight.dtype == src.dtype == dst.dtype


def _forward(module: SAGEConv, call: Accepted, edge_weight: Tensor | None) -> Tensor:
    kind = module._aggre_type
    h_src = module.feat_drop(call.inputs.src)
    h_dst = h_src if call.shared else module.feat_drop(call.inputs.dst)
    is_mean = kind != "pool"
    is_narrowing = is_mean and module._in_src_feats > module._out_feats
    out = None
    if kind != "gcn" and not _is_watched(module):
        if call.shared:  # in a block the destinations are the first of its sources
            h_src, out = LINEAR.project_first(module.fc_self, h_src, call.num_dst)
        else:
            out = project(module.fc_self, h_dst)
    if is_mean:
        x = project(module.fc_neigh, h_src) if is_narrowing else h_src
        neighbours = _mean(module, call, x, edge_weight)
    else:
        neighbours = _pooled(module, call, h_src)
    if out is None:
        out = neighbours if is_narrowing else project(module.fc_neigh, neighbours)
        if kind != "gcn":
            out = module.fc_self(first_rows(h_dst, call.num_dst)) + out
        elif module.bias is not None:
            out = out + module.bias
    elif is_narrowing:
        out = add_to(out, neighbours)
    else:
        out = LINEAR.add_projection(out, module.fc_neigh, neighbours)
    if module.activation is not None:
        out = module.activation(out)
    return out if module.norm is None else module.norm(out)


def _is_watched(module: SAGEConv) -> bool:
    """True if somebody may see in which order modules are called, and what they return."""
    names = ("fc_self", "fc_neigh", "fc_pool")
    return any(not LINEAR.knows(m) for n in names if (m := module._modules.get(n)) is not None)


def _mean(module: SAGEConv, call: Accepted, x: Tensor, edge_weight: Tensor | None) -> Tensor:
    if module._aggre_type == "gcn":
        edges = with_itself(call.structure).edges
    else:
        edges = call.edges(numbered=edge_weight is not None)
    is_multiplied = module._in_src_feats <= module._out_feats and LINEAR.knows(module.fc_neigh)
    return summed(x, edges, edge_weight, "mean", call.num_dst, is_private=is_multiplied)


def _pooled(module: SAGEConv, call: Accepted, x: Tensor) -> Tensor:
    x = project(module.fc_pool, x)
    x = x.relu_() if LINEAR.knows(module.fc_pool) else x.relu()
    edges = call.structure.backwards().edges if last_wins(x) else call.edges(numbered=False)
    return ops.segment_reduce(
        x, edges.index, ptr=edges.ptr, num_out=call.num_dst, reduce="max", ties="winner"
    )
