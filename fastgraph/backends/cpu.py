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


def _softmax_results(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Empty output and statistics of an attention operator, like a tensor of aggregating nodes."""
    stats = rows.new_empty(*rows.shape[:2], 2, dtype=accumulator(rows.dtype))
    return torch.empty_like(rows), stats


def _gatv2(
    graph: Graph,
    x_src: Tensor,
    x_dst: Tensor,
    att: Tensor,
    transpose: bool,
    slope: float,
    dropout: float,
    seed: int,
) -> tuple[Tensor, Tensor]:
    out, stats = _softmax_results(x_dst)
    rows = graph.grouped(transpose=transpose)
    native.library().gatv2(*rows, x_src, x_dst, att, slope, dropout, seed, out, stats)
    return out, stats


def _gatv2_backward(
    graph: Graph,
    grad: Tensor,
    x_src: Tensor,
    x_dst: Tensor,
    att: Tensor,
    stats: Tensor,
    transpose: bool,
    *options: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_src, grad_dst, grad_att = (torch.empty_like(t) for t in (x_src, x_dst, att))
    rows, cols = (graph.grouped(transpose=t) for t in (transpose, not transpose))
    inputs = (x_src, x_dst, att, *options, stats)
    delta = stats.new_empty(stats.shape[:2])
    native.library().gatv2_backward_dst(*rows, *inputs, grad, delta, grad_dst, grad_att)
    native.library().gatv2_backward_src(*cols, *inputs, delta, grad, grad_src)
    return grad_src, grad_dst, grad_att


def _gat(
    graph: Graph,
    x: Tensor,
    score_src: Tensor,
    score_dst: Tensor,
    transpose: bool,
    slope: float,
    dropout: float,
    seed: int,
) -> tuple[Tensor, Tensor]:
    out, stats = _softmax_results(x.new_empty(score_dst.shape[0], *x.shape[1:]))
    rows = graph.grouped(transpose=transpose)
    native.library().gat(*rows, x, score_src, score_dst, slope, dropout, seed, out, stats)
    return out, stats


def _gat_backward(
    graph: Graph,
    grad: Tensor,
    x: Tensor,
    score_src: Tensor,
    score_dst: Tensor,
    stats: Tensor,
    transpose: bool,
    *options: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_x, grad_src, grad_dst = (torch.empty_like(t) for t in (x, score_src, score_dst))
    rows, cols = (graph.grouped(transpose=t) for t in (transpose, not transpose))
    inputs = (x, score_src, score_dst, *options, stats)
    delta = stats.new_empty(stats.shape[:2])
    native.library().gat_backward_dst(*rows, *inputs, grad, delta, grad_dst)
    native.library().gat_backward_src(*cols, *inputs, delta, grad, grad_src, grad_x)
    return grad_x, grad_src, grad_dst


def _attention(
    graph: Graph,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    transpose: bool,
    scale: float,
    dropout: float,
    seed: int,
) -> tuple[Tensor, Tensor]:
    out, stats = _softmax_results(query)
    rows = graph.grouped(transpose=transpose)
    native.library().attention(*rows, query, key, value, scale, dropout, seed, out, stats)
    return out, stats


def _attention_backward(
    graph: Graph,
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    stats: Tensor,
    transpose: bool,
    *options: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_query, grad_key, grad_value = (torch.empty_like(t) for t in (query, key, value))
    rows, cols = (graph.grouped(transpose=t) for t in (transpose, not transpose))
    inputs = (query, key, value, *options, stats)
    delta = stats.new_empty(stats.shape[:2])
    native.library().attention_backward_dst(*rows, *inputs, grad, delta, grad_query)
    native.library().attention_backward_src(*cols, *inputs, delta, grad, grad_key, grad_value)
    return grad_query, grad_key, grad_value


_KERNELS: dict[str, Callable[..., Any]] = {
    "spmm": _spmm,
    "sddmm": _sddmm,
    "segment_reduce": _segment_reduce,
    "segment_reduce_backward": _segment_reduce_backward,
    "gatv2": _gatv2,
    "gatv2_backward": _gatv2_backward,
    "gat": _gat,
    "gat_backward": _gat_backward,
    "attention": _attention,
    "attention_backward": _attention_backward,
}
