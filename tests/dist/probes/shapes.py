"""Other shapes of the same elements."""

from __future__ import annotations

import torch

from tests.dist.probes.probe import D, N, h, simple

simple(
    "sizes",
    lambda d: torch.tensor(
        [
            *d.x.shape,
            d.num_nodes,
            len(d.x),
            d.num_edges,
            d.x.numel(),
            d.edge_index.size(1),
            d.x.dim(),
            d.x.stride(0),
        ]
    ),
)


simple(
    "view(-1) and back",
    lambda d: (
        (h(d).view(-1) * d.x.reshape(-1)).view(-1, D).sum(1) + h(d).view(-1, 2, 4).flatten(1).sum(1)
    ),
)


simple(
    "cat of rows",
    lambda d: (
        torch.cat([h(d), torch.zeros(3, D)], 0).square().sum()
        + torch.cat([h(d), d.x])[N - 5 : N + 5].sum()
    ),
)


simple(
    "cat of columns, stack",
    lambda d: (
        torch.cat([h(d), d.x, torch.ones(N, 1)], 1).sum(1) + torch.stack([h(d), d.x], 0).sum((0, 2))
    ),
)


simple(
    "permute, unsqueeze, expand",
    lambda d: (
        torch.stack([d.x, h(d)], 1).permute(1, 0, 2).unsqueeze(0).expand(2, 2, N, D) * d.x
    ).sum((0, 1, 3)),
)


simple(
    "squeeze",
    lambda d: d.w.squeeze() + d.w.squeeze(-1) * d.w[:, 0] + d.w.unsqueeze(0).squeeze().sum(),
)


simple(
    "parts of columns",
    lambda d: (
        sum(a.sum(1) for a in h(d).chunk(2, -1)) + h(d).split(4, 1)[0].sum(1) + h(d).unbind(1)[3]
    ),
)


simple(
    "parts of rows",
    lambda d: torch.cat(
        [
            sum((i + 1) * a.sum(0) for i, a in enumerate(h(d).chunk(3))),
            h(d).split([5, N - 5])[1].square().sum(0),
            h(d).t().tensor_split(4, dim=1)[2].sum(1),
        ]
    ),
)


simple(
    "nested lists",
    lambda d: (
        torch.cat(tensors=[torch.stack([h(d), d.x])[0], d.x], dim=-1).sum(1)
        + torch.block_diag(d.w[:3], d.w[:2]).sum()
    ),
    "block_diag",
)


simple(
    "tiled, like another",
    lambda d: (
        h(d).tile(2).sum(1)
        + h(d).tile((1, 1, 1))[0].sum(1)
        + h(d).view_as(d.x).reshape_as(d.x).sum(1)
    ),
)
