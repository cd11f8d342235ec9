"""Reach: is each node within a few steps of every other?"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from fastgraph.nn.adjacency import Adjacency, Integers, Rows
from fastgraph.nn.answer import Answer

WORDS = 32
"""Words of bitsets, which are visited in a row, that take as long as a node or a set of nodes that
other searches touch. With the default budget graphs of 4,096 nodes and 5 million edges are decided,
and all that are smaller."""

BITS = 64
"""Searches in one word of a bitset."""


def reachability(adjacency: Adjacency, layers: int, token: bool, budget: int) -> Answer:
    """Condition C3 of :func:`fastgraph.nn.conditions`.

    Args:
        adjacency: without the token.
        layers: steps that are allowed.
        token: whether there is a node joined with all.
        budget: a ``WORDS``-th of the words that searches may visit.

    Returns:
        No, with a pair of nodes of which the second is too far from the first; yes, with the node
        over which all others reach each other, if there is one; or undecided.
    """
    nodes = adjacency.num_nodes
    if nodes <= 1:
        return Answer("yes", "there is at most one node", _nodes(*range(nodes)))
    if len(adjacency.keys) == nodes * (nodes - 1):
        centre = None if layers == 1 else _nodes(0)  # over which it takes two steps
        return Answer("yes", "every node is joined with every other", centre)
    if layers == 1:
        return _no(*_missing_pair(adjacency), layers)
    if token:
        return Answer("yes", "the token is one step from all nodes", _nodes(nodes))
    return _by_searches(adjacency, layers, budget)


def _by_searches(adjacency: Adjacency, layers: int, budget: int) -> Answer:
    busiest = int(np.argmax(adjacency.along.degrees * adjacency.against.degrees))
    centre = busiest
    best: tuple[int, Integers, Integers] | None = None
    for _ in range(3):
        ahead = adjacency.along.depths(centre, layers)
        behind = adjacency.against.depths(centre, layers)
        for depths, is_ahead in ((ahead, True), (behind, False)):
            far = int(depths.argmax())
            if depths[far] > layers:
                return _no(*((centre, far) if is_ahead else (far, centre)), layers)
        if ahead.max() + behind.max() <= layers:
            reason = f"all nodes reach node {centre} in {behind.max()} steps, and it them in "
            return Answer("yes", f"{reason}{ahead.max()}", _nodes(centre))
        fringe = _fringe(ahead, behind, layers, adjacency.is_symmetric)
        cost = sum(-(-len(part) // BITS) for part in fringe) * layers * len(adjacency.keys)
        if best is None or cost < best[0]:
            best = cost, *fringe
        centre = _middle(adjacency, int(ahead.argmax()), layers)
    assert best is not None
    cost, starts, ends = best
    if cost > budget * WORDS:
        reason = f"searches from {len(starts) + len(ends)} nodes would visit {cost} words"
        return Answer("undecided", f"{reason}, more than {WORDS} times the budget of {budget}")
    if (pair := _too_far(adjacency.against, starts, layers)) is not None:
        return _no(*pair, layers)
    if (pair := _too_far(adjacency.along, ends, layers)) is not None:
        return _no(*pair[::-1], layers)
    looked = len(starts) + len(ends)
    return Answer("yes", f"searches from the {looked} outermost nodes reach all")


def _middle(adjacency: Adjacency, end: int, layers: int) -> int:
    """The node with most neighbours halfway along a shortest path that begins at ``end``."""
    ahead = adjacency.along.depths(end, layers)
    other = int(ahead.argmax())
    if ahead[other] > layers:
        return end  # from where the next search finds it, too
    behind = adjacency.against.depths(other, layers)
    middle = np.flatnonzero((ahead == ahead[other] // 2) & (ahead + behind == ahead[other]))
    return int(middle[adjacency.along.degrees[middle].argmax()])


def _fringe(
    ahead: Integers, behind: Integers, layers: int, is_symmetric: bool
) -> tuple[Integers, Integers]:
    """The nodes from and to which searches decide, after iFUB (Crescenzi et al., TCS 2013).

    Two nodes whose distances to and from the centre sum to ``layers`` or less are near each other.
    So with any bound on the first distance, what is left are pairs whose first node is beyond it,
    and pairs whose second node is beyond the rest of ``layers``. In a symmetric graph one of both
    is beyond the half.
    """
    none = np.empty(0, dtype=np.int64)
    if is_symmetric:
        return np.flatnonzero(ahead > layers // 2), none
    bounds = range(layers + 1)
    counts = [(behind > bound).sum() + (ahead > layers - bound).sum() for bound in bounds]
    first = int(np.argmin(counts))
    return np.flatnonzero(behind > first), np.flatnonzero(ahead > layers - first)


def _too_far(rows: Rows, starts: Integers, layers: int) -> tuple[int, int] | None:
    """A start and a node that is farther from it than ``layers``, by searches on bitsets.

    Args:
        rows: the nodes before each node, all lists with at least one.
        starts: where searches begin, 64 in each word.
        layers: steps that are allowed.
    """
    edges = max(len(rows.neighbours), 1)
    words = max((1 << 23) // edges, 1)  # rows of a round fit 64 MiB, or are one word wide
    for first in range(0, len(starts), words * BITS):
        part = starts[first : first + words * BITS]
        place = np.arange(len(part))
        bits = np.uint64(1) << (place % BITS).astype(np.uint64)
        reached: npt.NDArray[np.uint64] = np.zeros(
            (rows.num_nodes, -(-len(part) // BITS)), dtype=np.uint64
        )
        np.bitwise_or.at(reached, (part, place // BITS), bits)
        everything = np.bitwise_or.reduce(reached, axis=0)
        for _ in range(layers):
            reached |= np.bitwise_or.reduceat(reached[rows.neighbours], rows.ptr[:-1], axis=0)
            if np.array_equal(np.bitwise_and.reduce(reached, axis=0), everything):
                break
        missing = everything & ~reached
        if missing.any():
            node, word = (int(x[0]) for x in missing.nonzero())
            lowest = int(missing[node, word]) & -int(missing[node, word])
            return int(part[word * BITS + lowest.bit_length() - 1]), node
    return None


def _missing_pair(adjacency: Adjacency) -> tuple[int, int]:
    """Two nodes without an edge from the first to the second."""
    nodes = adjacency.num_nodes
    node = int(adjacency.along.degrees.argmin())
    others = np.setdiff1d(np.arange(nodes), np.append(adjacency.along.of(node), node))
    return node, int(others[0])


def _no(source: int, destination: int, layers: int) -> Answer:
    steps = "1 step" if layers == 1 else f"{layers} steps"
    reason = f"node {destination} is not within {steps} of node {source}"
    return Answer("no", reason, _nodes(source, destination))


def _nodes(*nodes: int) -> torch.Tensor:
    return torch.tensor(nodes, dtype=torch.int64)
