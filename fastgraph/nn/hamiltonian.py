"""Hamiltonian paths: does one path along edges visit every node once?"""

from __future__ import annotations

from collections.abc import Iterable

import networkx as nx
import numpy as np
import torch

from fastgraph.nn.adjacency import Adjacency, Integers
from fastgraph.nn.answer import Answer
from fastgraph.nn.hamiltonian_search import EXACT_NODES, exact_cost, exact_path, path_by_rotations

STRUCTURE_EDGES = 250_000
"""Blocks and strong components are looked for among so many edges at most: in Python objects each
takes some microseconds and hundreds of bytes."""

SMALL_BUDGET = 1 << 17
"""Of a search before one that is exact."""


def hamiltonian_path(adjacency: Adjacency, token: bool, budget: int) -> Answer:
    """Condition C2 of :func:`fastgraph.nn.conditions`.

    A path through a token is one or two paths without it, and two paths are one with it: rules
    count the paths that may cover the nodes, ``paths`` below, and their ends, twice as many.

    Args:
        adjacency: without the token.
        token: whether there is a node joined with all, whose number is the next one.
        budget: nodes, or words of sets of nodes, that a search may touch.

    Returns:
        Yes, with the path, or with the nodes by ascending degree if a theorem says it; no, with
        nodes that no such paths can cover; or undecided.
    """
    nodes, paths = adjacency.num_nodes, 2 if token else 1
    if nodes <= 1:
        return Answer("yes", "there is at most one node", torch.arange(nodes + token))
    for rule in (_ends, _components, _theorems, _strong_components, _blocks):
        answer = rule(adjacency, paths)
        if answer is not None:
            return answer
    searched = adjacency.with_token() if token else adjacency
    is_small = searched.num_nodes <= EXACT_NODES and exact_cost(searched.num_nodes) <= budget
    path = path_by_rotations(searched, min(budget, SMALL_BUDGET) if is_small else budget)
    if path is None and is_small:
        path = exact_path(searched)
        if path is None:
            return Answer("no", "none of all sets of nodes has a path to the next", None)
    if path is None:
        return Answer("undecided", f"no path was found within a budget of {budget}")
    if not searched.has_path(path):
        raise RuntimeError("a search found a path with nodes that no edge joins")
    return Answer("yes", "a path was found", torch.from_numpy(path))


def _ends(adjacency: Adjacency, paths: int) -> Answer | None:
    """Nodes with fewer than two neighbours are at ends of paths, alone at both."""
    lacking = np.maximum(2 - adjacency.undirected.along.degrees, 0)
    if lacking.sum() > 2 * paths:
        leaves, alone = (int((lacking == count).sum()) for count in (1, 2))
        reason = f"{leaves} nodes have one neighbour and {alone} none, "
        return _no(f"{reason}but there are {2 * paths} ends", np.flatnonzero(lacking))
    for rows, kind in ((adjacency.against, "into"), (adjacency.along, "out of")):
        without = np.flatnonzero(rows.degrees == 0)
        if len(without) > paths:
            return _no(f"no edge leads {kind} {len(without)} nodes", without)
    return None


def _components(adjacency: Adjacency, paths: int) -> Answer | None:
    first = np.unique(adjacency.components)
    if len(first) > paths:
        return _no(f"there are {len(first)} components", first)
    return None


def _theorems(adjacency: Adjacency, paths: int) -> Answer | None:
    """Theorems of Dirac (1952) and Chvatal (1972), for the graph joined with ``paths`` nodes.

    A cycle through all of that graph is as many paths through the graph. Chvatal's condition holds
    wherever Ore's (1960) does, and takes degrees instead of pairs.
    """
    nodes = adjacency.num_nodes
    if not adjacency.is_symmetric or nodes + paths < 3:
        return None
    order = adjacency.along.degrees.argsort(kind="stable")
    degrees = adjacency.along.degrees[order]
    if 2 * degrees[0] >= nodes - paths:
        reason = f"Dirac: every node has at least {degrees[0]} neighbours of {nodes - 1}"
        return Answer("yes", reason, torch.from_numpy(order))
    joined = np.append(degrees + paths, np.full(paths, nodes + paths - 1))
    size = len(joined)
    small = np.arange(1, (size + 1) // 2)
    if np.all((joined[small - 1] > small) | (joined[size - small - 1] >= size - small)):
        return Answer("yes", "Chvatal: by the sequence of degrees", torch.from_numpy(order))
    return None


def _strong_components(adjacency: Adjacency, paths: int) -> Answer | None:
    """Strong components of which none reaches another are on paths of their own."""
    if adjacency.is_symmetric or len(adjacency.keys) > STRUCTURE_EDGES:
        return None
    graph = nx.DiGraph(_edges(adjacency))
    condensed = nx.condensation(graph)
    for generation in nx.topological_generations(condensed):
        if len(generation) > paths:
            first = [min(condensed.nodes[component]["members"]) for component in generation]
            reason = f"{len(first)} strong components do not reach each other"
            return _no(reason, np.sort(first))
    return None


def _blocks(adjacency: Adjacency, paths: int) -> Answer | None:
    """In a leaf of the tree of blocks a path ends; a path leads through two parts around a node."""
    undirected = adjacency.undirected
    if len(undirected.keys) > STRUCTURE_EDGES:
        return None
    found = nx.biconnected_components(nx.Graph(_edges(undirected)))
    blocks = [np.fromiter(block, np.int64) for block in found]
    if not blocks:
        return None
    memberships = np.bincount(np.concatenate(blocks), minlength=adjacency.num_nodes)
    cut = int(memberships.argmax())
    parts = memberships[cut] + len(np.unique(adjacency.components)) - 1
    if parts > paths + 1:
        return _no(f"without node {cut} there are {parts} parts", np.array([cut]))
    ends: list[int] = []
    for block in blocks:
        cuts = memberships[block] > 1
        if cuts.sum() == 1:
            ends.append(block[~cuts].min())
        elif not cuts.any():  # a component by itself
            ends += [block.min()] * 2
    ends += 2 * np.flatnonzero(memberships == 0).tolist()
    if len(ends) > 2 * paths:
        reason = f"{len(ends)} parts that one node joins to the rest need an end each"
        return _no(f"{reason}, but there are {2 * paths}", np.unique(ends))
    return None


def _edges(adjacency: Adjacency) -> Iterable[tuple[int, int]]:
    return zip(adjacency.sources.tolist(), adjacency.destinations.tolist(), strict=True)


def _no(reason: str, nodes: Integers) -> Answer:
    return Answer("no", reason, torch.from_numpy(np.asarray(nodes, dtype=np.int64)))
