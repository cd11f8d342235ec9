"""Distances of pairs of nodes, up to a bound, by breadth-first searches from all at once."""

from __future__ import annotations

import torch
from torch import Tensor


def pair_distances(
    ptr: Tensor, sources: Tensor, queries: Tensor, places: Tensor, begins: Tensor, longest: int
) -> Tensor:
    """The lengths of shortest paths from keys to queries, uint8 ``[pairs]``.

    In time of the pairs that are at most ``longest - 1`` apart times their neighbours.

    Args:
        ptr: offsets of rows among ``sources``, ``[rows + 1]``.
        sources: the rows that edges to each row begin at.
        queries: rows, each with a list of pairs.
        places: where each row is in the lists of queries of its graph, ``[rows]``.
        begins: where the list of each query begins among the pairs, one more with their number.
        longest: 1 to 254; what is farther away, or not connected, has ``longest + 1``.
    """
    pairs = int(begins[-1])
    found = torch.full((pairs,), longest + 1, dtype=torch.uint8, device=ptr.device)
    number, key = torch.arange(len(queries), device=ptr.device), queries
    found[begins[:-1] + places[key]] = 0
    claimed = torch.empty(pairs, dtype=torch.int64, device=ptr.device)
    for distance in range(1, longest + 1):
        counts = ptr[key + 1] - ptr[key]
        ends = counts.cumsum(0)
        within = torch.arange(int(counts.sum()), device=ptr.device)
        within = within - (ends - counts).repeat_interleave(counts)
        key = sources[ptr[key].repeat_interleave(counts) + within]
        number = number.repeat_interleave(counts)
        pair = begins[number] + places[key]
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
