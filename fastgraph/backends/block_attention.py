"""Attention by sub-blocks on the CPU: windows of 16 nodes beside columns of their neighbours.

And the same numbers by rows, for calls that sub-blocks do not compute, and for GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from fastgraph.graphs.graph import Graph
from fastgraph.graphs.windows import windows_beside
from fastgraph.machine.memory import new_rows
from fastgraph.plugins.backend import Kernel, accumulator


def block_attention_kernels(
    library: Callable[[], Any], kernels: Mapping[str, Kernel]
) -> dict[str, Kernel]:
    """The kernels of ``block_attention``, by a native library that has it.

    Sub-blocks have no dropout and leave no weights: such calls are computed by rows.

    Args:
        library: gives the native library; asked at each call.
        kernels: those of ``attention`` and ``biased_attention``, by rows.
    """
    rows = block_attention_by_rows(kernels)

    def forward(
        graph: Graph, *arguments: Any, addend: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, table, bias_index, transpose, scale, dropout, _, weights = arguments
        if dropout > 0 or weights or addend is not None:
            found: tuple[Tensor, Tensor, Tensor] = rows["block_attention"](
                graph, *arguments, addend=addend
            )
            return found
        windows = windows_beside(graph, transpose=transpose)
        out = new_rows(query, query.shape)
        stats = new_rows(query, (*query.shape[:2], 2), accumulator(query.dtype))
        library().block_attention(*windows, query, key, value, table, bias_index, scale, out, stats)
        return out, stats, query.new_empty(0, query.shape[1])

    def backward(
        graph: Graph,
        grad: Tensor,
        grad_alpha: Tensor | None,
        grad_logsum: Tensor | None,
        *arguments: Any,
        wanted: Sequence[bool] | None = None,
    ) -> tuple[Tensor | None, ...]:
        query, key, value, table, bias_index, stats, transpose, scale, dropout, _ = arguments
        if dropout > 0 or grad_alpha is not None:
            by_rows: tuple[Tensor | None, ...] = rows["block_attention_backward"](
                graph, grad, grad_alpha, grad_logsum, *arguments, wanted=wanted
            )
            return by_rows
        is_wanted = (True,) * 5 if wanted is None else wanted
        given = (query, key, value, table, bias_index, scale, stats, grad)
        delta = new_rows(stats, stats.shape[:2])
        of_query = new_rows(query, query.shape)
        of_table = None
        if table is not None and is_wanted[3]:
            of_table = new_rows(table, table.shape)
        by_query = windows_beside(graph, transpose=transpose)
        library().block_attention_backward_queries(
            *by_query, *given, grad_logsum, delta, of_query, of_table
        )
        if not (is_wanted[1] or is_wanted[2]):
            return of_query, None, None, of_table, None
        of_key, of_value = new_rows(key, key.shape), new_rows(value, value.shape)
        by_key = windows_beside(graph, transpose=not transpose)
        library().block_attention_backward_keys(*by_key, *given, delta, of_key, of_value)
        return of_query, of_key, of_value, of_table, None

    return {"block_attention": forward, "block_attention_backward": backward}


def block_attention_by_rows(kernels: Mapping[str, Kernel]) -> dict[str, Kernel]:
    """The kernels of ``block_attention`` where no nodes stand side by side.

    Args:
        kernels: those of ``attention`` and ``biased_attention``.
    """

    def forward(
        graph: Graph, *arguments: Any, addend: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        name, tensors = _by_rows(*arguments[:5])
        found: tuple[Tensor, Tensor, Tensor] = kernels[name](
            graph, *tensors, *arguments[5:], addend=addend
        )
        return found

    def backward(
        graph: Graph,
        grad: Tensor,
        grad_alpha: Tensor | None,
        grad_logsum: Tensor | None,
        *arguments: Any,
        wanted: Sequence[bool] | None = None,
    ) -> tuple[Tensor | None, ...]:
        name, tensors = _by_rows(*arguments[:5])
        has_table = arguments[3] is not None
        if wanted is not None:
            wanted = (*wanted[:3], *((False, False, *wanted[3:]) if has_table else (False,)))
        found = kernels[f"{name}_backward"](
            graph, grad, grad_alpha, grad_logsum, *tensors, *arguments[5:], wanted=wanted
        )
        return (*found[:3], *(found[5:] if has_table else (None, None)))

    return {"block_attention": forward, "block_attention_backward": backward}


def _by_rows(
    query: Tensor, key: Tensor, value: Tensor, table: Tensor | None, bias_index: Tensor | None
) -> tuple[str, tuple[Tensor | None, ...]]:
    """The kernel by rows that does the same, and its tensors."""
    if table is None:
        return "attention", (query, key, value, None)
    return "biased_attention", (query, key, value, None, None, table, bias_index)
