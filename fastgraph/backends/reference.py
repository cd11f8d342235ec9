"""The specification: every operator in a few lines of torch, on any device.

Messages are stored (memory grows with edges x channels), and the functions are differentiable, so
they also serve as the second derivative of the fused kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastgraph.backends.base import OPERATORS, Kernel
from fastgraph.graph import Graph


class ReferenceBackend:
    """Pure torch, used where nothing else exists and on request."""

    name = "reference"
    priority = -1

    def unavailable(self) -> str | None:
        return None

    def kernel(self, operator: str, device_type: str, dtype: torch.dtype) -> Kernel | None:
        kernel: Kernel | None = globals()[operator] if operator in OPERATORS else None
        return kernel


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums are accumulated."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def endpoints(graph: Graph, transpose: bool) -> tuple[Tensor, Tensor, int]:
    """For each edge the gathered and the aggregating node, and the number of the latter."""
    src, dst = graph.edge_list()
    return (dst, src, graph.num_src) if transpose else (src, dst, graph.num_dst)


def messages(x: Tensor, weight: Tensor | None, gathered: Tensor) -> Tensor:
    """``w_e x_j`` for each edge, ``[E, *channels]``."""
    rows = x.index_select(0, gathered)
    if weight is None:
        return rows
    return rows * weight.view(-1, *[1] * (x.dim() - 1))


def spmm(graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, transpose: bool) -> Tensor:
    gathered, aggregating, num_out = endpoints(graph, transpose)
    dtype = accumulator(x.dtype)
    message = messages(x.to(dtype), None if weight is None else weight.to(dtype), gathered)
    if reduce == "mean_adjoint":
        scale = graph.inverse_degree(transpose=not transpose, dtype=dtype)
        message = message * scale[gathered].unsqueeze(-1)
    out = message.new_zeros(num_out, x.shape[1]).index_add(0, aggregating, message)
    if reduce == "mean":
        out = out * graph.inverse_degree(transpose=transpose, dtype=dtype).unsqueeze(-1)
    return out.to(x.dtype)


def sddmm(graph: Graph, grad: Tensor, x: Tensor, reduce: str, transpose: bool) -> Tensor:
    gathered, aggregating, _ = endpoints(graph, transpose)
    dtype = accumulator(x.dtype)
    out = (grad.to(dtype)[aggregating] * x.to(dtype)[gathered]).sum(-1)
    if reduce == "mean":
        out = out * graph.inverse_degree(transpose=transpose, dtype=dtype)[aggregating]
    if reduce == "mean_adjoint":
        out = out * graph.inverse_degree(transpose=not transpose, dtype=dtype)[gathered]
    return out.to(x.dtype)


def segment_reduce(
    graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, transpose: bool, ties: str
) -> tuple[Tensor, Tensor]:
    gathered, aggregating, num_out = endpoints(graph, transpose)
    message = messages(x, weight, gathered)
    index = aggregating.unsqueeze(-1).expand_as(message)
    out = message.new_zeros(num_out, x.shape[1]).scatter_reduce(
        0, index, message, reduce=f"a{reduce}", include_self=False
    )
    return out, extremum_record(message, out, index, ties)


def extremum_record(message: Tensor, out: Tensor, index: Tensor, ties: str) -> Tensor:
    """What the backward needs besides ``out``; see :mod:`fastgraph.backends.base`."""
    if ties == "none":
        return out.new_empty(0, dtype=torch.int32)
    attained = message == out.gather(0, index)
    if ties == "split":
        # The output starts as zeros, and a zero extremum of a non-empty row shares with them.
        zeros = ((out == 0) & torch.zeros_like(out, dtype=torch.bool).scatter(0, index, True)).int()
        return zeros.scatter_add(0, index, attained.int())
    edge = torch.arange(message.shape[0], device=out.device, dtype=torch.int32).unsqueeze(-1)
    attained |= message.isnan()
    candidates = torch.where(attained, edge, torch.iinfo(torch.int32).max)
    first = torch.full_like(out, -1, dtype=torch.int32)
    return first.scatter_reduce(0, index, candidates, reduce="amin", include_self=False)


def segment_reduce_backward(
    graph: Graph,
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    out: Tensor,
    record: Tensor,
    transpose: bool,
    ties: str,
) -> Tensor:
    gathered, aggregating, _ = endpoints(graph, transpose)
    message = messages(x.detach(), weight, gathered)
    if ties == "split":
        grad = grad / record
        share = (message == out.detach()[aggregating]).to(grad.dtype)
        grad_message = share * grad[aggregating]
    else:
        edge = torch.arange(message.shape[0], device=x.device).unsqueeze(-1)
        grad_message = torch.where(record[aggregating] == edge, grad[aggregating], 0)
    if weight is not None:
        grad_message = grad_message * weight.unsqueeze(-1)
    dtype = accumulator(x.dtype)
    grad_x = grad_message.new_zeros(x.shape, dtype=dtype)
    return grad_x.index_add(0, gathered, grad_message.to(dtype)).to(x.dtype)
