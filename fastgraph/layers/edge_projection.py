r"""The projection of features of edges, folded into queries and outputs.

Attention whose keys and values have :math:`W e` added to them scores
:math:`q^\top W e = (W^\top q)^\top e`, and the sum of weighted :math:`W e` is that of weighted
:math:`e`, projected. So nothing is projected for each edge, but two small products are made for
each node, here straight into the memory where their result is wanted.

That is for devices and tensors for which no backend has
:func:`fastgraph.ops.edge_attention`, which does the same within the operator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastgraph.machine.memory import new_rows
from fastgraph.ops.library import DEFINING, needs_torch_operations, wanted_gradients
from fastgraph.plugins.backend import device_type
from fastgraph.registry.registry import REGISTRY


def is_folded_by_operator(query: Tensor) -> bool:
    """True where ``edge_attention`` has a kernel: then nothing is folded around ``attention``."""
    if type(query) in DEFINING:
        return False
    return REGISTRY.refusal("edge_attention", device_type(query), query.dtype) is None


def with_edge_channels(query: Tensor, weight: Tensor) -> Tensor:
    r"""Queries beside what they have to say to features of edges, :math:`(q, W^\top q)`.

    Args:
        query: ``[nodes, heads, channels]``.
        weight: ``W``, ``[heads, channels, edge_dim]``, of the same dtype.

    Returns:
        ``[nodes, heads, channels + edge_dim]``.
    """
    if _is_for_torch(query):
        return _extended_by_torch(query, weight)
    return _Extended.apply(query, weight)  # type: ignore[no-any-return,no-untyped-call]


def project_edge_channels(out: Tensor, weight: Tensor) -> Tensor:
    """Outputs whose sums of features of edges are projected and added: ``y + W z`` of ``(y, z)``.

    Args:
        out: ``[nodes, heads, channels + edge_dim]``.
        weight: ``W``, ``[heads, channels, edge_dim]``, of the same dtype.

    Returns:
        ``[nodes, heads, channels]``, which nothing else refers to.
    """
    if _is_for_torch(out):
        return _folded_by_torch(out, weight)
    return _Folded.apply(out, weight)  # type: ignore[no-any-return,no-untyped-call]


def _is_for_torch(x: Tensor) -> bool:
    return type(x) in DEFINING or torch.compiler.is_compiling()


def _extended_by_torch(x: Tensor, weight: Tensor) -> Tensor:
    return torch.cat([x, torch.einsum("nhc,hcd->nhd", x, weight).to(x.dtype)], dim=-1)


def _folded_by_torch(x: Tensor, weight: Tensor) -> Tensor:
    channels: Tensor
    channels, of_edges = x.split([weight.shape[1], weight.shape[2]], dim=-1)
    return channels + torch.einsum("nhd,hcd->nhc", of_edges, weight)


def _extended(x: Tensor, weight: Tensor) -> Tensor:
    if needs_torch_operations(x):
        return _extended_by_torch(x, weight)
    channels = weight.shape[1]
    out = new_rows(x, (*x.shape[:2], channels + weight.shape[2]))
    out[..., :channels] = x
    torch.bmm(x.transpose(0, 1), weight, out=out[..., channels:].transpose(0, 1))
    return out


def _folded(x: Tensor, weight: Tensor) -> Tensor:
    if needs_torch_operations(x):
        return _folded_by_torch(x, weight)
    channels = weight.shape[1]
    out = new_rows(x, (*x.shape[:2], channels))
    out[...] = x[..., :channels]
    by_head = out.transpose(0, 1)
    by_head.baddbmm_(x[..., channels:].transpose(0, 1), weight.transpose(1, 2))
    return out


def _weight_gradient(channels: Tensor, of_edges: Tensor) -> Tensor:
    """The sum over the nodes of outer products, ``[heads, channels, edge_dim]``."""
    return torch.bmm(channels.permute(1, 2, 0), of_edges.transpose(0, 1))


class _Extended(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(query if ctx.needs_input_grad[1] else None, weight)
        return _extended(query, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        query, weight = ctx.saved_tensors
        wants_query, wants_weight = wanted_gradients(ctx)
        return (
            _folded(grad, weight) if wants_query else None,
            _weight_gradient(query, grad[..., weight.shape[1] :]) if wants_weight else None,
        )


class _Folded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(out if ctx.needs_input_grad[1] else None, weight)
        return _folded(out, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        out, weight = ctx.saved_tensors
        wants_out, wants_weight = wanted_gradients(ctx)
        return (
            _extended(grad, weight) if wants_out else None,
            _weight_gradient(grad, out[..., weight.shape[1] :]) if wants_weight else None,
        )
