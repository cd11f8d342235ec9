"""Products with torch's compressed sparse matrices: on a GPU they are cuSPARSE's.

torch calls the cuSPARSE that it has loaded, on the current stream and with a workspace from its own
allocator. Its rows must have distinct columns in ascending order, so a sorted copy of the edges is
kept as long as the graph; a matrix is made for each product, which costs little beside it.
"""

from __future__ import annotations

import functools
import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from fastgraph.backends import reference
from fastgraph.backends.base import Kernel
from fastgraph.graph import Graph
from fastgraph.memo import remembered

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
            return _spmm_of_any_graph
        return reference.ReferenceBackend().kernel(operator, device_type, dtype)


def fits(graph: Graph, x: Tensor, transpose: bool) -> bool:
    """Whether :func:`spmm` takes a graph and features: there are both, and no edge twice."""
    return x.numel() > 0 and graph.num_edges > 0 and _sorted_rows(graph, transpose).distinct


def spmm(graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, transpose: bool) -> Tensor:
    """The kernel (see :mod:`fastgraph.backends.base`) for what :func:`fits`."""
    rows = _sorted_rows(graph, transpose)
    values = torch.ones_like(rows.col, dtype=x.dtype) if weight is None else weight[rows.edge_id]
    if reduce == "mean":
        scale = graph.inverse_degree(transpose=transpose, dtype=x.dtype)
        values *= scale.repeat_interleave(rows.ptr.diff(), output_size=values.numel())
    elif reduce == "mean_adjoint":
        values *= graph.inverse_degree(transpose=not transpose, dtype=x.dtype)[rows.col]
    _warn_of_beta_state_quietly()
    size = (rows.ptr.numel() - 1, x.shape[0])
    checked = torch.sparse.check_sparse_tensor_invariants.is_enabled()  # said, lest torch warn
    matrix = torch.sparse_csr_tensor(rows.ptr, rows.col, values, size, check_invariants=checked)
    with torch.autocast(x.device.type, enabled=False):  # which would narrow both factors
        return torch.mm(matrix, x)


def _spmm_of_any_graph(
    graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, transpose: bool
) -> Tensor:
    kernel = spmm if fits(graph, x, transpose) else reference.spmm
    return kernel(graph, x, weight, reduce, transpose)


class _Rows(NamedTuple):
    """As :class:`fastgraph.graph.Csr`, all int32, with columns in ascending order in each row."""

    ptr: Tensor
    col: Tensor
    edge_id: Tensor
    distinct: bool

    @property
    def nbytes(self) -> int:
        return self.ptr.nbytes + self.col.nbytes + self.edge_id.nbytes


def _sorted_rows(graph: Graph, transpose: bool) -> _Rows:
    return remembered("sparse_rows", _sort_columns, *graph.grouped(transpose=transpose)[:3])


def _sort_columns(ptr: Tensor, col: Tensor, edge_id: Tensor | None) -> _Rows:
    row = torch.repeat_interleave(ptr.diff(), output_size=col.numel())
    place, order = torch.sort((row << 32) + col)
    return _Rows(
        ptr.int(),
        col[order],
        order.int() if edge_id is None else edge_id[order],
        bool((place.diff() > 0).all()),
    )


@functools.cache
def _warn_of_beta_state_quietly() -> None:
    """Make the first matrix in a process, of which torch warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.eye(1).to_sparse_csr()
