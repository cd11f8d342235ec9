"""Products by cuSPARSE, with a plan for each matrix and width.

A plan keeps cuSPARSE's descriptors and what it has found out about the matrix. It stays with the
sorted edges, as do values of the matrix that no gradient changes. See ``csrc/cuda/cusparse.cpp``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastgraph.backends import sparse
from fastgraph.backends.kernels import scales
from fastgraph.graphs.graph import Graph
from fastgraph.graphs.memo import remembered

ALGORITHMS = (1, 2, 3)
"""Those for compressed rows."""

_UNKNOWN = object()


class CuSparseSpmm:
    """The kernel of ``spmm`` (see :mod:`fastgraph.plugins.backend`) for what it :meth:`fits`.

    Args:
        library: gives the native library; asked at each call.
        algorithm: one of :data:`ALGORITHMS`.
    """

    def __init__(self, library: Callable[[], Any], algorithm: int) -> None:
        self._library, self._algorithm = library, algorithm

    def fits(
        self, graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, transpose: bool
    ) -> bool:
        """True if cuSPARSE computes this product by this algorithm, and to our accuracy."""
        library = self._library()
        return (
            hasattr(library, "plan_product")  # it was built where cuSPARSE's header was
            and library.cusparse_version() > 0
            # The scales of means would be rounded to the dtype of the features.
            and (reduce == "sum" or x.dtype in sparse.DTYPES)
            and x.data_ptr() % 16 == 0
            and sparse.fits(graph, x, transpose)
            and self._prepared(
                sparse.sorted_rows(graph, transpose), graph, x, weight, reduce, transpose
            )[0]
            is not None
        )

    def __call__(
        self, graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, transpose: bool
    ) -> Tensor:
        rows = sparse.sorted_rows(graph, transpose)  # a plan does not keep them alive
        product, values, out = self._prepared(rows, graph, x, weight, reduce, transpose)
        product(values, x, out)
        return out

    def forget(self, graph: Graph, x: Tensor, transpose: bool) -> None:
        """Free the plan for features like these."""
        sparse.sorted_rows(graph, transpose).plans.pop(self._kind(x), None)

    def _prepared(
        self,
        rows: sparse.SortedRows,
        graph: Graph,
        x: Tensor,
        weight: Tensor | None,
        reduce: str,
        transpose: bool,
    ) -> tuple[Any, Tensor, Tensor]:
        """The product, ``None`` if this algorithm has none, the matrix's values and a result."""
        given = (*rows[:3], weight, *scales(graph, reduce, transpose, x.dtype), x.dtype)
        if weight is not None and weight.requires_grad:  # which the next step will have changed
            values = sparse.matrix_values(*given)
        else:
            values = remembered("sparse_values", sparse.matrix_values, *given)
        out = x.new_empty((rows.ptr.numel() - 1, x.shape[1]))
        kind = self._kind(x)
        product = rows.plans.get(kind, _UNKNOWN)
        if product is _UNKNOWN:
            plan = self._library().plan_product
            product = plan(rows.ptr, rows.col, values, x, out, self._algorithm)
            rows.plans[kind] = product  # which another thread may forget at once
        return product, values, out

    def _kind(self, x: Tensor) -> tuple[object, ...]:
        # Two products at a time would spoil each other's workspace.
        stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
        return self._algorithm, x.shape[1], x.dtype, stream
