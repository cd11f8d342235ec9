"""Choices that ``python -m fastgraph tune`` has measured on this machine, cached between runs.

Choices are kept by everything on which they depend: the machine says which file, the graph and its
use which entry. For orders of rows on the CPU a machine is the processor, the number of threads and
the compiled kernels, and no choice changes a bit of a result. For kernels on a GPU it is the kind
of GPU, its driver and the build of the kernels. These differ in the last bits, so a choice is used
where the setting ``measure`` is on, in place of a measurement there: runs that follow it have the
same bits. Where nothing is known, policies that learn while a program runs go on as ever.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from fastgraph.graphs.graph import Graph
from fastgraph.machine import cache, native
from fastgraph.machine.processor import cpu_model

Key = TypeVar("Key", bound=Hashable)
Choice = TypeVar("Choice")


class Kept(Generic[Key, Choice]):
    """Choices of one kind in the cache directory, read at the first question for a machine.

    Args:
        kind: of the choices; with another number where entries come to mean something else.
        entry: a use and its choice, of what a file has of them. It raises TypeError or ValueError
            where they are none.
    """

    def __init__(self, kind: str, entry: Callable[[Any, Any], tuple[Key, Choice]]) -> None:
        self.kind, self._entry = kind, entry
        self._known: dict[str, dict[str, dict[Key, Choice]]] = {}

    @functools.cached_property
    def exists(self) -> bool:
        """False if nothing was kept here so far, of any machine."""
        return cache.path_of(self.kind, "").parent.is_dir()

    def of(self, machine: str, graph: Graph) -> Mapping[Key, Choice]:
        """The choices for the uses of a graph; empty where nothing is known."""
        if machine not in self._known:
            self._known[machine] = self._read(machine)
        known = self._known[machine]
        return known.get(identity_of(graph), {}) if known else {}

    def keep(self, machine: str, found: Mapping[str, Mapping[Key, Choice]]) -> None:
        """Keep choices by the identities of graphs, beside those for others."""
        with cache.locked(self.kind, machine):
            known = self._known[machine] = self._read(machine)
            for graph, chosen in found.items():
                known[graph] = {**known.get(graph, {}), **chosen}
            content = {graph: list(chosen.items()) for graph, chosen in known.items()}
            cache.write(self.kind, machine, content)
        self.exists = True

    def again(self) -> Kept[Key, Choice]:
        """The same choices, of which nothing was read so far, as in another run."""
        return Kept(self.kind, self._entry)

    def _read(self, machine: str) -> dict[str, dict[Key, Choice]]:
        kept: Any = cache.read(self.kind, machine)
        try:
            return {
                str(graph): dict(self._entry(use, choice) for use, choice in chosen)
                for graph, chosen in (kept or {}).items()
            }
        except (AttributeError, TypeError, ValueError):
            return {}


def identity_of(graph: Graph) -> str:
    """The numbers of nodes and edges, and all degrees of destinations in the order of the nodes."""
    degrees = native.library().checksum(graph.by_destination.ptr.cpu())
    return f"{graph.num_src} {graph.num_dst} {graph.num_edges} {degrees & (2**64 - 1):016x}"


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


def _order(use: Any, row_bytes: Any) -> tuple[Use, int]:
    transpose, attention, gathered = use
    return Use(bool(transpose), bool(attention), int(gathered)), int(row_bytes)


def _kernel(kind: Any, name: Any) -> tuple[str, str]:
    return str(kind), str(name)


ORDERS: Kept[Use, int] = Kept("orders-1", _order)
"""Orders of rows on the CPU."""

KERNELS: Kept[str, str] = Kept("kernels-2", _kernel)
"""Names of the fastest kernels on a GPU, by the kind of a call: operator, width, dtype, options."""

_replaced: Callable[[Graph], Orders] | None = None


def orders_of(graph: Graph) -> Orders:
    """The orders of rows for a graph on the CPU; :data:`NOTHING` where nothing is known."""
    if _replaced is not None:
        return _replaced(graph)
    # Most programs were never tuned, and need not know what the kernels are.
    return ORDERS.of(machine(), graph) or NOTHING if ORDERS.exists else NOTHING


@contextlib.contextmanager
def replaced(orders: Callable[[Graph], Orders]) -> Iterator[None]:
    """Within, graphs that are seen for the first time have other orders; for measuring."""
    global _replaced
    before, _replaced = _replaced, orders
    try:
        yield
    finally:
        _replaced = before


def machine() -> str:
    """Everything below orders of rows, as text."""
    return _machine(torch.get_num_threads())


@functools.cache
def _machine(threads: int) -> str:
    return f"{cpu_model()}; {threads} threads; kernels {native.cpu_digest()}"


def path() -> Path:
    """The file in which orders of rows on this machine are kept."""
    return cache.path_of(ORDERS.kind, machine())
