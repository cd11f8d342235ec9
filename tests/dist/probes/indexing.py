"""Rows that are selected and assigned."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data

from tests.dist.probes.probe import C, D, N, h, m, probe, simple

simple("x[indices]", lambda d: F.cross_entropy(h(d)[m.index], d.y[m.index]))


simple(
    "x[list], x[-1], x[3:50:2], x[:, 2:5]",
    lambda d: (
        d.x[[1, 5, 2]].sum(1) @ torch.ones(3)
        + d.x[-1].sum()
        + h(d)[3:50:2].sum()
        + d.x[:, 2:5].mean()
        + d.x[..., None].max()
    ),
)


simple("x[numbers, classes]", lambda d: h(d)[torch.arange(N), d.y], "__getitem__")


simple("sharded negative index", lambda d: h(d)[d.y - 4])


simple(
    "replicated table at sharded index",
    lambda d: m.weight[d.y].sum(1) + F.embedding(d.y - 0, m.weight).sum(1),
)


simple("one_hot", lambda d: F.one_hot(d.y, C).double().sum(0) + F.one_hot(d.y).double().sum(0))


simple("where of one argument", lambda d: torch.where(d.train_mask)[0], "where")


simple(
    "nonzero of a mask as index",
    lambda d: (
        F.cross_entropy(h(d)[d.train_mask.nonzero().view(-1)], d.y[d.train_mask])
        + d.train_mask.nonzero().sum()
    ),
)


simple(
    "x[x > 0]",
    lambda d: d.x[d.x > 0].sum() + d.x.masked_select(d.x > 1).sum(),
    "__getitem__",
    "masked_select",
)


simple("gather along columns", lambda d: h(d).gather(1, d.y[:, None]).sum(1))


simple(
    "gather of few rows",
    lambda d: h(d).gather(1, torch.zeros(5, 2, dtype=torch.long)).sum(1),
    "gather",
)


simple(
    "entries along columns",
    lambda d: (
        h(d).take_along_dim(h(d).argsort(1), 1)
        * torch.take_along_dim(d.x, torch.arange(N)[:, None].expand(N, D) % D, dim=-1)
    ),
)


simple(
    "entries of a vector",
    lambda d: (
        h(d)[:, 0].gather(0, d.y) * d.x[:, 1].take_along_dim(d.y + C, 0)
        + h(d)[:, 2].take_along_dim(m.order) * m.weight[0].gather(0, d.y)
    ),
    "take_along_dim",
)


@probe("scatter into columns")
def _(d: Data) -> Tensor:
    x, ends = h(d) * 1, d.y[:, None]
    x.scatter_(1, ends, 2.0)
    x.scatter_(1, ends + 1, m.lin(d.x)[:, 3:4])
    x = x.scatter(-1, torch.arange(N)[:, None] % D, d.w) + d.x.scatter(1, ends, value=1)
    return x * torch.zeros_like(d.x).scatter(dim=1, index=h(d).argsort(1), src=h(d))


simple("iteration over rows", lambda d: sum(r.sum() for r in h(d)), "unbind")


simple("loop over classes", lambda d: torch.stack([h(d)[d.y == c].mean(0) for c in range(C)]))


@probe("x[mask] = value")
def _(d: Data) -> Tensor:
    x = h(d).clone()
    x[d.train_mask] = 1.5
    x[~d.train_mask, 0] = 0.0
    x[d.train_mask] += m.lin(d.x[d.train_mask])
    out = d.train_mask.clone()
    out[d.train_mask] = torch.arange(int(d.train_mask.sum())) % 2 == 0
    return x * out[:, None]


@probe("x[index] = rows")
def _(d: Data) -> Tensor:
    x = h(d).clone()
    x[m.index] = torch.arange(20.0 * D).view(20, D)
    x[:, 3] = 7.0
    x[5] = 1.0
    x[-6] = m.weight[0]
    x[2:9] = d.x[2:9]
    x[..., 1] = d.w[:, 0]
    return x


@probe("views of rows are written through")
def _(d: Data) -> Tensor:
    x = h(d).clone()
    x[5] += 1
    x[7].zero_()
    x[10:20] *= 2
    x[20:30].fill_(3.0)
    row = x[31]
    row.add_(m.weight[1])
    x[:, 2:4].zero_()
    x[40:50, 1].sub_(1)
    return x


@probe("rows of a replicated tensor by a sharded mask", "__setitem__")
def _(d: Data) -> Tensor:
    z = torch.zeros(N, D)
    z[d.train_mask] = h(d)[d.train_mask]
    return z


@probe("numbers at sharded positions of a replicated tensor")
def _(d: Data) -> Tensor:
    z, seen = torch.zeros(C, 2), torch.zeros(N, dtype=torch.bool)
    z[d.y[d.train_mask]] = 2.5
    seen[d.edge_index[0] - N] = True
    z[d.y[:0]] = torch.tensor(7.0)
    return z.sum() + seen.double()


simple(
    "index_copy",
    lambda d: (
        h(d).index_copy(0, m.index, d.x[m.index] * 2)
        + torch.zeros(N, D).index_copy(0, d.train_mask.nonzero().view(-1), h(d)[d.train_mask])
    ),
)
