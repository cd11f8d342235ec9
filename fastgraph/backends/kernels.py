"""Operators computed by a native library: memory for the results, and one call for each.

The libraries for different devices have functions of the same names and arguments
(``csrc/bindings/operators.cpp``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgraph.backends.base import Kernel, accumulator
from fastgraph.graph import Csr, Graph


def native_kernels(
    library: Callable[[], Any], *, leaves_edges: bool = False, any_row_order: bool = False
) -> dict[str, Kernel]:
    """The kernels by the names of their operators.

    Args:
        library: gives the native library; asked at each call.
        leaves_edges: ``kLeavesEdges`` of the library's ``device.h``.
        any_row_order: ``kAnyRowOrder`` there.
    """
    device = _Device(library, leaves_edges, any_row_order)
    plain = _Plain(device)
    gatv2 = _Attention(
        device, "gatv2", rows=1, by_dst=(1, 2, 3, 4), per_edge=(3,), sums_over_rows=True
    )
    gat = _Attention(device, "gat", rows=2, by_dst=(2, 3))
    attention = _Attention(device, "attention", rows=0, by_dst=(0, 3), per_edge=(3,), gathered=1)
    return {
        "spmm": plain.spmm,
        "sddmm": plain.sddmm,
        "segment_reduce": plain.segment_reduce,
        "segment_reduce_backward": plain.segment_reduce_backward,
        "head_scores": plain.head_scores,
        "head_scores_backward": plain.head_scores_backward,
        "gatv2": gatv2.forward,
        "gatv2_backward": gatv2.backward,
        "gat": gat.forward,
        "gat_backward": gat.backward,
        "attention": attention.forward,
        "attention_backward": attention.backward,
    }


def scales(
    graph: Graph, reduce: str, transpose: bool, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Factors of the aggregating and of the gathered nodes."""
    if reduce == "sum":
        return None, None
    if reduce == "mean":
        return graph.inverse_degree(transpose=transpose, dtype=accumulator(dtype)), None
    return None, graph.inverse_degree(transpose=not transpose, dtype=accumulator(dtype))


class _Device(NamedTuple):
    """What kernels for one kind of device have in common.

    ``library`` gives the native library. ``leaves_edges`` says whether two numbers for each edge
    and head pass from one backward pass of attention to the other, or one for each aggregating node
    and head; ``any_row_order`` whether kernels take the rows of a graph in any order.
    """

    library: Callable[[], Any]
    leaves_edges: bool
    any_row_order: bool

    def rows(
        self, graph: Graph, gathered: Tensor, transpose: bool, *, attention: bool = False
    ) -> Csr:
        """The edges by the nodes that aggregate features of others, ``gathered``."""
        if self.any_row_order:
            return graph.in_any_order(gathered, transpose=transpose, attention=attention)
        return graph.grouped(transpose=transpose)


class _Plain:
    """The kernels of all operators but attention."""

    def __init__(self, device: _Device) -> None:
        self._device = device

    def spmm(
        self, graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, transpose: bool
    ) -> Tensor:
        rows = self._device.rows(graph, x, transpose)
        row_scale, col_scale = scales(graph, reduce, transpose, x.dtype)
        out = x.new_empty((rows.ptr.numel() - 1, x.shape[1]))
        weight = None if weight is None else weight.contiguous()
        self._device.library().spmm(*rows, weight, row_scale, col_scale, x, out)
        return out

    def sddmm(self, graph: Graph, grad: Tensor, x: Tensor, reduce: str, transpose: bool) -> Tensor:
        row_scale, col_scale = scales(graph, reduce, transpose, x.dtype)
        if col_scale is not None:  # scale rows of the transposed graph instead
            transpose, row_scale, grad, x = not transpose, col_scale, x, grad
        rows = self._device.rows(graph, x, transpose)
        out = x.new_empty((graph.num_edges,))
        self._device.library().sddmm(*rows, row_scale, grad, x, out)
        return out

    def segment_reduce(
        self,
        graph: Graph,
        x: Tensor,
        weight: Tensor | None,
        reduce: str,
        transpose: bool,
        ties: str,
    ) -> tuple[Tensor, Tensor]:
        rows = self._device.rows(graph, x, transpose)
        out = x.new_empty((rows.ptr.numel() - 1, x.shape[1]))
        record = x.new_empty((0,) if ties == "none" else out.shape, dtype=torch.int32)
        self._device.library().segment_reduce(
            *rows,
            None if weight is None else weight.contiguous(),
            reduce == "max",
            x,
            out,
            record if ties == "split" else None,
            record if ties == "winner" else None,
        )
        return out, record

    def segment_reduce_backward(
        self,
        graph: Graph,
        grad: Tensor,
        x: Tensor,
        weight: Tensor | None,
        out: Tensor,
        record: Tensor,
        transpose: bool,
        ties: str,
    ) -> Tensor:
        cols = self._device.rows(graph, grad, not transpose)
        grad_x = x.new_empty(x.shape)
        if ties == "split":
            share = grad.new_empty(grad.shape)
            self._device.library().divide_by_ties(grad, record, share)
            grad = share
        self._device.library().segment_reduce_backward(
            *cols,
            None if weight is None else weight.contiguous(),
            x,
            out,
            grad,
            record if ties == "winner" else None,
            grad_x,
        )
        return grad_x

    def head_scores(self, x: Tensor, att: Tensor) -> Tensor:
        scores = x.new_empty((att.shape[0], *x.shape[:2]))
        self._device.library().head_scores(x, att, scores)
        return scores

    def head_scores_backward(
        self, x: Tensor, att: Tensor, grad: Tensor, *, addend: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        grad_x, grad_att = x.new_empty(x.shape), att.new_empty(att.shape)
        self._device.library().head_scores_backward(x, att, grad, addend, grad_x, grad_att)
        return grad_x, grad_att


class _Attention:
    """The kernels of an attention operator.

    Args:
        device: what it shares with other operators.
        name: of the operator and of its native functions.
        rows: the position of the tensor of the aggregating nodes among the inputs.
        by_dst: positions of the inputs whose gradients the pass over destinations writes; those of
            the others come from the pass over sources.
        per_edge: positions of inputs ``[E, channels]`` to whose gradients all heads add.
        gathered: the position of a tensor of the gathered nodes among the inputs.
        sums_over_rows: whether the pass over destinations adds up what belongs to no row, to bits
            that depend on the order of rows.
    """

    def __init__(
        self,
        device: _Device,
        name: str,
        rows: int,
        by_dst: tuple[int, ...],
        per_edge: tuple[int, ...] = (),
        gathered: int = 0,
        sums_over_rows: bool = False,
    ) -> None:
        self._device, self._gathered, self._sums_over_rows = device, gathered, sums_over_rows
        self._name, self._rows, self._by_dst, self._per_edge = name, rows, by_dst, per_edge

    def forward(
        self, graph: Graph, *given: Any, addend: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        *inputs, transpose, option, dropout, seed, weights = given
        rows = inputs[self._rows]
        heads = rows.shape[1]
        # gat knows the aggregating nodes by their scores alone.
        out = rows.new_empty(rows.shape[:2] + (rows if rows.dim() == 3 else inputs[0]).shape[2:])
        stats = rows.new_empty((*rows.shape[:2], 2), dtype=accumulator(rows.dtype))
        alpha = rows.new_empty((graph.num_edges if weights else 0, heads))
        getattr(self._device.library(), self._name)(
            *self._device.rows(graph, inputs[self._gathered], transpose, attention=True),
            *inputs,
            option,
            dropout,
            seed,
            out,
            stats,
            alpha if weights else None,
            addend,
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
        rows, heads, _ = stats.shape
        between = stats.new_empty(
            (graph.num_edges, heads, 2) if self._device.leaves_edges else (rows, heads)
        )
        arguments = (*inputs, option, dropout, seed, stats, grad, grad_alpha, between)
        by_dst = [gradients[i] for i in self._by_dst]
        by_src = [g for i, g in enumerate(gradients) if i not in self._by_dst]
        if self._sums_over_rows:
            by_row = graph.grouped(transpose=transpose)
        else:
            by_row = self._device.rows(graph, inputs[self._gathered], transpose, attention=True)
        by_col = self._device.rows(graph, grad, not transpose, attention=True)
        library = self._device.library()
        getattr(library, f"{self._name}_backward_dst")(*by_row, *arguments, *by_dst)
        getattr(library, f"{self._name}_backward_src")(*by_col, *arguments, *by_src)
        return tuple(None if g is None else g.to(grad.dtype) for g in gradients)

    def _empty_gradient(self, position: int, tensor: Tensor) -> Tensor:
        if position in self._per_edge:
            return torch.zeros_like(tensor, dtype=accumulator(tensor.dtype))
        return tensor.new_empty(tensor.shape)
