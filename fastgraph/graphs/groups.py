"""Rows grouped by an index: the edges of a graph, each from a row to its group.

So what reduces neighbourhoods reduces groups of rows, without anything being gathered.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastgraph.graphs.edges import Grouped, OutOfRange
from fastgraph.graphs.graph import Graph
from fastgraph.graphs.memo import remembered
from fastgraph.plugins.refusal import Refusal

_UNORDERED = Refusal("ptr does not rise from the first row to the last")


def groups_by_index(index: Tensor, num_groups: int) -> Grouped | OutOfRange:
    """The groups of rows, remembered as long as ``index`` lives unchanged.

    Args:
        index: int64 or int32 ``[rows]``, the group of each row.
        num_groups: as many as there are.

    Returns:
        A graph whose edges are numbered as the rows are, or the reason to refuse if a row is of no
        group.
    """
    try:
        return remembered("groups", grouped, index, num_groups)
    except IndexError:
        return OutOfRange(
            f"index leads to another group than 0 to {num_groups - 1}",
            "index points outside the groups",
        )


def groups_by_ptr(ptr: Tensor, num_rows: int) -> Grouped | Refusal:
    """The groups of consecutive rows, remembered as long as ``ptr`` lives unchanged.

    Args:
        ptr: int64 or int32 ``[groups + 1]``, where groups begin and end.
        num_rows: in all groups.

    Returns:
        As for :func:`groups_by_index`; a reason to refuse if not all rows are in one group each.
    """
    try:
        return remembered("groups of ptr", _by_ptr, ptr, num_rows)
    except ValueError:
        return _UNORDERED


def grouped(index: Tensor, num_groups: int) -> Grouped:
    """The groups of rows, made anew; arguments as for :func:`groups_by_index`.

    Raises:
        IndexError: a row is of no group.
    """
    # A group as its own source: what is copied of the index is needed for the gradient.
    graph = Graph((index, index), num_groups, num_groups)
    rows = graph.by_destination
    destinations = rows.col if rows.edge_id is None else index.to(torch.int32, copy=True)
    return Grouped(graph.from_each_edge(destinations))


def _by_ptr(ptr: Tensor, num_rows: int) -> Grouped:
    numbers = torch.arange(num_rows, dtype=ptr.dtype, device=ptr.device)
    num_groups = ptr.numel() - 1
    graph = Graph(numbers, num_rows, num_groups, ptr)
    destinations = torch.repeat_interleave(ptr.diff(), output_size=num_rows).int()
    return Grouped(graph.from_each_edge(destinations))
