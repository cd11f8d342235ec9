"""The usual call of a model with a graph, and the usual loss of its output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from fastgraph.dist.graphs.dgl import is_dgl_graph
from fastgraph.dist.graphs.protocols import AnyGraph, Attribute

Output = Any  # of a model, whatever its loss takes
Forward = Callable[[nn.Module, Any], Output]  # and a graph of PyG or DGL
Loss = Callable[[Output, Any], Tensor]  # and the graph


def usual_forward(model: nn.Module, data: AnyGraph) -> Output:
    """A call with features and edges."""
    if is_dgl_graph(data):
        return model(data, attribute(data, *FEATURES))
    if len(data.node_stores) > 1 or data.node_stores[0]._key is not None:
        return model(data.x_dict, data.edge_index_dict)
    return model(data.x, data.edge_index)


FEATURES, LABELS = ("feat", "x"), ("label", "y")
"""Under which they are looked for in the frames of a graph of DGL; in PyG it is the last one."""


def attribute(data: AnyGraph, *names: str) -> Attribute:
    """The first of these attributes that nodes have; ``None`` for several types of nodes."""
    if is_dgl_graph(data):
        of_nodes = data.ndata if len(data.ntypes) == 1 else {}
        return next((of_nodes[name] for name in names if name in of_nodes), None)
    is_one = len(data.node_stores) == 1 and data.node_stores[0]._key is None
    return data.get(names[-1]) if is_one else None


def usual_loss(out: Tensor, data: AnyGraph) -> Tensor:
    """Cross entropy or mean squared error, of the nodes to train on."""
    target, mask = attribute(data, *LABELS), attribute(data, "train_mask")
    if mask is not None:
        out, target = out[mask], target[mask]
    return F.mse_loss(out, target) if target.is_floating_point() else F.cross_entropy(out, target)
