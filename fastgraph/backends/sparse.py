"""Products with torch's compressed sparse matrices: on a GPU they are cuSPARSE's.

torch calls the cuSPARSE that it has loaded, on the current stream and with a workspace from its own
allocator. Its rows must have distinct columns in ascending order, so a sorted copy of the edges is
kept as long as the graph; a matrix is made for each product, which costs little beside it.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgraph.backends import reference
from fastgraph.backends.kernels import scales, spmm_by_head
from fastgraph.graphs.graph import Graph
from fastgraph.graphs.memo import remembered
from fastgraph.plugins.backend import Kernel

DTYPES = (torch.float32, torch.float64)
"""Of the features; values of a matrix of a shorter dtype would round the scales of means."""


class SparseBackend:
    """``spmm`` by ``torch.sparse`` and all else by the reference; for comparison, on request."""

    name = "sparse"
    priority = -2

    def unavailable(self) -> str | None:
        return None

    def kernel(self, operator: str, device_type: str, dtype: torch.dtype) -> Kernel | None:
        if device_type not in ("cpu", "cuda"):
            return None
        if operator == "spmm" and dtype in DTYPES:
            return spmm_by_head(_spmm_of_any_graph)
        return reference.ReferenceBackend().kernel(operator, device_type, dtype)


def fits(graph: Graph, x: Tensor, transpose: bool) -> bool:
    """True if :func:`spmm` takes a graph and features: neither is empty, no edge is twice."""
    return x.numel() > 0 and graph.num_edges > 0 and sorted_rows(graph, transpose).distinct


def spmm(graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, transpose: bool) -> Tensor:
    """The kernel (see :mod:`fastgraph.plugins.backend`) for what :func:`fits`."""
    rows = sorted_rows(graph, transpose)
    values = matrix_values(
        rows.ptr,
        rows.col,
        rows.edge_id,
        weight,
        *scales(graph, reduce, transpose, x.dtype),
        x.dtype,
    )
    _warn_quietly()
    matrix = _matrix(rows.ptr, rows.col, values, (rows.ptr.numel() - 1, x.shape[0]))
    with torch.autocast(x.device.type, enabled=False):  # which would narrow both factors
        return torch.mm(matrix, x)


def _spmm_of_any_graph(
    graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, transpose: bool
) -> Tensor:
    kernel = spmm if fits(graph, x, transpose) else reference.spmm
    return kernel(graph, x, weight, reduce, transpose)


class SortedRows(NamedTuple):
    """A :class:`fastgraph.graphs.graph.Csr` of int32, with columns in ascending order in each row.

    Attributes:
        distinct: whether no edge comes twice.
        plans: of products with the matrix, by :mod:`fastgraph.backends.cusparse`.
    """

    ptr: Tensor
    col: Tensor
    edge_id: Tensor
    distinct: bool
    plans: dict[tuple[object, ...], Any]

    @property
    def nbytes(self) -> int:
        return self.ptr.nbytes + self.col.nbytes + self.edge_id.nbytes


def sorted_rows(graph: Graph, transpose: bool) -> SortedRows:
    """The edges by aggregating node, kept as long as the graph."""
    return remembered("sparse_rows", _sort_columns, *graph.grouped(transpose=transpose)[:3])


def _sort_columns(ptr: Tensor, col: Tensor, edge_id: Tensor | None) -> SortedRows:
    row = torch.repeat_interleave(ptr.diff(), output_size=col.numel())
    place, order = torch.sort((row << 32) + col)
    return SortedRows(
        ptr.int(),
        col[order],
        order.int() if edge_id is None else edge_id[order],
        bool((place.diff() > 0).all()),
        {},
    )


def matrix_values(
    ptr: Tensor,
    col: Tensor,
    edge_id: Tensor,
    weight: Tensor | None,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """The values of the matrix by which a weighted and scaled sum multiplies, ``[E]``."""
    values = torch.ones_like(col, dtype=dtype) if weight is None else weight[edge_id]
    if row_scale is not None:
        values = values * row_scale.repeat_interleave(ptr.diff(), output_size=values.numel())
    if col_scale is not None:
        values = values * col_scale[col]
    return values


def _matrix(ptr: Tensor, col: Tensor, values: Tensor, size: tuple[int, int]) -> Tensor:
    checked = torch.sparse.check_sparse_tensor_invariants.is_enabled()  # said, lest torch warn
    return torch.sparse_csr_tensor(ptr, col, values, size, check_invariants=checked)


@functools.cache
def _warn_quietly() -> None:
    """Make the first matrix in a process, of which torch warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _matrix(
            torch.tensor([0, 0], device="cpu"),
            torch.tensor([], dtype=torch.int64, device="cpu"),
            torch.tensor([], device="cpu"),
            (1, 1),
        )
