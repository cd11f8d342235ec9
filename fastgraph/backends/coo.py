"""Operators over edges that nobody groups, computed by a native library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fastgraph.graphs.memo import tensor_key
from fastgraph.graphs.witness import Checksum
from fastgraph.machine.memory import new_rows
from fastgraph.plugins.backend import Kernel, accumulator


def coo_kernels(library: Callable[[], Any]) -> dict[str, Kernel]:
    """The kernels of ``spmm_coo`` and ``segment_reduce_coo``, by a native library with both."""
    latest = _InverseDegrees()

    def spmm_coo(
        index: Tensor,
        x: Tensor,
        weight: Tensor | None,
        num_out: int,
        reduce: str,
        transpose: bool,
        is_checked: bool,
    ) -> Tensor:
        native, (sources, destinations) = library(), index.unbind()
        rows, cols = (sources, destinations) if transpose else (destinations, sources)
        of_rows = of_cols = None
        if reduce == "mean":
            of_rows = x.new_empty(num_out, dtype=accumulator(x.dtype))
        elif reduce == "mean_adjoint":
            if not is_checked:
                num_src, num_dst = (num_out, len(x)) if transpose else (len(x), num_out)
                native.check_edges(sources, destinations, num_src, num_dst)
                is_checked = True
            of_cols = latest.again(cols, len(x), x.dtype)
        out = new_rows(x, (num_out, x.shape[1]))
        weight = None if weight is None else weight.contiguous()
        native.spmm_coo(
            *(sources, destinations, transpose, is_checked, weight, of_rows, of_cols, x, out)
        )
        if of_rows is not None:
            latest.keep(rows, of_rows, x.dtype)
        return out

    def segment_reduce_coo(
        index: Tensor,
        x: Tensor,
        weight: Tensor | None,
        num_out: int,
        reduce: str,
        transpose: bool,
        is_checked: bool,
        ties: str,
    ) -> tuple[Tensor, Tensor]:
        out = new_rows(x, (num_out, x.shape[1]))
        record = new_rows(x, (0,) if ties == "none" else out.shape, torch.int32)
        library().segment_reduce_coo(
            *index.unbind(),
            transpose,
            is_checked,
            None if weight is None else weight.contiguous(),
            reduce == "max",
            x,
            out,
            None if ties == "none" else record,
        )
        return out, record

    return {"spmm_coo": spmm_coo, "segment_reduce_coo": segment_reduce_coo}


class _InverseDegrees:
    """``1 / max(degree, 1)`` of nodes at one end of edges; the latest serves the gradient, too.

    Upstream keeps the degrees of its forward pass in the same way. A mean counts them as it adds
    up; to count them once more takes as long as a sum, and nine times as long as the checksum by
    which edits are noticed that torch does not count.
    """

    def __init__(self) -> None:
        self._latest: tuple[object, StorageWeakRef, Checksum, Tensor] | None = None

    def keep(self, nodes: Tensor, made: Tensor, dtype: torch.dtype) -> None:
        """Take down what a mean of features of this dtype has made for these nodes, ``[E]``."""
        if not nodes.is_inference():
            storage, key = StorageWeakRef(nodes.untyped_storage()), tensor_key(nodes)
            self._latest = (key, len(made), dtype), storage, Checksum([nodes]), made

    def again(self, nodes: Tensor, size: int, dtype: torch.dtype) -> Tensor:
        """For the gradient of a mean of these nodes, of ``size`` in all."""
        latest = self._latest  # another thread may replace it
        if latest is not None and not nodes.is_inference() and not latest[1].expired():
            key, _, content, made = latest
            if key == (tensor_key(nodes), size, dtype) and content.confirms([nodes]):
                return made
        degree = torch.bincount(nodes, minlength=size)
        made = degree.clamp_(min=1).to(accumulator(dtype)).reciprocal_()
        self.keep(nodes, made, dtype)
        return made
