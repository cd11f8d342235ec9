"""Neighbours of nodes in both directions, and searches among them."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


class Rows:
    """Lists of neighbours in a row.

    Attributes:
        ptr: ``[nodes + 1]``, offsets of the lists.
        neighbours: ``[edges]``, each list ascending.

    Args:
        keys: ``node * nodes + neighbour`` of each edge, ascending.
        num_nodes: of the graph.
    """

    def __init__(self, keys: Integers, num_nodes: int) -> None:
        self.num_nodes = num_nodes
        self.neighbours = keys % max(num_nodes, 1)
        self.degrees = np.bincount(keys // max(num_nodes, 1), minlength=num_nodes)
        self.ptr = np.concatenate([[0], np.cumsum(self.degrees)])

    def of(self, node: int) -> Integers:
        """The neighbours of one node."""
        found: Integers = self.neighbours[self.ptr[node] : self.ptr[node + 1]]
        return found

    def of_all(self, nodes: Integers) -> Integers:
        """The neighbours of several nodes, list by list."""
        counts = self.degrees[nodes]
        ends = np.cumsum(counts)
        within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
        found: Integers = self.neighbours[np.repeat(self.ptr[nodes], counts) + within]
        return found

    def depths(self, start: int, deepest: int) -> Integers:
        """The distance of each node from ``start`` by a breadth-first search.

        Args:
            start: a node.
            deepest: where the search ends; nodes farther away have ``deepest + 1``, and so have
                those that cannot be reached.
        """
        depths = np.full(self.num_nodes, deepest + 1)
        depths[start] = 0
        frontier = np.array([start])
        for depth in range(1, deepest + 1):
            found = self.of_all(frontier)
            found = found[depths[found] > depth]
            depths[found] = depth
            frontier = np.unique(found)
            if not len(frontier):
                break
        return depths


class Adjacency:
    """A directed graph of which each edge counts once, and no self-loop.

    Attributes:
        num_nodes: of the graph.
        keys: ``source * num_nodes + destination`` of the edges, ascending.

    Args:
        source: of each edge, int64 ``[edges]``.
        destination: of each edge, int64 ``[edges]``.
        num_nodes: of the graph.
    """

    def __init__(self, source: Integers, destination: Integers, num_nodes: int) -> None:
        self.num_nodes = num_nodes
        is_edge = source != destination
        self.keys = np.unique(source[is_edge] * num_nodes + destination[is_edge])

    @cached_property
    def sources(self) -> Integers:
        """Of the edges, in the order of ``keys``."""
        return self.keys // max(self.num_nodes, 1)

    @cached_property
    def destinations(self) -> Integers:
        """Of the edges, in the order of ``keys``."""
        return self.keys % max(self.num_nodes, 1)

    @cached_property
    def along(self) -> Rows:
        """The nodes to which the edges of each node lead."""
        return Rows(self.keys, self.num_nodes)

    @cached_property
    def _reversed_keys(self) -> Integers:
        return np.sort(self.destinations * self.num_nodes + self.sources)

    @cached_property
    def against(self) -> Rows:
        """The nodes from which edges lead to each node."""
        return Rows(self._reversed_keys, self.num_nodes)

    @cached_property
    def is_symmetric(self) -> bool:
        """True if every edge has its opposite."""
        return np.array_equal(self.keys, self._reversed_keys)

    @cached_property
    def undirected(self) -> Adjacency:
        """The same graph with every edge in both directions."""
        if self.is_symmetric:
            return self
        ends = (self.sources, self.destinations)
        return Adjacency(np.concatenate(ends), np.concatenate(ends[::-1]), self.num_nodes)

    @cached_property
    def components(self) -> Integers:
        """The smallest node of the connected component of each node.

        Labels of neighbours are joined at their roots, and paths to these halved, so that a path of
        n nodes takes about log n rounds and not n (Shiloach and Vishkin, J. Algorithms 1982).
        """
        labels = np.arange(self.num_nodes)
        while True:
            ends = labels[self.sources], labels[self.destinations]
            low, high = np.minimum(*ends), np.maximum(*ends)
            if np.array_equal(low, high):
                return labels
            np.minimum.at(labels, high, low)
            while not np.array_equal(labels, labels[labels]):
                labels = labels[labels]

    def with_token(self) -> Adjacency:
        """The graph with one node more, the last, which is joined with all in both directions."""
        nodes, token = np.arange(self.num_nodes), np.full(self.num_nodes, self.num_nodes)
        source = np.concatenate([self.sources, nodes, token])
        destination = np.concatenate([self.destinations, token, nodes])
        return Adjacency(source, destination, self.num_nodes + 1)

    def has_path(self, path: Integers) -> bool:
        """True if ``path`` follows edges and has every node once."""
        if not np.array_equal(np.sort(path), np.arange(self.num_nodes)):
            return False
        wanted = path[:-1] * self.num_nodes + path[1:]
        places = np.searchsorted(self.keys, wanted)
        return bool(np.all(np.append(self.keys, -1)[places] == wanted))
