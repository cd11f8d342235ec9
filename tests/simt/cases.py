"""Graphs, inputs and float64 references of the kernels' tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from tests.graphs import all_cases, hub_edges, random_edges
from tests.native.cases import normal
from tests.simt.library import Rows, compress


def two_long_rows_in_a_chunk() -> Tensor:
    """Rows 0 to 3 have 300, 0, 301 and 257 edges: chunks hold the end of one and begin another."""
    dst = torch.tensor([0] * 300 + [2] * 301 + [3] * 257)
    return torch.stack([random_edges(50, 1, dst.numel())[0], dst])


def graphs() -> dict[str, tuple[Rows, Tensor]]:
    """Compressed rows and the edges they come from."""
    found = {case.name: case for case in all_cases() if case.name not in ("int32", "strided")}
    edges = {name: (case.edge_index, case.num_src, case.num_dst) for name, case in found.items()}
    edges["hub"] = hub_edges(40, 3000), 40, 40
    edges["cut"] = two_long_rows_in_a_chunk(), 50, 5
    return {name: (compress(*given), given[0]) for name, given in edges.items()}


def head_inputs(
    rows: Rows, heads: int, width: int, dtype: torch.dtype, edge_dim: int = 0
) -> list[Tensor | None]:
    """x_src, x_dst, att, edge and weight_edge."""
    edge, weight_edge = (rows.col.numel(), edge_dim), (heads, edge_dim, width)
    return [
        normal(rows.num_cols, heads, width, dtype=dtype, seed=1),
        normal(rows.num_rows, heads, width, dtype=dtype, seed=2),
        normal(heads, width, dtype=dtype, seed=3) / width**0.5,
        normal(*edge, dtype=dtype, seed=4) if edge_dim else None,
        normal(*weight_edge, dtype=dtype, seed=5) if edge_dim else None,
    ]


def gatv2_reference(
    edges: Tensor, inputs: Sequence[Tensor | None], slope: float, keep: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, stats and weights in float64; ``keep`` are the factors of dropout, ``[E, heads]``."""
    src, dst = edges.long()
    x_src, x_dst, att, edge, weight = (None if x is None else x.double() for x in inputs)
    assert x_src is not None and x_dst is not None and att is not None
    z = x_src[src] + x_dst[dst]
    if edge is not None and weight is not None:
        z = z + torch.einsum("ed,hdc->ehc", edge, weight)
    score = (leaky_relu(z, slope) * att).sum(-1)
    zeros = score.new_zeros(x_dst.shape[:2])
    index = dst.unsqueeze(-1).expand_as(score)
    largest = zeros.scatter_reduce(0, index, score, "amax", include_self=False)
    exponential = (score - largest[dst]).exp()
    total = zeros.index_add(0, dst, exponential)
    inverse = torch.where(total == 0, 0, total.reciprocal())
    alpha = exponential * inverse[dst]
    if keep is not None:
        alpha = alpha * keep
    out = torch.zeros_like(x_dst).index_add(0, dst, alpha.unsqueeze(-1) * x_src[src])
    return out, torch.stack([largest, inverse], dim=-1), alpha
