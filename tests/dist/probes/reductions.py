"""Sums, extremes and losses over rows and columns."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data

from tests.dist.probes.probe import C, D, N, h, m, probe, simple

simple(
    "sum, mean, var, std, norm",
    lambda d: torch.stack(
        [
            h(d).sum(),
            h(d).mean(),
            h(d).var(),
            h(d).std(0).sum(),
            h(d).norm(),
            h(d).norm(dim=1).sum(),
            torch.linalg.vector_norm(h(d), dim=0).sum(),
            h(d).sum(axis=0).prod(),
            h(d).mean((0, 1)),
        ]
    ),
)


simple(
    "extremes",
    lambda d: torch.stack(
        [
            h(d).max(),
            h(d).min(),
            h(d).amax(0).sum(),
            d.x.amin((0, 1)),
            d.y.max().double(),
            h(d).max(1)[0].sum(),
            h(d).max(dim=-1).values.sum(),
        ]
    ),
)


simple(
    "any, all, count_nonzero",
    lambda d: torch.stack(
        [
            d.train_mask.any(),
            d.train_mask.all(),
            (d.x > -9).all(),
            (d.x > 9).any(),
            d.train_mask.count_nonzero(),
        ]
    ).double(),
)


simple("max over rows with indices", lambda d: d.x.max(0)[1], "max")


simple("argmax", lambda d: (h(d).argmax(-1) == d.y).sum() / N)


simple(
    "softmax and logsumexp over rows",
    lambda d: (
        h(d).softmax(0).square().sum() + h(d).logsumexp(0).sum() + F.log_softmax(h(d), 0).sum()
    ),
)


simple("sort over rows", lambda d: d.x[:, 0].sort()[0], "sort")


@probe("cumsum over rows")
def _(d: Data) -> Tensor:
    chosen = d.train_mask.cumsum(0, dtype=torch.int32)  # some rows of each rank, or none
    count = torch.where(chosen > 5, chosen, 0) + d.y.cumsum(dim=0) + d.train_mask.cumsum(-1)
    ends = h(d)[d.edge_index[0]].cumsum(0)  # the order of edges
    few = h(d)[d.train_mask & (d.y == 1)].cumsum(0)
    none = h(d)[d.y > C].cumsum(0)
    columns = h(d).t().cumsum(1).t() * h(d).cumsum(-2)
    return torch.cat([count[:, None] * columns, ends * d.edge_attr[:, :1], few * d.w[:1], none])


@probe("cumsum over rows, of what is not finite")
def _(d: Data) -> Tensor:
    x = d.x.clone()
    x[20, 0], x[40, 0], x[30, 1] = torch.inf, -torch.inf, torch.nan
    return x.cumsum(0).nan_to_num(1, 2, 3)


@probe("second derivative of a cumsum over rows")
def _(d: Data) -> Tensor:
    x = h(d)
    (grad,) = torch.autograd.grad((x.cumsum(0) * d.x).pow(3).sum(), x, create_graph=True)
    return grad / N


simple(
    "along columns",
    lambda d: (
        h(d).softmax(1).sum(1)
        + h(d).cumsum(1)[:, 3]
        + h(d).sort(1)[0][:, 2]
        + h(d).topk(3)[0].sum(1)
        + h(d).flip(1)[:, 0]
        + h(d).roll(1, 1)[:, 1]
    ),
)


simple("unique", lambda d: d.y.unique().double(), "unique")


@probe("bincount")
def _(d: Data) -> Tensor:
    of_few = torch.bincount(d.y[d.train_mask & (d.y == 1)], minlength=C + 2)
    weighted = torch.bincount(d.y, h(d)[:, 0].detach()) + torch.bincount(
        torch.arange(N) % C, weights=d.x[:, 1]
    )
    return torch.cat([torch.bincount(d.y), of_few, weighted])


@probe("cumsum in place")
def _(d: Data) -> Tensor:
    along, columns, places = h(d) * 1, h(d) * d.w, d.y.clone()
    along.cumsum_(0).mul_(d.w)
    columns[:, 1:].cumsum_(dim=1)
    places.cumsum_(-1)
    return along + columns.cumsum_(1) * places[:, None]


simple(
    "losses of elements",
    lambda d: (
        F.binary_cross_entropy_with_logits(
            h(d)[:, 0], d.y.double() / 4, pos_weight=torch.tensor(2.0)
        )
        + F.mse_loss(h(d), d.x)
        + F.l1_loss(h(d), d.x, reduction="sum")
        + F.kl_div(h(d).log_softmax(1), d.x.softmax(1), reduction="batchmean")
        + F.smooth_l1_loss(h(d), torch.zeros(N, D))
    ),
)


@probe("losses of rows")
def _(d: Data) -> Tensor:
    x, sign = h(d), (d.y % 2 * 2 - 1).to(d.x.dtype)
    found = [
        F.margin_ranking_loss(x[:, 0], d.x[:, 1], sign, margin=0.3),
        F.hinge_embedding_loss(x[:, 1].abs(), sign, reduction="sum"),
        F.triplet_margin_loss(x, d.x, x * d.x, margin=2.0, swap=True),
        F.triplet_margin_loss(x, d.x, torch.zeros(N, D), reduction="none").square().sum(),
        F.cosine_embedding_loss(x, d.x, target=sign, margin=0.1),
        F.cosine_embedding_loss(x, torch.ones(N, D), sign, reduction="none").sum(),
    ]
    return torch.stack(found)


simple(
    "losses of classes",
    lambda d: (
        F.cross_entropy(h(d)[:, :C], d.y, weight=torch.arange(1.0, 5.0))
        + F.cross_entropy(h(d)[:, :C], d.y, ignore_index=2)
        + F.cross_entropy(h(d)[:, :C], d.y, label_smoothing=0.1)
        + F.cross_entropy(h(d)[:, :C], d.x[:, :C].softmax(1))
        + F.cross_entropy(h(d)[:, :C], d.y, reduction="sum")
        + F.nll_loss(h(d)[:, :C].log_softmax(-1), d.y)
    ),
)


simple(
    "loss modules",
    lambda d: (
        torch.nn.CrossEntropyLoss()(h(d)[:, :C], d.y)
        + torch.nn.BCEWithLogitsLoss()(h(d)[:, 0], d.y.double() / 4)
    ),
)


simple(
    "row norms",
    lambda d: (
        F.normalize(h(d)).sum()
        + F.cosine_similarity(h(d), d.x).sum()
        + F.layer_norm(h(d), (D,), m.weight[0]).square().mean()
    ),
)


simple("branch on a value", lambda d: h(d).sum() if h(d).sum() > 0 else d.x.sum())

simple("extremes of vectors of integers", lambda d: torch.cat([*_extremes(d.y), *_extremes(-d.y)]))


def _extremes(x: torch.Tensor) -> list[torch.Tensor]:
    return [value.view(1).double() for value in (*x.max(dim=0), *x.min(0, keepdim=True))]
