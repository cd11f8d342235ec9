"""Products with torch's compressed sparse matrices: on a GPU they are cuSPARSE's.

torch calls the cuSPARSE that it has loaded, on the current stream and with a workspace from its own
allocator. A matrix, with its values scaled for means, is kept as long as its graph and weights.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastgraph.backends.base import Kernel
from fastgraph.backends.reference import ReferenceBackend
from fastgraph.graph import Graph
from fastgraph.memo import remembered

DTYPES = (torch.float32, torch.float64)
"""Of the features; values of a matrix of a shorter dtype would round the scales of means."""


class SparseBackend:
    """``spmm`` by ``torch.sparse``; for comparison, and on request."""

    name = "sparse"
    priority = -2

    def unavailable(self) -> str | None:
        return None

    def kernel(self, operator: str, device_type: str, dtype: torch.dtype) -> Kernel | None:
        if device_type not in ("cpu", "cuda"):
            return None
        if operator == "spmm" and dtype in DTYPES:
            return spmm
        return ReferenceBackend().kernel(operator, device_type, dtype)


def spmm(graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, transpose: bool) -> Tensor:
    """The kernel; see :mod:`fastgraph.backends.base`."""
    num_out, num_in = graph.num_dst, graph.num_src
    if transpose:
        num_out, num_in = num_in, num_out
    if x.numel() == 0 or graph.num_edges == 0:  # which cuSPARSE refuses
        return x.new_zeros(num_out, x.shape[1])
    scale = None
    if reduce != "sum":
        aggregating = transpose if reduce == "mean" else not transpose
        scale = graph.inverse_degree(transpose=aggregating, dtype=x.dtype)
    rows = graph.grouped(transpose=transpose)
    given = (*rows[:3], weight, scale, reduce == "mean", num_in, x.dtype)
    if weight is not None and weight.requires_grad:  # other values at every step
        return torch.mm(_matrix(*given).matrix, x)
    return torch.mm(remembered("sparse_matrix", _matrix, *given).matrix, x)


class _Remembered(NamedTuple):
    matrix: Tensor
    nbytes: int


def _matrix(
    ptr: Tensor,
    col: Tensor,
    edge_id: Tensor | None,
    weight: Tensor | None,
    scale: Tensor | None,
    scales_rows: bool,
    num_cols: int,
    dtype: torch.dtype,
) -> _Remembered:
    """The sparse matrix of some rows; ``scale`` is of their nodes or of those of columns."""
    if weight is None:
        values = torch.ones_like(col, dtype=dtype)
    else:
        values = weight.clone() if edge_id is None else weight[edge_id]
    if scale is not None:
        if scales_rows:
            values *= scale.repeat_interleave(ptr.diff(), output_size=col.numel())
        else:
            values *= scale[col]
    offsets = ptr.int()
    matrix = torch.sparse_csr_tensor(
        offsets, col, values, (ptr.numel() - 1, num_cols), check_invariants=False
    )
    return _Remembered(matrix, offsets.nbytes + values.nbytes)
