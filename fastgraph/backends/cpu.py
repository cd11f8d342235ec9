"""The C++ kernels for the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastgraph import native
from fastgraph.backends.base import FLOATING, Kernel
from fastgraph.backends.reference import accumulator
from fastgraph.graph import Graph


class CpuBackend:
    """Vectorised, multi-threaded kernels; see ``fastgraph/csrc/cpu``."""

    name = "cpu"
    priority = 100

    def unavailable(self) -> str | None:
        return native.why_unavailable()

    def kernel(self, operator: str, device_type: str, dtype: torch.dtype) -> Kernel | None:
        if device_type != "cpu" or dtype not in FLOATING:
            return None
        return _KERNELS.get(operator)


def _scales(
    graph: Graph, reduce: str, transpose: bool, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Factors of the aggregating and of the gathered nodes."""
    if reduce == "sum":
        return None, None
    if reduce == "mean":
        return graph.inverse_degree(transpose=transpose, dtype=accumulator(dtype)), None
    return None, graph.inverse_degree(transpose=not transpose, dtype=accumulator(dtype))


def _spmm(graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, transpose: bool) -> Tensor:
    rows = graph.grouped(transpose=transpose)
    row_scale, col_scale = _scales(graph, reduce, transpose, x.dtype)
    out = x.new_empty(rows.ptr.numel() - 1, x.shape[1])
    weight = None if weight is None else weight.contiguous()
    native.library().spmm(rows.ptr, rows.col, rows.edge_id, weight, row_scale, col_scale, x, out)
    return out


def _sddmm(graph: Graph, grad: Tensor, x: Tensor, reduce: str, transpose: bool) -> Tensor:
    row_scale, col_scale = _scales(graph, reduce, transpose, x.dtype)
    if col_scale is not None:  # scale rows of the transposed graph instead
        transpose, row_scale, grad, x = not transpose, col_scale, x, grad
    rows = graph.grouped(transpose=transpose)
    out = x.new_empty(graph.num_edges)
    native.library().sddmm(rows.ptr, rows.col, rows.edge_id, row_scale, grad, x, out)
    return out


def _segment_reduce(
    graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, transpose: bool, ties: str
) -> tuple[Tensor, Tensor]:
    rows = graph.grouped(transpose=transpose)
    out = x.new_empty(rows.ptr.numel() - 1, x.shape[1])
    record = x.new_empty(0 if ties == "none" else out.shape, dtype=torch.int32)
    native.library().segment_extremum(
        rows.ptr,
        rows.col,
        rows.edge_id,
        None if weight is None else weight.contiguous(),
        reduce == "max",
        x,
        out,
        record if ties == "split" else None,
        record if ties == "winner" else None,
    )
    return out, record


def _segment_reduce_backward(
    graph: Graph,
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    out: Tensor,
    record: Tensor,
    transpose: bool,
    ties: str,
) -> Tensor:
    cols = graph.grouped(transpose=not transpose)
    grad_x = torch.empty_like(x)
    if ties == "split":
        share = torch.empty_like(grad)
        native.library().divide_by_ties(grad, record, share)
        grad = share
    native.library().segment_extremum_backward(
        cols.ptr,
        cols.col,
        cols.edge_id,
        None if weight is None else weight.contiguous(),
        x,
        out,
        grad,
        record if ties == "winner" else None,
        grad_x,
    )
    return grad_x


def _head_scores(x: Tensor, att: Tensor) -> Tensor:
    scores = x.new_empty(x.shape[0], att.shape[0], x.shape[1])
    native.library().head_scores(x, att, scores)
    return scores


def _head_scores_backward(x: Tensor, att: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    grad_x, grad_att = torch.empty_like(x), torch.empty_like(att)
    native.library().head_scores_backward(x, att, grad, grad_x, grad_att)
    return grad_x, grad_att


class _Attention:
    """The kernels of an attention operator.

    Args:
        name: of the operator and of its native functions.
        rows: the position of the tensor of the aggregating nodes among the inputs.
        by_dst: positions of the inputs whose gradients the pass over destinations writes; those of
            the others come from the pass over sources.
        per_edge: positions of inputs ``[E, channels]`` to whose gradients all heads add.
    """

    def __init__(
        self, name: str, rows: int, by_dst: tuple[int, ...], per_edge: tuple[int, ...] = ()
    ) -> None:
        self._name, self._rows, self._by_dst, self._per_edge = name, rows, by_dst, per_edge

    def forward(self, graph: Graph, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        *inputs, transpose, option, dropout, seed, weights = given
        rows = inputs[self._rows]
        heads = rows.shape[1]
        # gat knows the aggregating nodes by their scores alone.
        out = rows.new_empty(*rows.shape[:2], *(rows if rows.dim() == 3 else inputs[0]).shape[2:])
        stats = rows.new_empty(*rows.shape[:2], 2, dtype=accumulator(rows.dtype))
        alpha = rows.new_empty(graph.num_edges if weights else 0, heads)
        getattr(native.library(), self._name)(
            *graph.grouped(transpose=transpose),
            *inputs,
            option,
            dropout,
            seed,
            out,
            stats,
            alpha if weights else None,
        )
        return out, stats, alpha

    def backward(
        self, graph: Graph, grad: Tensor, grad_alpha: Tensor | None, *given: Any
    ) -> tuple[Tensor | None, ...]:
        *inputs, stats, transpose, option, dropout, seed = given
        gradients = [
            None if tensor is None else self._empty_gradient(position, tensor)
            for position, tensor in enumerate(inputs)
        ]
        delta = stats.new_empty(stats.shape[:2])
        arguments = (*inputs, option, dropout, seed, stats, grad, grad_alpha, delta)
        by_dst = [gradients[i] for i in self._by_dst]
        by_src = [g for i, g in enumerate(gradients) if i not in self._by_dst]
        rows, cols = (graph.grouped(transpose=t) for t in (transpose, not transpose))
        library = native.library()
        getattr(library, f"{self._name}_backward_dst")(*rows, *arguments, *by_dst)
        getattr(library, f"{self._name}_backward_src")(*cols, *arguments, *by_src)
        return tuple(None if g is None else g.to(grad.dtype) for g in gradients)

    def _empty_gradient(self, position: int, tensor: Tensor) -> Tensor:
        if position in self._per_edge:
            return torch.zeros_like(tensor, dtype=accumulator(tensor.dtype))
        return torch.empty_like(tensor)


_GATV2 = _Attention("gatv2", rows=1, by_dst=(1, 2, 3, 4), per_edge=(3,))
_GAT = _Attention("gat", rows=2, by_dst=(2, 3))
_ATTENTION = _Attention("attention", rows=0, by_dst=(0, 3), per_edge=(3,))

_KERNELS: dict[str, Callable[..., Any]] = {
    "spmm": _spmm,
    "sddmm": _sddmm,
    "segment_reduce": _segment_reduce,
    "segment_reduce_backward": _segment_reduce_backward,
    "head_scores": _head_scores,
    "head_scores_backward": _head_scores_backward,
    "gatv2": _GATV2.forward,
    "gatv2_backward": _GATV2.backward,
    "gat": _GAT.forward,
    "gat_backward": _GAT.backward,
    "attention": _ATTENTION.forward,
    "attention_backward": _ATTENTION.backward,
}
