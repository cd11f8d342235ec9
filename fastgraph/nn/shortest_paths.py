"""Lengths of shortest paths up to a bound, by breadth-first searches."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgraph.graphs.offsets import offsets_of
from fastgraph.sampling.native_calls import call_native

LONGEST = 254
"""Distances that a byte tells from those that are farther."""


def distances_in_ranges(
    ptr: Tensor, sources: Tensor, nodes: Tensor, first: Tensor, begins: Tensor, longest: int
) -> Tensor:
    """The lengths of shortest paths to nodes from all of a range, such as a graph of a batch.

    In time of the pairs that are at most ``longest - 1`` apart times their neighbours, by native
    code on the CPU, and on a GPU by searches from all nodes at once, which take tens of bytes for
    each of these.

    Args:
        ptr: offsets of rows among ``sources``, int64 ``[rows + 1]``.
        sources: the rows that edges to each row begin at, int64; edges are within ranges.
        nodes: where paths end, int64 ``[ranges]``, each a row of its range.
        first: the first row of each range, int64 ``[ranges]``.
        begins: where the results of each range begin, int64 ``[ranges + 1]``; a range is as long
            as these.
        longest: 0 to 254; what is farther away, or not connected, has ``longest + 1``.

    Returns:
        uint8 ``[begins[-1]]``.
    """
    if ptr.device.type == "cpu":
        found = torch.empty(int(begins[-1]), dtype=torch.uint8)
        call_native("distances_in_ranges", ptr, sources, nodes, first, begins, longest, found)
        return found
    return distances_all_at_once(ptr, sources, nodes, first, begins, longest)


def distances_all_at_once(
    ptr: Tensor, sources: Tensor, nodes: Tensor, first: Tensor, begins: Tensor, longest: int
) -> Tensor:
    """:func:`distances_in_ranges` by operations of torch, step by step of all searches."""
    pairs = int(begins[-1])
    found = torch.full((pairs,), longest + 1, dtype=torch.uint8, device=ptr.device)
    number, key = torch.arange(len(nodes), device=ptr.device), nodes
    shifts = begins[:-1] - first
    found[shifts + key] = 0
    claimed = torch.empty(pairs, dtype=torch.int64, device=ptr.device)
    for distance in range(1, longest + 1):
        counts = ptr[key + 1] - ptr[key]
        ends = counts.cumsum(0)
        within = torch.arange(int(counts.sum()), device=ptr.device)
        within = within - (ends - counts).repeat_interleave(counts)
        key = sources[ptr[key].repeat_interleave(counts) + within]
        number = number.repeat_interleave(counts)
        pair = shifts[number] + key
        is_new = found[pair] > longest
        key, number, pair = key[is_new], number[is_new], pair[is_new]
        if not len(pair):
            break
        found[pair] = distance
        # Of the ways to one pair one goes on.
        way = torch.arange(len(pair), device=ptr.device)
        claimed[pair] = way
        goes_on = claimed[pair] == way
        key, number = key[goes_on], number[goes_on]
    return found


def distances_of_pairs(
    ptr: Tensor, sources: Tensor, keys: Tensor, queries: Tensor, longest: int
) -> Tensor:
    """The length of the shortest path from a key to a query, uint8 ``[pairs]``, on the CPU.

    Takes a byte for each row on each thread.

    Args:
        ptr: offsets of rows among ``sources``, int64 ``[rows + 1]``.
        sources: the rows that edges to each row begin at, int64.
        keys: rows, int64 ``[pairs]``.
        queries: likewise.
        longest: 0 to 254; what is farther away, or not connected, has ``longest + 1``.

    Raises:
        IndexError: a key or a query is no row.
    """
    num_rows = len(ptr) - 1
    if len(queries) and not 0 <= int(queries.min()) <= int(queries.max()) < num_rows:
        raise IndexError(
            f"queries: expected rows of 0 to {num_rows - 1}, got {int(queries.min())} to "
            f"{int(queries.max())}"
        )
    order = queries.argsort(stable=True)
    counts = torch.bincount(queries, minlength=num_rows)
    entry_ptr = offsets_of(counts)
    in_order = torch.empty(len(keys), dtype=torch.uint8)
    ordered = keys[order].contiguous()
    call_native("distances_of_entries", ptr, sources, entry_ptr, ordered, longest, in_order)
    return torch.empty_like(in_order).scatter_(0, order, in_order)


def nodes_within(ptr: Tensor, sources: Tensor, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    """The nodes from which paths of bounded length lead to each node.

    Takes 18 bytes for each pair of nodes that are so near, of which 9 are the result.

    Args:
        ptr: offsets of nodes among ``sources``, int64 ``[nodes + 1]``, on the CPU as all.
        sources: the nodes that edges to each node begin at, int64.
        longest: the bound, 0 to 254.

    Returns:
        For each pair the node that is found, int64; the one for which, int64 and ascending; and
        their distance, uint8, ascending for each node from itself on.
    """
    counts, found, distances = call_native("nodes_within", ptr, sources, longest)
    return found, torch.arange(len(counts)).repeat_interleave(counts), distances
