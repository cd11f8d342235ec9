"""Measurements of orders of rows, for each use of a graph, and of orders of its nodes."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TypeVar

import torch
from torch import Tensor

from fastgraph.cli.tuning.recording import Program
from fastgraph.cli.tuning.replay import Candidate, Replay, renamed
from fastgraph.graphs.graph import Graph
from fastgraph.machine import native
from fastgraph.reordering import reorder
from fastgraph.tune import choices
from fastgraph.tune.choices import Use
from fastgraph.tune.row_order import ordered

_FEWEST_ROUNDS, _MOST_ROUNDS = 3, 20
_FASTER = 0.97
"""Another order must take at most this share of the time, so that noise chooses nothing."""

# Those that are found in less time come first, and the packages that they need.
_ORDERS = {"degree": (), "rcm": ("scipy",), "cluster": ("numpy", "pymetis")}

Key = TypeVar("Key")


@dataclass
class Measured:
    """Calls that are alike.

    Attributes:
        replay: makes them.
        layers: that make them in a step, once for each time.
        graph: whose edges they need.
        identity: of the graph.
        uses: of the graph.
        as_they_are: seconds of a call with rows as they are; infinite where the budget was spent.
        in_order: the same by use whose rows are in another order.
    """

    replay: Replay
    layers: list[str]
    graph: Graph
    identity: str
    uses: set[Use]
    as_they_are: float = math.inf
    in_order: dict[Use, float] = field(default_factory=dict)

    @property
    def is_measured(self) -> bool:
        """True if the budget was enough."""
        return math.isfinite(self.as_they_are)


@dataclass(frozen=True)
class Reordering:
    """The gain from another order of the nodes of a graph.

    Attributes:
        order: see :func:`fastgraph.reorder`.
        seconds: to find it.
        reads: rows that are read from memory, over those before, by a model of the cache.
        step: seconds of all calls on this graph, over those before.
    """

    order: str
    seconds: float
    reads: float
    step: float


class Budget:
    """Seconds to spend on measurements."""

    def __init__(self, seconds: float) -> None:
        self._end = time.perf_counter() + seconds

    @property
    def left(self) -> float:
        """Seconds; 0 where there are none."""
        return max(0.0, self._end - time.perf_counter())


def calls_of(program: Program) -> list[Measured]:
    """The calls on the CPU that have an order of rows, not measured yet; the longest first."""
    found = []
    for call, layers in program.calls.items():
        if call.device != "cpu":
            continue
        replay = Replay(call, program.tensors)
        if not replay.has_graph:
            continue
        candidate = Candidate(replay)
        seconds = candidate.seconds() * len(layers)
        graph = candidate.graph
        if graph is not None:
            one = Measured(replay, layers, graph, choices.identity_of(graph), candidate.uses)
            found.append((seconds, one))
    return [one for _, one in sorted(found, key=lambda pair: -pair[0])]


def by_graph(found: Sequence[Measured]) -> dict[str, list[Measured]]:
    """Calls by the identity of their graph."""
    graphs: dict[str, list[Measured]] = {}
    for one in found:
        graphs.setdefault(one.identity, []).append(one)
    return graphs


def measure(found: Sequence[Measured], budget: Budget) -> None:
    """Fill in the times of calls, as far as the budget goes."""
    wide = _widest(found)
    has_order = {
        (identity, transpose): _has_order(ones[0].graph, transpose, wide[identity, transpose])
        for identity, ones in by_graph(found).items()
        for transpose in {use.transpose for one in ones for use in one.uses}
    }
    for place, one in enumerate(found):
        share = budget.left / (len(found) - place)
        if not share:
            return
        candidates: dict[Use | None, Candidate] = {None: Candidate(one.replay)}
        for use in sorted(one.uses):
            key = one.identity, use.transpose
            if has_order[key]:
                candidates[use] = Candidate(one.replay, {use: wide[key]})
        times = _times(candidates, share)
        one.as_they_are = times[None]
        one.in_order = {use: times[use] for use in candidates if use is not None}


def chosen(found: Sequence[Measured]) -> dict[str, dict[Use, int]]:
    """For each graph and use that was measured, the bytes of the order of rows; 0 for none."""
    before: dict[tuple[str, Use], float] = {}
    after: dict[tuple[str, Use], float] = {}
    for one in found:
        for use in one.uses if one.is_measured else ():
            key, times = (one.identity, use), len(one.layers)
            before[key] = before.get(key, 0.0) + times * one.as_they_are
            after[key] = after.get(key, 0.0) + times * one.in_order.get(use, one.as_they_are)
    wide = _widest(found)
    orders: dict[str, dict[Use, int]] = {}
    for (graph, use), seconds in before.items():
        is_faster = after[graph, use] < _FASTER * seconds
        orders.setdefault(graph, {})[use] = wide[graph, use.transpose] if is_faster else 0
    return orders


def reorderings(found: Sequence[Measured], budget: Budget) -> list[Reordering]:
    """The gains of the calls on one graph from other orders of nodes, as far as the budget goes.

    Args:
        found: calls on it, which need not have been measured.
        budget: METIS is not interrupted where it takes longer.

    Returns:
        None for graphs of two sets of nodes, and for orders whose packages are not installed.

    Raises:
        fastgraph.dist.PartitionError: METIS failed.
    """
    graph = found[0].graph
    if graph.num_src != graph.num_dst or not graph.num_edges or not find_spec("torch_geometric"):
        return []
    row_bytes = max(use.row_bytes for one in found for use in one.uses)
    reads = _count_reads(graph, row_bytes)
    possible = [order for order, needs in _ORDERS.items() if all(map(find_spec, needs))]
    results = []
    for place, order in enumerate(possible):
        share = budget.left / (len(possible) - place)
        if not share:
            break
        inverse, seconds = _inverse(graph, order)
        left = max(0.0, share - seconds) / len(found)
        before = after = 0.0
        for one in found:
            other = Candidate(one.replay, names=renamed(one.replay.names, inverse))
            times = _times({"before": Candidate(one.replay), "after": other}, left)
            before += len(one.layers) * times["before"]
            after += len(one.layers) * times["after"]
        assert other.graph is not None
        ratio = _count_reads(other.graph, row_bytes) / max(reads, 1)
        results.append(Reordering(order, seconds, ratio, after / before))
    return results


def _times(candidates: Mapping[Key, Candidate], seconds: float) -> dict[Key, float]:
    """The least time of each, in turn for so many seconds at most, after each was made once."""
    for candidate in candidates.values():
        candidate.seconds()
    budget, rounds = Budget(seconds), 0
    least = dict.fromkeys(candidates, math.inf)
    while rounds < _FEWEST_ROUNDS or (rounds < _MOST_ROUNDS and budget.left):
        for name, candidate in candidates.items():
            least[name] = min(least[name], candidate.seconds())
        rounds += 1
    return least


def _widest(found: Sequence[Measured]) -> dict[tuple[str, bool], int]:
    """The bytes of the widest features that are gathered, by graph and transposition.

    So that a graph has one other order for each, as many bytes as its edges take.
    """
    wide: dict[tuple[str, bool], int] = {}
    for one in found:
        for use in one.uses:
            key = one.identity, use.transpose
            wide[key] = max(wide.get(key, 0), use.row_bytes)
    return wide


def _has_order(graph: Graph, transpose: bool, row_bytes: int) -> bool:
    """True if an order of rows is found that may help."""
    if graph.num_src != graph.num_dst:
        return False
    rows, _ = ordered(native.library(), graph.grouped(transpose=transpose), row_bytes)
    return rows.order is not None


def _inverse(graph: Graph, order: str) -> tuple[Tensor, float]:
    """The new number of each node of a graph, and the seconds in which the order was found."""
    from torch_geometric.data import Data

    data = Data(edge_index=torch.stack(graph.edge_list()), num_nodes=graph.num_src)
    start = time.perf_counter()
    return reorder(data, order).inverse, time.perf_counter() - start


def _count_reads(graph: Graph, row_bytes: int) -> int:
    """Rows of so many bytes that are read from memory in a pass, by a model of the cache."""
    reads: int = native.library().count_reads(*graph.by_destination.arguments[:4], row_bytes)
    return reads
