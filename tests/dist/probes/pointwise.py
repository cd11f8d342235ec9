"""Operations on one element, or one of each operand, at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import torch_geometric.utils as pyg
from torch import Tensor
from torch_geometric.data import Data

from tests.dist.probes.probe import D, N, h, m, probe, simple

simple(
    "dropout of nothing",
    lambda d: (
        F.dropout(h(d), 0.0).sum()
        + F.dropout(h(d), 0.5, training=False).sum()
        + pyg.dropout_edge(d.edge_index, 0.0)[0].sum()
    ),
)


simple(
    "where, allclose, equal",
    lambda d: (
        torch.where(d.train_mask[:, None], h(d), torch.zeros(1)).sum(1)
        + float(torch.equal(d.x, d.x))
        + float(torch.allclose(d.x, d.x + 1))
    ),
)


simple("functions of another name in torch", lambda d: F.logsigmoid(h(d)).sum(1))


simple(
    "logic of masks",
    lambda d: (d.train_mask ^ (d.y == 1) | ~d.train_mask & (d.y > 2)).sum().double(),
)


simple(
    "new_zeros, replicated operands",
    lambda d: d.x.new_zeros(N, D) + torch.ones(N, D) * h(d) + torch.arange(N)[:, None],
)


simple(
    "more dimensions than the sharded operand", lambda d: (torch.ones(3, N, D) * h(d)).sum((0, 2))
)


simple(
    "kwargs",
    lambda d: (
        torch.sum(input=h(d), dim=0)
        + torch.mul(input=h(d), other=d.w).sum(0)
        + torch.index_select(h(d), dim=0, index=m.index).sum(0)
    ),
)


simple("prelu", lambda d: F.prelu(d.x, m.weight[0]) + F.prelu(d.x, m.weight[0, :1]))


@probe("in-place operations")
def _(d: Data) -> Tensor:
    x = m.lin(d.x) * 1
    x = x.relu_() * 1
    x += d.x
    x.mul_(2).clamp_(max=3).add_(d.w)
    return F.relu(x * 1, inplace=True)


@probe("in-place operation without a rule", "cumprod_", "_foreach_add_")
def _(d: Data) -> Tensor:
    x = d.x.clone()
    x.cumprod_(0)
    y = d.x.clone()
    torch._foreach_add_([x, y], 1.0)
    return x + y


@probe("out=", "copy_")
def _(d: Data) -> Tensor:
    out = torch.zeros_like(d.x)
    torch.add(d.x, 1, out=out)
    replicated = torch.empty(N, D)
    torch.mul(d.x, 2, out=replicated)
    return out + replicated


simple(
    "dtype of another",
    lambda d: (
        d.y.to(d.x)
        + torch.as_tensor(d.y, dtype=torch.float32).type_as(h(d))
        + d.y.type(torch.float64).cpu()
        + torch.full((1,), 2).to(d.x)
    ),
)
