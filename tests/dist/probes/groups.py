"""Operations of PyG on the rows of a group at once: the edges of a node, the nodes of a graph."""

from __future__ import annotations

import torch
import torch_geometric.nn as gnn
import torch_geometric.utils as pyg
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import aggr

from tests.dist.probes.probe import C, D, N, h, m, probe, simple


def by_destination(d: Data) -> tuple[Tensor, Tensor]:
    """Messages, many of them equal, and the nodes they are for, in ascending order."""
    order = d.edge_index[1].argsort(stable=True)  # as a script does once
    messages = h(d).round(decimals=1)[d.edge_index[0]] * d.edge_attr[:, :1].round()
    return messages[order], d.edge_index[1][order]


def _aggregations() -> None:
    for name in ("median", "lower quantiles", "linear quantiles"):
        simple(
            f"{name} of edges",
            lambda d, name=name: m.groups[name](
                h(d).round(decimals=1)[d.edge_index[0]], d.edge_index[1], dim_size=N
            ),
        )
    for name in ("lstm", "gru", "sorted"):
        simple(
            f"{name} of sorted edges",
            lambda d, name=name: m.groups[name](*by_destination(d), dim_size=N),
            "argsort",
        )


_aggregations()

simple(
    "median of classes, which no rank has alone",
    lambda d: m.groups["median"](h(d), d.y, dim_size=C),
    "sort",
    "take_along_dim",
)


@probe("median of a dimension that is not the first")
def _(d: Data) -> Tensor:
    messages = h(d)[d.edge_index[0]]
    both = torch.stack([messages, messages * d.edge_attr[:, :1]])
    return m.groups["linear quantiles"](both, d.edge_index[1], dim_size=N, dim=1).sum(0)


@probe("classes as unit vectors")
def _(d: Data) -> Tensor:
    vectors = pyg.one_hot(d.y, dtype=torch.float64) * h(d)[:, :C]
    return vectors + pyg.one_hot(d.y, C, dtype=torch.float64)


@probe("one set as a dense batch")
def _(d: Data) -> Tensor:
    x, mask = pyg.to_dense_batch(h(d), torch.zeros(N, dtype=torch.int64))
    return x[mask] + x.sum((0, 1))


@probe("masks of several dimensions")
def _(d: Data) -> Tensor:
    x, batch = h(d) * 1, (h(d) * 2)[None]
    x[d.x > 1] = 0.5
    x[(d.w > 0.5).expand(N, D)] = m.weight[0, 0]
    batch[d.train_mask[None]] = 0.25
    batch[torch.arange(N)[None] % 5 == 0] = torch.tensor(0.75)
    columns = (h(d) * 3).t().contiguous()
    columns[(d.x < 0).t()] = 2.0
    return x + batch[0] * columns.t()


@probe("rows at a table of indices")
def _(d: Data) -> Tensor:
    table = torch.stack([d.y, d.y + 3, d.y * 2], 1)
    return h(d)[table].mean(1) + m.weight[table - C][:, 1]


@probe("label propagation")
def _(d: Data) -> Tensor:
    found = gnn.LabelPropagation(2, 0.5)(d.y, d.edge_index, d.train_mask)
    return found * h(d)[:, :C]


@probe("correct and smooth")
def _(d: Data) -> Tensor:
    layer, mask = gnn.CorrectAndSmooth(2, 0.5, 2, 0.5), d.train_mask
    guesses = h(d)[:, :C].softmax(1)
    corrected = layer.correct(guesses, d.y[mask], mask, d.edge_index)
    return layer.smooth(corrected, d.y[mask], mask, d.edge_index) * guesses


def _layers() -> None:
    for name in ("FastRGCNConv", "RGCNConv", "GPS performer", "SAGE median"):
        types = {"RGCNConv": 1, "FastRGCNConv": 1}.get(name, 0)
        simple(
            name,
            lambda d, name=name, types=types: m.layers[name](
                h(d), d.edge_index, *[(d.edge_attr[:, 0] > 0).long()] * types
            ),
        )


_layers()


@probe("SGFormer on one graph")
def _(d: Data) -> Tensor:
    return m.layers["SGFormer"](h(d), d.edge_index, torch.zeros(N, dtype=torch.int64))


simple(
    "a dense batch of several graphs",
    lambda d: pyg.to_dense_batch(h(d), m.batch)[0].sum((1, 2)),
    "__setitem__",
)


@probe("edges dropped in pairs")
def _(d: Data) -> Tensor:
    edges, kept = pyg.dropout_edge(d.edge_index, 0.3, force_undirected=True)
    messages = h(d)[edges[0]] * d.edge_attr[kept, :1]
    return pyg.scatter(messages, edges[1], 0, N)


@probe("edges dropped in pairs, of which none or one is left")
def _(d: Data) -> Tensor:
    none = pyg.dropout_edge(d.edge_index, 1.0, force_undirected=True)
    few = d.edge_index[:, :1]
    one = pyg.dropout_edge(few, 1e-9, force_undirected=True)
    shapes = [list(x.shape) for x in (*none, *one)]
    return h(d) * sum(i * size for i, size in enumerate(sum(shapes, [1.0])))


def with_zeros(d: Data) -> Tensor:
    """Rows of which some have one zero, and some groups two."""
    return h(d) * (d.x[:, :1] > -1.0)


simple("products of rows", lambda d: aggr.MulAggregation()(with_zeros(d), m.batch, dim_size=3))
simple("products of classes", lambda d: aggr.MulAggregation()(with_zeros(d), d.y, dim_size=C))
simple(
    "products for sources, which other ranks have",
    lambda d: aggr.MulAggregation()(
        (with_zeros(d) * 0.1 + 1)[d.edge_index[1]], d.edge_index[0], dim_size=N
    ),
)


@probe("products of columns, into what is there already")
def _(d: Data) -> Tensor:
    index = d.edge_index[0].expand(D, -1)
    values = (h(d).t() * 0.1 + 1)[:, d.edge_index[1]]
    return (h(d).t() + 1.5).scatter_reduce(1, index, values, "prod").t()
