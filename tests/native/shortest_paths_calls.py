"""Valid calls of the native functions that measure distances, and checks of what they wrote."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.native.drawing import Draw, Library, Prepared, assert_equal
from tests.native.sampling_calls import columns


def edges(draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
    """Offsets, the other end of each edge, and the matrix of edges by row, with the diagonal."""
    size = draw.number(1, draw.one_of(6, 60))
    graph = columns(draw, size, size, (torch.int64, torch.int64))
    matrix = torch.eye(size, dtype=torch.bool)
    matrix[graph.dst, graph.row] = True
    return graph.colptr, graph.row, matrix


def distances(matrix: Tensor, longest: int) -> Tensor:
    """By products of matrices, ``[nodes, nodes]``."""
    found = torch.full(matrix.shape, longest + 1)
    reached = torch.eye(len(matrix), dtype=torch.bool)
    found[reached] = 0
    for distance in range(1, min(longest, len(matrix)) + 1):
        wider = (matrix.double() @ reached.double()) > 0
        found[wider & ~reached] = distance
        reached = wider
    return found


def distances_in_ranges(lib: Library, draw: Draw) -> Prepared:
    rowptr, col, matrix = edges(draw)
    size, longest = len(matrix), draw.one_of(0, 1, 2, 5, 254)
    nodes = draw.integers(0, size, draw.number(0, 20))
    first = torch.tensor([draw.number(0, int(node)) for node in nodes], dtype=torch.int64)
    sizes = torch.tensor([draw.number(int(node) + 1, size) for node in nodes], dtype=torch.int64)
    sizes -= first
    begin = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    out = torch.full((int(begin[-1]),), 77, dtype=torch.uint8)
    call = {
        "rowptr": rowptr,
        "col": col,
        "nodes": nodes,
        "first": first,
        "begin": begin,
        "longest": longest,
        "out": out,
    }

    def check(_: Any) -> None:
        for i, (node, low) in enumerate(zip(nodes.tolist(), first.tolist(), strict=True)):
            own = slice(low, low + int(sizes[i]))
            expected = distances(matrix[own, own], longest)[node - low]
            assert_equal(out[begin[i] : begin[i + 1]], expected)

    return call, check


def distances_of_entries(lib: Library, draw: Draw) -> Prepared:
    rowptr, col, matrix = edges(draw)
    size, longest = len(matrix), draw.one_of(0, 1, 2, 5, 254)
    counts = draw.integers(0, 4, size)
    ptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    key = draw.integers(0, size, int(ptr[-1]))
    out = torch.full((len(key),), 77, dtype=torch.uint8)
    call = {"rowptr": rowptr, "col": col, "ptr": ptr, "key": key, "longest": longest, "out": out}

    def check(_: Any) -> None:
        row = torch.arange(size).repeat_interleave(counts)
        assert_equal(out, distances(matrix, longest)[row, key])

    return call, check


def nodes_within(lib: Library, draw: Draw) -> Prepared:
    rowptr, col, matrix = edges(draw)
    longest = draw.one_of(0, 1, 2, 5, 254)

    def check(made: Any) -> None:
        count, node, distance = made
        expected = distances(matrix, longest)
        assert_equal(count, (expected <= longest).sum(1))
        row = torch.arange(len(matrix)).repeat_interleave(count)
        assert_equal(distance, expected[row, node])
        assert len({*zip(row.tolist(), node.tolist(), strict=True)}) == len(node)

    return {"rowptr": rowptr, "col": col, "longest": longest}, check


SHORTEST_PATHS_CALLS = (distances_in_ranges, distances_of_entries, nodes_within)
