"""Messages, pooling and what PyG computes of edges."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
import torch_geometric.utils as pyg
from torch import Tensor
from torch_geometric.data import Data

from tests.dist.probes.probe import C, D, N, h, m, probe, simple

simple(
    "pooling by a replicated batch",
    lambda d: (
        gnn.global_mean_pool(h(d), m.batch).sum(1)
        + gnn.global_add_pool(h(d), m.batch)[0].sum()
        + gnn.global_add_pool(h(d), None).sum()
    ),
)


simple("max pooling", lambda d: gnn.global_max_pool(h(d), m.batch))


@probe("extrema among ties, with and without those that were there")
def _(d: Data) -> Tensor:
    values, start = h(d).round(decimals=1), m.weight[:C, :1] * 0.0 + 0.3
    found = [
        # The last class is nobody's.
        start.expand(C, D).scatter_reduce(0, target, values, kind, include_self=own)
        for kind in ("amax", "amin")
        for own in (True, False)
        for target in [d.y.clamp(max=C - 2)[:, None].expand(-1, D)]
    ]
    places = d.edge_index[0]
    of_nodes = d.w[:, 0] + h(d)[:, 0] * 0.0
    scores = h(d).round(decimals=1)[:, 1][d.edge_index[1]]
    of_sources = of_nodes.scatter_reduce(0, places, scores, "amin", include_self=True)
    return torch.stack(found).sum((0, 2)).sum() + of_sources


simple("pooling by a sharded batch", lambda d: gnn.global_mean_pool(h(d), d.y, size=C).sum(1))


simple("degree", lambda d: pyg.degree(d.edge_index[1], N) + pyg.degree(d.edge_index[0], N))


simple(
    "homophily, isolated nodes",
    lambda d: torch.tensor(
        pyg.homophily(d.edge_index, d.y) + pyg.contains_isolated_nodes(d.edge_index, N)
    ),
    "__setitem__",
    "unique",
)


simple(
    "dense adjacency",
    lambda d: pyg.to_dense_adj(d.edge_index, max_num_nodes=N)[0].sum(),
)


simple(
    "own messages",
    lambda d: pyg.scatter(
        h(d)[d.edge_index[0]] * d.edge_attr[:, :1], d.edge_index[1], 0, N, "mean"
    ),
)


simple(
    "own messages to sources",
    lambda d: torch.zeros(N, D).index_add_(0, d.edge_index[0], h(d)[d.edge_index[1]]),
)


simple(
    "maxima for sources",
    lambda d: pyg.scatter(h(d)[d.edge_index[1]], d.edge_index[0], 0, N, "max"),
)


simple(
    "edge softmax",
    lambda d: pyg.softmax(
        d.edge_attr[:, 0] * h(d)[d.edge_index[0]].sum(1), d.edge_index[1], num_nodes=N
    ),
)


simple(
    "permuted rows, then messages",
    lambda d: pyg.scatter(h(d)[m.order][d.edge_index[0]], d.edge_index[1], 0, N, "sum"),
)


simple(
    "subgraph",
    lambda d: (lambda s: s.x.sum(0) + s.num_edges + s.edge_index.sum())(d.subgraph(d.train_mask)),
    "__setitem__",
    "view",
)


simple(
    "k-hop subgraph",
    lambda d: pyg.k_hop_subgraph(3, 2, d.edge_index, num_nodes=N)[0].double().sum(),
    "unique",
    "__setitem__",
)


simple(
    "coalesce",
    lambda d: pyg.coalesce(d.edge_index),
    "add_",
    "__setitem__",
)


simple(
    "self-loops, undirected",
    lambda d: (
        pyg.add_remaining_self_loops(d.edge_index, d.edge_weight, num_nodes=N)[1].sum()
        + pyg.to_undirected(d.edge_index).double().sum()
    ),
    "add_",
    "__setitem__",
)


@probe("negative sampling and a link loss", "numpy")
def _(d: Data) -> Tensor:
    random.seed(0)
    negative = pyg.negative_sampling(d.edge_index, N, 50)
    z = h(d)
    s = (z[negative[0]] * z[negative[1]]).sum(-1)
    p = (z[d.edge_index[0]] * z[d.edge_index[1]]).sum(-1)
    scores = torch.cat([s, p])
    labels = torch.cat([s.new_zeros(s.size(0)), torch.ones(p.size(0))])
    loss = F.binary_cross_entropy_with_logits(scores, labels)
    return loss + gnn.GAE(None).recon_loss(z, d.edge_index, negative)
