"""Choices that ``python -m fastgraph tune`` has measured on this machine, cached between runs.

Choices are kept by everything on which they depend: the processor, the number of threads and the
compiled kernels say which file, the graph and its use which entry. No choice changes a bit of a
result. Where nothing is known, policies that learn while a program runs go on as ever.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from fastgraph.graphs.graph import Graph
from fastgraph.machine import cache, native
from fastgraph.machine.processor import cpu_model

_KIND = "choices-1"
"""With another number where entries come to mean something else."""


class Use(NamedTuple):
    """A use of a graph that has an order of its rows.

    Attributes:
        transpose: whether sources aggregate.
        attention: whether the kernel is one of attention.
        row_bytes: of the features of a node that are gathered.
    """

    transpose: bool
    attention: bool
    row_bytes: int


Orders = Mapping[Use, int]
"""By use, for rows of how many bytes the order of rows is to be found; 0: rows as they are."""

NOTHING: Orders = {}
"""Of graphs that nobody has measured."""


class Source(Protocol):
    """Knows what was chosen."""

    def of(self, graph: Graph) -> Orders:
        """The choices for a graph on the CPU; empty where nothing is known."""
        ...


class KeptOrders:
    """Choices in the cache directory, read at the first question."""

    def __init__(self) -> None:
        self._known: dict[str, dict[Use, int]] | None = None

    def of(self, graph: Graph) -> Orders:
        """See :class:`Source`."""
        if self._known is None:
            self._known = _read()
        return self._known.get(identity_of(graph), NOTHING) if self._known else NOTHING

    def keep(self, found: Mapping[str, Orders]) -> None:
        """Keep choices by the identities of graphs, beside those for other graphs."""
        with cache.locked(_KIND, _machine()):
            self._known = _read()
            for graph, orders in found.items():
                self._known[graph] = {**self._known.get(graph, {}), **orders}
            content = {
                graph: [[*use, row_bytes] for use, row_bytes in orders.items()]
                for graph, orders in self._known.items()
            }
            cache.write(_KIND, _machine(), content)


def identity_of(graph: Graph) -> str:
    """The numbers of nodes and edges, and all degrees of destinations in the order of the nodes."""
    degrees = native.library().checksum(graph.by_destination.ptr.cpu())
    return f"{graph.num_src} {graph.num_dst} {graph.num_edges} {degrees & (2**64 - 1):016x}"


def path() -> Path:
    """The file in which choices for this machine are kept."""
    return cache.path_of(_KIND, _machine())


def _machine() -> str:
    threads = torch.get_num_threads()
    return f"{cpu_model()}; {threads} threads; kernels {native.cpu_digest()}"


def _read() -> dict[str, dict[Use, int]]:
    # Most programs were never tuned, and need not know what the kernels are.
    if not cache.path_of(_KIND, "").parent.is_dir():
        return {}
    kept: Any = cache.read(_KIND, _machine())
    try:
        return {
            graph: {
                Use(bool(transpose), bool(attention), int(gathered)): int(row_bytes)
                for transpose, attention, gathered, row_bytes in orders
            }
            for graph, orders in (kept or {}).items()
        }
    except (AttributeError, TypeError, ValueError):
        return {}


KEPT = KeptOrders()

_source: Source = KEPT


def of(graph: Graph) -> Orders:
    """The choices for a graph on the CPU."""
    return _source.of(graph)


@contextlib.contextmanager
def replaced(source: Source) -> Iterator[None]:
    """Within, graphs that are seen for the first time ask another source; for measuring."""
    global _source
    before, _source = _source, source
    try:
        yield
    finally:
        _source = before
