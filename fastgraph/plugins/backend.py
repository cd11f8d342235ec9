"""The interface of a backend: the kernels that it provides, and their signatures.

A kernel receives a :class:`fastgraph.Graph`, contiguous matrices ``[nodes, channels]`` and plain
options, checked by the operator, and returns new tensors. It never sees autograd. The operators and
the signatures of their kernels:

``spmm(graph, x, weight, reduce, transpose) -> out``
    ``weight`` is ``None``, ``[E]`` or ``[E, heads]``, where each head has as many consecutive
    channels. ``reduce`` is ``"sum"``, ``"mean"`` (divide by the aggregating node's degree) or
    ``"mean_adjoint"`` (divide by the gathered node's degree).
``spmm_coo(index, x, weight, num_out, reduce, transpose, is_checked) -> out``
    Optional, for the CPU alone, and used for features of one or two channels where the backend
    computes ``spmm``: the same without a graph, each node's edges added up in the order of
    ``index`` ``[2, E]``, int32 or int64, to be checked by the kernel unless its caller did.
    ``weight`` is ``None`` or ``[E]``.
``sddmm(graph, grad, x, heads, reduce, transpose) -> [E, heads]``
    For each edge and head the dot product of the rows of ``grad`` and ``x`` that it joins, scaled
    as above.
``edge_softmax(graph, score, transpose) -> [E, heads]``
    For each head the softmax of ``score`` ``[E, heads]`` over the edges of each aggregating node.
``edge_softmax_backward(graph, out, grad, transpose) -> grad_score``
``segment_reduce(graph, x, weight, reduce, transpose, ties) -> (out, record)``
    ``record`` (int32) serves the backward: for ``"split"`` the number of shares, or, where a single
    edge has the only one, maybe ``~edge``; for ``"winner"`` the edge that won (-1 for none), empty
    for ``"none"``.
``segment_reduce_backward(graph, grad, x, weight, out, record, transpose, ties) -> grad_x``
    ``x`` and ``out`` hold anything for ``"winner"``. If the kernel has a true attribute
    ``goes_by_records``, they also do where no number in ``record`` is above 0: who attains an
    extremum is known there.
``segment_reduce_coo(index, x, weight, num_out, reduce, transpose, is_checked, ties)``
    -> ``(out, record)``. To ``segment_reduce`` what ``spmm_coo`` is to ``spmm``; ``ties`` is not
    ``"winner"``.

``edge_program(graph, operands, program, transpose) -> outputs``
    ``program`` is a :class:`fastgraph.edge_programs.program.Program`, of whose operands those of
    nodes and edges are ``[nodes, width]`` and ``[E, width]``, and parameters ``[width]``. Those of
    nodes and edges are contiguous, or one row that is expanded, as the gradient of a sum is. There
    is a result for each of its outputs; :mod:`fastgraph.edge_programs.evaluation` says which.
``head_scores(x, att) -> scores``
    Dot products of the heads of ``x`` ``[nodes, heads, channels]`` and ``att`` ``[count, heads,
    channels]``, as ``[count, nodes, heads]``.
``head_scores_backward(x, att, grad, *, addend=None, wanted=None) -> (grad_x, grad_att)``
    ``addend``, another part of the gradient of ``x``, is to be added to ``grad_x``. Of ``wanted``
    see below.

The attention operators take contiguous ``[nodes, heads, channels]`` tensors, of which those of the
aggregating nodes are called ``dst`` or query; what edges carry may be ``None``. ``dropout`` is a
rate and ``seed`` an int: an edge is kept where word ``head % 4`` of Philox4x32-10 for the key
``seed`` and the counter ``(edge, head // 4, 0, 0)`` is at least ``dropout * 2^32``. Edges are
numbered as the caller gave them. ``stats`` (accumulating dtype, ``[nodes, heads, 2]``) holds the
largest score and the inverse sum of exponentials of each aggregating node and head, zeros for one
without edges.
``alpha`` are the softmax weights with dropout, ``[E, heads]``, or ``[0, heads]`` where ``weights``
is false. The keyword ``addend`` of forward kernels, ``None`` or ``[nodes or 1, heads, channels]``,
is to be added to ``out``.

``gatv2(graph, x_src, x_dst, att, edge, weight_edge, transpose, slope, dropout, seed, weights)``
    -> ``(out, stats, alpha)``. The score of an edge is ``<att, leaky_relu(z, slope)>``, where ``z``
    is ``x_src + x_dst + edge @ weight_edge[head]``; ``att`` is ``[1, heads, channels]``, ``edge``
    ``[E, edge_dim]`` and ``weight_edge`` ``[heads, edge_dim, channels]``.
``gat(graph, x, score_src, score_dst, score_edge, transpose, slope, dropout, seed, weights)``
    -> ``(out, stats, alpha)``. The score is ``leaky_relu(score_src + score_dst + score_edge,
    slope)``, from ``[nodes, heads]`` and ``[E, heads]``.
``attention(graph, query, key, value, edge, transpose, scale, dropout, seed, weights)``
    -> ``(out, stats, alpha)``. The channels of ``edge`` ``[E, edge_dim]`` follow those of the key
    and of the value of each head, so that ``query`` and ``out`` have ``channels + edge_dim`` of
    them. The score is ``scale * <query, (key, edge)>``.
``edge_attention(graph, query, key, value, edge, weight_edge, transpose, scale, dropout, seed,
weights)``
    -> ``(out, stats, alpha)``. The same with ``edge @ weight_edge[head]`` added to the key and to
    the value, so that queries and outputs have ``channels``; operands as of ``gatv2``. Layers do
    without it where a backend has none.
``biased_attention(graph, query, key, value, edge, bias, table, bias_index, transpose, scale,
dropout, seed, weights)``
    -> ``(out, stats, alpha)``. ``attention`` with ``bias`` ``[E, heads]`` and the rows
    ``bias_index`` (uint8, int16, int32 or int64, ``[E]``, to be checked by the kernel) of ``table``
    ``[types, heads]`` added to scores; each is ``None`` or there, the last two together. Where all
    scores of a node are -infinity, the output is the addend alone, and statistics and weights are
    0. The gradient of ``bias_index`` is ``None``.
``block_attention(graph, query, key, value, table, bias_index, transpose, scale, dropout, seed,
weights, *, addend)``
    The same without features of edges and a bias of each edge, for graphs whose nodes have
    neighbours in common.
``dense_attention(query, key, value, bias, ptr, key_ptr, pair_type, scale, dropout, seed,
first_head, first_pair)``
    -> ``(out, stats)``.
    Of graphs in a row, of which each query attends to all keys of its own: ``ptr`` and ``key_ptr``
    are int64, contiguous, and to be checked by the kernel: ``[graphs + 1]`` offsets of queries, and
    of keys and values. Dropout has the pairs for edges, numbered graph by graph, query by query and
    key by key; numbers beyond 32 bits have their upper half in the third counter. Heads are
    numbered from ``first_head`` on and pairs from ``first_pair``, where these are some of all.
    ``bias``, ``None`` or ``[pairs, heads]``, is added to scores; with ``pair_type`` (uint8, int16,
    int32 or int64, ``[pairs]``, to be checked by the kernel) it is ``[types, heads]``. Where it
    makes all scores of a query -infinity, the output and the statistics are 0.
``dense_attention_backward(grad, grad_logsum, query, key, value, bias, ptr, key_ptr, pair_type, out,
stats, scale, dropout, seed, first_head, first_pair, wants_bias)``
    -> the gradients of query, key, value and bias, ``None`` for the last if it is not wanted.
``gatv2_backward``, ``gat_backward``, ``attention_backward``, ``edge_attention_backward``,
``biased_attention_backward``, ``block_attention_backward``
    Take ``(graph, grad, grad_alpha, grad_logsum, <the tensors>, stats, <the options without
    weights>)``, where ``grad_alpha`` is ``None`` if there was no ``alpha``, and ``grad_logsum``
    (accumulating dtype, ``[nodes, heads]``) is the gradient of the logarithm of the sum of
    exponentials of the scores, or ``None``. They return a gradient for each of the tensors,
    ``None`` for those that are ``None``. The keyword ``wanted`` has a bool for each of the tensors,
    or is ``None`` for all of them: a gradient that is not wanted may be left out, as ``None``, and
    is not looked at. The others are the same in bits, whatever is wanted besides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fastgraph.graphs.graph import Csr

Kernel = Callable[..., Any]

FALLBACK_PRIORITY = -1
"""The priority of the last resort; see :class:`Backend`."""

FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""The dtypes that operators take."""


def device_type(tensor: Tensor) -> str:
    """``tensor.device.type``, which torch writes anew for each that asks."""
    return "cpu" if tensor.is_cpu else tensor.device.type


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums over tensors of this one are accumulated."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@runtime_checkable
class Backend(Protocol):
    """A provider of kernels.

    Attributes:
        name: unique; what ``fastgraph.enable(backend=...)`` takes.
        priority: the highest available one computes an operator. Layers are routed to backends
            with a priority of 0 or more. Operators that are called nevertheless, by name or by the
            backward pass of a forward pass that ran elsewhere, fall to a backend made for their
            device, whatever its priority, and else to the one with ``FALLBACK_PRIORITY``. Other
            backends with a lower priority compute on request only.
    """

    name: str
    priority: int

    def unavailable(self) -> str | None:
        """Why the backend cannot be used on this machine, or ``None`` if it can."""
        ...

    def kernel(self, operator: str, device_type: str, dtype: torch.dtype) -> Kernel | None:
        """The kernel for an operator on a device type and dtype, or ``None`` if there is none."""
        ...


@runtime_checkable
class VerifiedBackend(Protocol):
    """A backend to which layers are routed once its kernels have passed on the user's device.

    :mod:`fastgraph.verification` checks them, at the first call that could be routed to them.
    Whoever selects the backend by its name does without.
    """

    name: str

    def identities(self) -> dict[str, str]:
        """Devices that differ, as torch names them, and what each verdict depends on.

        That is the kind of device and everything below the kernels, as text; devices of one kind
        need one of them to be checked.
        """
        ...


class Builder(Protocol):
    """Builds graphs on one type of devices.

    Indices are int32 or int64. Those that are wrong are refused with the errors that
    :class:`fastgraph.Graph` promises. Where ``numbered`` is false, nobody looks at ``edge_id``, and
    ``None`` will do.
    """

    def build_csr(
        self, row: Tensor, col: Tensor, num_rows: int, num_cols: int, numbered: bool
    ) -> Csr:
        """Entries ``(row[e], col[e])`` grouped by row, in the order in which they were given."""
        ...

    def build_csr_with_loops(
        self,
        row: Tensor,
        col: Tensor,
        num_rows: int,
        num_cols: int,
        num_loops: int,
        numbered: bool,
    ) -> Csr:
        """The same without the entries on the diagonal, and ``num_loops`` of those at the end."""
        ...

    def check_csr(self, ptr: Tensor, index: Tensor, num_rows: int, num_cols: int) -> Csr:
        """Entries that are grouped already."""
        ...

    def transpose_csr(self, rows: Csr, num_cols: int, numbered: bool) -> Csr:
        """The entries of a ``Csr`` grouped by column, rows in ascending order."""
        ...

    def reverse_rows(self, rows: Csr) -> Csr:
        """The entries of each row from the last to the first, numbered in this order."""
        ...

    def inverse_degree(self, ptr: Tensor, dtype: torch.dtype) -> Tensor:
        """One over the number of entries of each row, and 1 for a row that has none."""
        ...


@runtime_checkable
class BuildingBackend(Protocol):
    """A backend that builds graphs, too; for others another one does."""

    name: str

    def builder(self, device_type: str) -> Builder | None:
        """The builder of graphs on a type of devices; ``None`` if there is none."""
        ...
