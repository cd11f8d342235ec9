"""Matrices, tensors and float64 references that the native tests share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from fastgraph.plugins.backend import accumulator

WIDTHS = (0, 1, 3, 7, 16, 33, 64, 100, 256, 300)
GRAPHS = ("random", "hub", "sorted", "one_edge", "no_edges", "no_rows")


@dataclass
class Sparse:
    """Edges and their compressed rows; `entry` is the edge behind each entry."""

    row: Tensor
    col: Tensor
    num_rows: int
    num_cols: int
    rowptr: Tensor
    index: Tensor
    edge_id: Tensor | None
    row_id: Tensor | None = None

    @property
    def num_edges(self) -> int:
        return self.row.numel()

    @property
    def entry(self) -> Tensor:
        return torch.arange(self.num_edges) if self.edge_id is None else self.edge_id.long()

    def in_order(self, rows: Tensor) -> Self:
        """The same graph with its rows in another order."""
        lengths = self.rowptr.diff()[rows]
        rowptr = torch.cat([self.rowptr[:1], lengths.cumsum(0)])
        moved = torch.repeat_interleave(self.rowptr[rows] - rowptr[:-1], lengths)
        moved += torch.arange(self.num_edges)
        return replace(
            self,
            rowptr=rowptr,
            index=self.index[moved],
            edge_id=self.entry[moved].int(),
            row_id=rows.int(),
        )

    @property
    def csr(self) -> tuple[Tensor, Tensor, Tensor | None, int, Tensor | None]:
        return self.rowptr, self.index, self.edge_id, 0, self.row_id


def compress(lib: Any, row: Tensor, col: Tensor, num_rows: int, num_cols: int) -> Sparse:
    rowptr = torch.empty(num_rows + 1, dtype=torch.int64)
    index = torch.empty(row.numel(), dtype=torch.int32)
    edge_id = torch.empty(row.numel(), dtype=torch.int32)
    in_order = lib.build_csr(row, col, num_rows, num_cols, rowptr, index, edge_id)
    return Sparse(row, col, num_rows, num_cols, rowptr, index, None if in_order else edge_id)


def transpose(lib: Any, graph: Sparse) -> Sparse:
    rowptr = torch.empty(graph.num_cols + 1, dtype=torch.int64)
    index = torch.empty(graph.num_edges, dtype=torch.int32)
    edge_id = torch.empty(graph.num_edges, dtype=torch.int32)
    lib.transpose_csr(*graph.csr[:4], graph.num_cols, rowptr, index, edge_id)
    return Sparse(graph.col, graph.row, graph.num_cols, graph.num_rows, rowptr, index, edge_id)


def make_graph(lib: Any, name: str) -> Sparse:
    generator = torch.Generator().manual_seed(7)

    def integers(high: int, size: int) -> Tensor:
        return torch.randint(0, high, (size,), generator=generator)

    if name == "random":  # duplicate edges, empty rows at the end
        return compress(lib, integers(190, 4000), integers(150, 4000), 200, 150)
    if name == "hub":  # row 3 has to be cut into pieces
        row = integers(40, 11_000)
        row[torch.rand(11_000, generator=generator) < 0.85] = 3
        return compress(lib, row, integers(60, 11_000), 40, 60)
    if name == "mixed":  # the same with its rows in another order
        return make_graph(lib, "hub").in_order(torch.randperm(40, generator=generator))
    if name == "sorted":
        return compress(lib, integers(90, 2500).sort().values, integers(80, 2500), 100, 80)
    if name == "one_edge":
        return compress(lib, torch.tensor([1]), torch.tensor([2]), 3, 4)
    if name == "no_edges":
        empty = torch.empty(0, dtype=torch.int64)
        return compress(lib, empty, empty, 5, 4)
    empty = torch.empty(0, dtype=torch.int64)
    return compress(lib, empty, empty, 0, 0)


def features(rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Values with few bits, as after a ReLU and quantisation: full of ties and zeros."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, (rows, width), generator=generator).to(dtype) / 4


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def unit_roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def spmm_reference(
    graph: Sparse,
    x: Tensor,
    weight: Tensor | None = None,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
) -> Tensor:
    messages = x.double()[graph.col]
    if weight is not None:  # [E] or [E, heads]
        of_edge = weight.double() if weight.dim() == 2 else weight.double()[:, None]
        messages = messages * of_edge.repeat_interleave(x.shape[1] // of_edge.shape[1], 1)
    if col_scale is not None:
        messages = messages * col_scale.double()[graph.col, None]
    out = torch.zeros(graph.num_rows, x.shape[1], dtype=torch.float64)
    out.index_add_(0, graph.row, messages)
    return out if row_scale is None else out * row_scale.double()[:, None]


def assert_close(actual: Tensor, expected: Tensor, magnitude: Tensor) -> None:
    """Differences within a few roundings of the sum of magnitudes that were added up."""
    eps = unit_roundoff(actual.dtype)
    accumulated = unit_roundoff(accumulator(actual.dtype))
    bound = eps * expected.abs() + 64 * accumulated * magnitude.abs() + 1e-7
    error = (actual.double() - expected).abs()
    assert bool((error <= bound).all()), f"largest error over its bound: {(error / bound).max()}"
