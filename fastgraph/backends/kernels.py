"""Operators computed by a native library: memory for the results, and one call for each.

The libraries for different devices have functions of the same names and arguments
(``csrc/bindings/operators.cpp``), but for the backward pass of ``gat``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fastgraph.graphs.graph import Csr, Graph
from fastgraph.machine.memory import new_rows
from fastgraph.plugins.backend import Kernel, accumulator
from fastgraph.registry.operators import ATTENTION, GAT, GATV2, Attention


class GroupedRows(Protocol):
    """Gives the edges of a graph, grouped by the nodes that aggregate features of others."""

    def __call__(
        self,
        graph: Graph,
        gathered: Tensor,
        *,
        transpose: bool,
        attention: bool = False,
        ascending: bool = False,
        numbered: bool = True,
    ) -> Csr: ...


def native_kernels(
    library: Callable[[], Any],
    rows: GroupedRows,
    *,
    at_once: Collection[str],
    leaves_out: bool,
    by_destination: Collection[str] = (),
    writes_edges: Collection[str] = (),
    more: Sequence[Attention] = (),
) -> dict[str, Kernel]:
    """The kernels by the names of their operators.

    Args:
        library: gives the native library; asked at each call.
        rows: gives them as the library's kernels visit them.
        at_once: attention operators whose backward passes are one function of the library.
        leaves_out: whether functions for gradients take ``None`` for those of optional operands and
            of ``head_scores`` that nobody wants. The others are written, wanted or not.
        by_destination: ``"segment_reduce"`` where its backward pass goes along destinations.
        writes_edges: attention operators whose backward passes write the gradients of what edges
            carry for all heads. The others add to them what each head has.
        more: attention operators that not every library has, and this one does.
    """
    device = _Device(library, rows, leaves_out, writes_edges)
    plain = _Plain(device)
    kernels: dict[str, Kernel] = {
        "spmm": plain.spmm,
        "sddmm": plain.sddmm,
        "edge_softmax": plain.edge_softmax,
        "edge_softmax_backward": plain.edge_softmax_backward,
        "segment_reduce": plain.segment_reduce,
        "segment_reduce_backward": _extremum_backward(device, "segment_reduce" in by_destination),
        "head_scores": plain.head_scores,
        "head_scores_backward": plain.head_scores_backward,
    }
    for operator in (GATV2, GAT, ATTENTION, *more):
        attention = _Attention(device, operator)
        kernels[operator.name] = attention.forward
        is_at_once = operator.name in at_once
        backward = attention.backward_at_once if is_at_once else attention.backward
        kernels[f"{operator.name}_backward"] = backward
    return kernels


def dense_attention_kernels(library: Callable[[], Any]) -> dict[str, Kernel]:
    """The kernels of ``dense_attention``, by a native library that has it."""

    def forward(query: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        out = new_rows(query, query.shape)
        stats = new_rows(query, (*query.shape[:2], 2), accumulator(query.dtype))
        library().dense_attention(query, *arguments, out, stats)
        return out, stats

    def backward(
        grad: Tensor, grad_logsum: Tensor | None, *arguments: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        *inputs, out, stats, scale, dropout, seed, first_head, first_pair, wants_bias = arguments
        query, key, value = (new_rows(x, x.shape) for x in inputs[:3])
        bias = new_rows(inputs[3], inputs[3].shape) if wants_bias else None
        options = scale, dropout, seed, first_head, first_pair
        library().dense_attention_backward(
            *inputs, *options, out, stats, grad, grad_logsum, query, key, value, bias
        )
        return query, key, value, bias

    return {"dense_attention": forward, "dense_attention_backward": backward}


def spmm_by_head(kernel: Kernel) -> Kernel:
    """A kernel of ``spmm`` from one that takes no weights of heads: a call for each of them."""

    def spmm(
        graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, transpose: bool
    ) -> Tensor:
        if weight is not None and weight.dim() == 2 and weight.shape[1] == 1:
            weight = weight.squeeze(1)
        if weight is None or weight.dim() == 1:
            return kernel(graph, x, weight, reduce, transpose)  # type: ignore[no-any-return]
        of_heads = zip(_heads(x, weight.shape[1]), weight.unbind(1), strict=True)
        out = [kernel(graph, x, w.contiguous(), reduce, transpose) for x, w in of_heads]
        return torch.cat(out, dim=1)

    return spmm


def sddmm_by_head(kernel: Kernel) -> Kernel:
    """A kernel of ``sddmm`` from one that takes no heads: a call for each of them."""

    def sddmm(
        graph: Graph, grad: Tensor, x: Tensor, heads: int, reduce: str, transpose: bool
    ) -> Tensor:
        if heads == 1:
            return kernel(graph, grad, x, 1, reduce, transpose)  # type: ignore[no-any-return]
        of_heads = zip(_heads(grad, heads), _heads(x, heads), strict=True)
        return torch.cat([kernel(graph, g, x, 1, reduce, transpose) for g, x in of_heads], dim=1)

    return sddmm


def _heads(x: Tensor, heads: int) -> list[Tensor]:
    """Copies of the channels of each head."""
    by_head = x.reshape(x.shape[0], heads, x.shape[1] // heads)
    return [part.contiguous() for part in by_head.unbind(1)]


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
    """The settings that kernels for one kind of device have in common."""

    library: Callable[[], Any]
    rows: GroupedRows
    leaves_out: bool
    writes_edges: Collection[str] = ()


class _Plain:
    """The kernels of all operators but attention."""

    def __init__(self, device: _Device) -> None:
        self._device = device

    def spmm(
        self, graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, transpose: bool
    ) -> Tensor:
        rows = self._device.rows(graph, x, transpose=transpose, numbered=weight is not None)
        row_scale, col_scale = scales(graph, reduce, transpose, x.dtype)
        out = new_rows(x, (graph.num_src if transpose else graph.num_dst, x.shape[1]))
        weight = None if weight is None else weight.contiguous()
        self._device.library().spmm(*rows.arguments, weight, row_scale, col_scale, x, out)
        return out

    def sddmm(
        self, graph: Graph, grad: Tensor, x: Tensor, heads: int, reduce: str, transpose: bool
    ) -> Tensor:
        row_scale, col_scale = scales(graph, reduce, transpose, x.dtype)
        if col_scale is not None:  # scale rows of the transposed graph instead
            transpose, row_scale, grad, x = not transpose, col_scale, x, grad
        rows = self._device.rows(graph, x, transpose=transpose)
        out = new_rows(x, (graph.num_edges, heads))
        self._device.library().sddmm(*rows.arguments, row_scale, grad, x, out)
        return out

    def edge_softmax(self, graph: Graph, score: Tensor, transpose: bool) -> Tensor:
        out = new_rows(score, score.shape)
        self._device.library().edge_softmax(
            *graph.grouped(transpose=transpose).arguments, score, out
        )
        return out

    def edge_softmax_backward(
        self, graph: Graph, out: Tensor, grad: Tensor, transpose: bool
    ) -> Tensor:
        grad_score = new_rows(out, out.shape)
        rows = graph.grouped(transpose=transpose)
        self._device.library().edge_softmax_backward(*rows.arguments, out, grad, grad_score)
        return grad_score

    def segment_reduce(
        self,
        graph: Graph,
        x: Tensor,
        weight: Tensor | None,
        reduce: str,
        transpose: bool,
        ties: str,
    ) -> tuple[Tensor, Tensor]:
        rows = self._device.rows(graph, x, transpose=transpose)
        out = new_rows(x, (graph.num_src if transpose else graph.num_dst, x.shape[1]))
        record = new_rows(x, (0,) if ties == "none" else out.shape, torch.int32)
        self._device.library().segment_reduce(
            *rows.arguments,
            None if weight is None else weight.contiguous(),
            reduce == "max",
            x,
            out,
            record if ties == "split" else None,
            record if ties == "winner" else None,
        )
        return out, record

    def head_scores(self, x: Tensor, att: Tensor) -> Tensor:
        scores = new_rows(x, (att.shape[0], *x.shape[:2]))
        self._device.library().head_scores(x, att, scores)
        return scores

    def head_scores_backward(
        self,
        x: Tensor,
        att: Tensor,
        grad: Tensor,
        *,
        addend: Tensor | None = None,
        wanted: Sequence[bool] | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        if wanted is None or not self._device.leaves_out:
            wanted = True, True
        wants_x, wants_att = wanted
        grad_x = new_rows(x, x.shape) if wants_x else None
        grad_att = att.new_empty(att.shape) if wants_att else None
        self._device.library().head_scores_backward(x, att, grad, addend, grad_x, grad_att)
        return grad_x, grad_att


def _extremum_backward(device: _Device, by_destination: bool) -> Kernel:
    """The gradient of extrema, along destinations or along sources."""

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
        edges: tuple[Any, ...]
        if by_destination:
            # Sums have their terms in the order of rows, so that they need these as they are.
            edges = graph.grouped(transpose=transpose)[:4]
        else:
            edges = device.rows(graph, grad, transpose=not transpose).arguments
            if ties == "split":
                share = new_rows(grad, grad.shape)
                device.library().divide_by_ties(grad, record, share)
                grad = share
        grad_x = new_rows(x, x.shape)
        device.library().segment_reduce_backward(
            *edges,
            None if weight is None else weight.contiguous(),
            x,
            out,
            grad,
            record if ties == "split" else None,
            record if ties == "winner" else None,
            grad_x,
        )
        return grad_x

    segment_reduce_backward.goes_by_records = by_destination  # type: ignore[attr-defined]
    return segment_reduce_backward


class _Attention:
    """The kernels of an attention operator, forward and backward."""

    def __init__(self, device: _Device, operator: Attention) -> None:
        self._device, self._operator = device, operator
        self._name, self._gathered = operator.name, operator.gathered

    def forward(
        self, graph: Graph, *arguments: Any, addend: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        *inputs, transpose, option, dropout, seed, weights = arguments
        out, stats, alpha = self._results(graph, inputs, transpose, weights)
        getattr(self._device.library(), self._name)(
            *self._rows(graph, inputs[self._gathered], transpose).arguments,
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

    def _results(
        self, graph: Graph, inputs: list[Any], transpose: bool, weights: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Memory for the output, the statistics of its softmax and its weights."""
        like = inputs[self._gathered]
        # A query has the channels of the output, where features of edges add to those of nodes.
        channels = inputs[0].shape[2]
        rows, heads = graph.num_src if transpose else graph.num_dst, like.shape[1]
        out = new_rows(like, (rows, heads, channels))
        stats = new_rows(like, (rows, heads, 2), accumulator(like.dtype))
        return out, stats, new_rows(like, (graph.num_edges if weights else 0, heads))

    def backward(
        self,
        graph: Graph,
        grad: Tensor,
        grad_alpha: Tensor | None,
        grad_logsum: Tensor | None,
        *arguments: Any,
        wanted: Sequence[bool] | None = None,
    ) -> tuple[Tensor | None, ...]:
        """In two passes.

        That over destinations comes first, writes the gradients of everything but what the sources
        have, and leaves two numbers for each edge and head, and signs where there are features of
        edges. The other is left out where nothing that it writes is wanted.
        """
        *inputs, stats, transpose, option, dropout, seed = arguments
        gradients = self._empty_gradients(inputs, wanted)
        places = self._operator.differentiable
        left = new_rows(stats, (graph.num_edges, stats.shape[1], 2 + self._of_signs(inputs, stats)))
        shared = (*inputs, option, dropout, seed, stats, grad, grad_alpha, grad_logsum, left)
        # The gradient of parameters depends on the order of rows, in bits.
        ascending = self._operator.has_parameters
        by_destination = self._rows(graph, inputs[self._gathered], transpose, ascending)
        library, of_sources = self._device.library(), self._operator.by_source
        getattr(library, f"{self._name}_backward_dst")(
            *by_destination.arguments,
            *shared,
            *(gradients[i] for i in places if not of_sources[i]),
        )
        if wanted is None or any(w and s for w, s in zip(wanted, of_sources, strict=True)):
            by_source = self._rows(graph, grad, not transpose)
            getattr(library, f"{self._name}_backward_src")(
                *by_source.arguments,
                *shared,
                *(gradients[i] for i in places if of_sources[i]),
            )
        return tuple(None if g is None else g.to(grad.dtype) for g in gradients)

    def _of_signs(self, inputs: list[Any], stats: Tensor) -> int:
        """Numbers like the statistics that hold a bit for each channel, if edges leave signs."""
        if not self._operator.has_signs:
            return 0
        edge, bits = inputs[self._operator.optional[0]], 8 * stats.itemsize
        if edge is None or edge.shape[1] == 0:
            return 0
        channels: int = inputs[self._gathered].shape[2]
        return -(-channels // bits)

    def backward_at_once(
        self,
        graph: Graph,
        grad: Tensor,
        grad_alpha: Tensor | None,
        grad_logsum: Tensor | None,
        *arguments: Any,
        wanted: Sequence[bool] | None = None,
    ) -> tuple[Tensor | None, ...]:
        """In one call."""
        *inputs, stats, transpose, option, dropout, seed = arguments
        gradients = self._empty_gradients(inputs, wanted)
        getattr(self._device.library(), f"{self._name}_backward")(
            *self._rows(graph, inputs[self._gathered], transpose).arguments,
            *self._rows(graph, grad, not transpose).arguments,
            *inputs,
            option,
            dropout,
            seed,
            stats,
            grad,
            grad_alpha,
            grad_logsum,
            *(gradients[i] for i in self._operator.differentiable),
        )
        return tuple(None if g is None else g.to(grad.dtype) for g in gradients)

    def _rows(
        self, graph: Graph, gathered: Tensor, transpose: bool, ascending: bool = False
    ) -> Csr:
        return self._device.rows(
            graph, gathered, transpose=transpose, attention=True, ascending=ascending
        )

    def _empty_gradients(
        self, inputs: list[Any], wanted: Sequence[bool] | None
    ) -> list[Tensor | None]:
        """Memory for gradients, and ``None`` for those that the library leaves out."""
        if wanted is not None and self._device.leaves_out:
            inputs = list(inputs)
            for position in self._operator.optional:
                if not wanted[position]:
                    inputs[position] = None
        return [
            None if tensor is None or operand.counts else self._empty_gradient(position, tensor)
            for position, (operand, tensor) in enumerate(
                zip(self._operator.operands, inputs, strict=True)
            )
        ]

    def _empty_gradient(self, position: int, tensor: Tensor) -> Tensor:
        if not self._operator.shared_by_heads[position]:
            return new_rows(tensor, tensor.shape)
        dtype = accumulator(tensor.dtype)
        if self._name in self._device.writes_edges:
            return new_rows(tensor, tensor.shape, dtype)
        return torch.zeros_like(tensor, dtype=dtype)
