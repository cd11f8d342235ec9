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
from fastgraph.graphs.memo import bound_of
from fastgraph.machine import native
from fastgraph.machine.forks import lock_across_forks

_MOST_SEEN = 4096
_SHARE = 16


class _Kept(NamedTuple):
    graph: Graph
    edges: Tensor  # int32, as a graph has no more nodes
    nbytes: int  # of both, when it was used last


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
            key: a checksum of ``index``, its shape, and what else a graph depends on.
            index: int32 or int64 ``[2, E]``, on the CPU.
        """
        kept = self._kept.get(key)
        if kept is None or not all(map(native.library().same_indices, index, kept.edges)):
            return None
        with self._lock:
            self._keep(key, kept.graph, kept.edges)  # as the last one, with what it has learnt
        return kept.graph

    def add(self, key: object, index: Tensor, graph: Graph) -> None:
        """Take down that a graph was built, and keep it if that happened before.

        Args:
            key: as for :meth:`find`.
            index: the same.
            graph: of it.
        """
        with self._lock:
            if key not in self._seen:
                if len(self._seen) >= _MOST_SEEN:
                    self._seen.clear()
                self._seen[key] = None
                return
            self._keep(key, graph, index.to(torch.int32, copy=True))
        self.trim()

    def trim(self) -> None:
        """Forget graphs until they take no more than a small part of the ``cache_bytes`` setting.

        Their tensors may be gone for good.
        """
        bound = bound_of(-1) // _SHARE
        with self._lock:
            while self.nbytes > bound:
                self._remove(next(iter(self._kept)))

    def _keep(self, key: object, graph: Graph, edges: Tensor) -> None:
        self._remove(key)
        nbytes = graph.nbytes + edges.nbytes
        self._kept[key] = _Kept(graph, edges, nbytes)
        self.nbytes += nbytes

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
