"""Products of matrices."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import torch_geometric.utils as pyg
from torch import Tensor
from torch_geometric.data import Data

from tests.dist.probes.probe import D, N, h, m, probe, simple

simple(
    "x.t() @ x, x @ x.t()",
    lambda d: (h(d).t() @ d.x).sum() + (d.x @ d.x.t()).abs().mean(),
    "matmul",
)


simple(
    "products",
    lambda d: (
        (h(d) @ m.weight).sum(1)
        + torch.addmm(m.weight[0], d.x, m.weight).sum(1)
        + torch.mm(d.x, m.weight)[:, 0]
        + d.x @ m.weight[0]
    ),
)


simple("products over rows", lambda d: h(d).t() @ d.x + torch.ones(D, N) @ h(d))


simple(
    "einsum",
    lambda d: (
        torch.einsum("nd,de,ne->n", d.x, m.weight, h(d))
        + torch.einsum("nd,ne->de", d.x, h(d)).sum()
    ),
)


simple(
    "einsum with dimensions that have no name",
    lambda d: (
        torch.einsum("...d,de->...e", h(d)[None], m.weight)[0]
        + torch.einsum("...L, ...Ld -> ...Ld", d.w.t(), d.x[None])[0]
        + torch.einsum("...nd,...ne->...de", d.x[None], h(d)[None])[0].sum()
    ),
)


simple(
    "sparse product",
    lambda d: pyg.to_torch_csr_tensor(d.edge_index, size=(N, N)) @ h(d),
    "add_",
    "__setitem__",
    "sparse_csr_tensor",
    "_convert_indices_from_coo_to_csr",
    "__setitem__",
)


simple(
    "bilinear",
    lambda d: (
        F.bilinear(h(d), d.x, m.weight[None].expand(2, D, D), m.weight[0, :2])
        + F.bilinear(m.weight[:1].expand(N, D), h(d), m.weight[None])
    ),
)


@probe("a matrix that is used again, and edited")
def _(d: Data) -> Tensor:
    matrix = torch.sparse_coo_tensor(m.ends, m.values, (N, N)).coalesce()
    with torch.no_grad():
        before = matrix @ d.x
        matrix.values().mul_(2)
    return before + matrix @ (matrix @ h(d))


simple(
    "products added in place",
    lambda d: (h(d) * 1).addmm_(d.x, m.weight, beta=0.5) + (d.x @ m.weight).addmm_(d.x, m.weight),
)
