"""Graphs by the content of their edges, for tensors that hold what earlier ones did.

A program may make its ``edge_index`` anew at each step: the edges of a relation, added self-loops,
batches in a fixed order. Of the first such tensor a checksum is taken down, and at the second one
the graph is kept with a copy of the edges, which confirms all others.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastgraph.graphs.graph import Graph
from fastgraph.machine import native
from fastgraph.machine.forks import lock_across_forks

_MOST_SEEN = 4096


class _Kept(NamedTuple):
    graph: Graph
    edges: Tensor  # int32, as a graph has no more nodes
    nbytes: int  # of both


class Repeats:
    """Graphs that were built twice, the least recently used first."""

    def __init__(self) -> None:
        self._seen: dict[object, None] = {}
        self._kept: dict[object, _Kept] = {}
        self.nbytes = 0
        self._lock = lock_across_forks()

    def find(self, key: object, index: Tensor) -> Graph | None:
        """The graph of edges that are the same, if it is kept.

        Args:
            key: a checksum of ``index``, and what else a graph depends on.
            index: int32 or int64 ``[2, E]``, on the CPU.
        """
        kept = self._kept.get(key)
        if kept is None:
            return None
        same = native.library().same_indices
        if index.shape != kept.edges.shape or not all(map(same, index, kept.edges)):
            return None
        with self._lock:
            if self._kept.pop(key, None) is not None:
                self._kept[key] = kept  # the last one
        return kept.graph

    def add(self, key: object, index: Tensor, graph: Graph, bound: int) -> None:
        """Take down that a graph was built, and keep it if that happened before.

        Args:
            key: as for :meth:`find`.
            index: the same.
            graph: of it.
            bound: bytes that all graphs here may take.
        """
        with self._lock:
            if key not in self._seen:
                if len(self._seen) >= _MOST_SEEN:
                    self._seen.clear()
                self._seen[key] = None
                return
            edges = index.to(torch.int32, copy=True)
            nbytes = graph.nbytes + edges.nbytes
            self._remove(key)
            self._kept[key] = _Kept(graph, edges, nbytes)
            self.nbytes += nbytes
        self.trim(bound)

    def trim(self, bound: int) -> None:
        """Forget graphs until they take no more than so many bytes."""
        with self._lock:
            while self.nbytes > bound:
                self._remove(next(iter(self._kept)))

    def _remove(self, key: object) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self.nbytes -= kept.nbytes

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._seen.clear()
            self._kept.clear()
            self.nbytes = 0


REPEATS = Repeats()
