"""The seconds that each rank takes for its part of a graph, measured and predicted."""

from __future__ import annotations

import io
import os
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from fastgraph.dist.graphs.relayout import Placement
from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.phases import RECORDER, Phases, imbalance, per_epoch, separated
from fastgraph.dist.ranks.world import WORLD, RanksDivergedError
from fastgraph.dist.tensor.layout import Layout

if TYPE_CHECKING:
    from dgl import DGLGraph
    from rich.table import Table
    from torch_geometric.data import Data, HeteroData

_KINDS = ("predicted", "measured")


@dataclass
class Balance:
    """How long ranks take; the same on all of them. Printed, it is a table.

    Attributes:
        epochs: how many were measured.
        nodes: how many each rank has, of all types.
        edges: likewise.
        halo: how many nodes of others each rank's edges come from.
        measured: the phases of each rank in an epoch; empty as long as it is measured.
        predicted: likewise, if the graph was sharded by a model of performance.
        collectives: how many there are in an epoch.
        sent: bytes that each rank sends in an epoch.
    """

    epochs: int
    nodes: list[int]
    edges: list[int]
    halo: list[int]
    measured: list[Phases] = field(default_factory=list)
    predicted: list[Phases] | None = None
    collectives: float = 0.0
    sent: list[float] = field(default_factory=list)

    @property
    def work(self) -> list[int]:
        """The work of each rank, as partitions count it: its nodes and edges."""
        return [nodes + edges for nodes, edges in zip(self.nodes, self.edges, strict=True)]

    @property
    def imbalance(self) -> float:
        """The longest time that a rank computes, in means of all ranks; 1 is balanced."""
        return imbalance(self.measured)

    def speeds(self) -> list[float]:
        """Work that each rank does in a second of computing.

        One that has none is taken to be as fast as the slowest of the others.
        """
        pairs = zip(self.work, self.measured, strict=True)
        found = [work / phases.compute if phases.compute > 0 else 0.0 for work, phases in pairs]
        least = min((speed for speed in found if speed > 0), default=1.0)
        return [speed if speed > 0 else least for speed in found]

    def table(self) -> Table:
        """A table of all ranks, in milliseconds."""
        from rich.table import Table

        table = Table("rank", title=f"an epoch of each rank, ms ({self.epochs} measured)")
        headings = ["nodes", "edges", "halo"]
        kinds = [kind for kind in _KINDS if getattr(self, kind)]
        headings += [
            f"{phase}{', predicted' if kind == 'predicted' else ''}"
            for phase in ("compute", "exchange", "wait")
            for kind in kinds
        ]
        for heading in headings:
            table.add_column(heading, justify="right")
        for rank, numbers in enumerate(zip(self.nodes, self.edges, self.halo, strict=True)):
            times = [
                f"{1e3 * getattr(getattr(self, kind)[rank], phase):.1f}"
                for phase in ("compute", "exchange", "wait")
                for kind in kinds
            ]
            table.add_row(str(rank), *(f"{number:,}" for number in numbers), *times)
        return table

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=120).print(self.table())
        return text.getvalue().rstrip()

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw predicted and measured times of all ranks into a file, on rank 0.

        Args:
            path: whose suffix says the format, such as ``.svg`` or ``.png``.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        from fastgraph.dist.balance.plots import draw_balance

        if WORLD.rank == 0:
            draw_balance(self, path)


PREDICTED: weakref.WeakKeyDictionary[Layout, list[Phases]] = weakref.WeakKeyDictionary()
"""The predicted phases of the ranks, by the first layout of nodes of what was sharded so."""


@contextmanager
def measured(data: Data | HeteroData | DGLGraph, epochs: int = 1) -> Iterator[Balance]:
    """Measure what each rank does in the block. All ranks must enter it.

    The first epochs of a program make plans, sort graphs and choose kernels, so train some before.
    Nothing is sent meanwhile that would not be sent anyway.

    ::

        with fgd.measured(data, epochs=3) as balance:
            for _ in range(3):
                train()
        print(balance)
        fgd.rebalance(data, balance)

    Args:
        data: a graph that is sharded.
        epochs: how many epochs are in the block, by which times are divided.

    Returns:
        What is complete at the end of the block.

    Raises:
        ValueError: ``data`` is not sharded, or ``epochs`` is not above 0.
        RanksDivergedError: the program has issued different collectives on ranks.
    """
    if epochs < 1:
        raise ValueError(f"epochs must be an integer above 0, got {epochs}")
    measurement = Measurement(Placement.of(data))
    balance = measurement.balance
    balance.epochs = epochs
    with ExitStack() as if_it_fails:
        if_it_fails.callback(RECORDER.end)
        yield balance
        if_it_fails.pop_all()
    measurement.finish(epochs)


class Measurement:
    """A measurement that is going on, from when this is made until :meth:`finish`.

    As a context it measures until its end, by an error, too.

    Attributes:
        balance: filled in when it is finished.
    """

    def __init__(self, placement: Placement) -> None:
        nodes, edges = placement.counts()
        self.balance = Balance(1, nodes, edges, placement.halo())
        self.balance.predicted = PREDICTED.get(placement.nodes[0])
        transport.barrier()
        self._collectives, self._clock = RECORDER.begin(), RECORDER.clock
        self._started, self._first, self._last = time.perf_counter(), self._clock.now(), None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def seconds(self) -> float:
        """The seconds of the host since it began."""
        return time.perf_counter() - self._started

    def close(self) -> None:
        """Measure no further. Nobody waits for a device, as :meth:`finish` does."""
        self._last = self._clock.now()
        RECORDER.end()

    def finish(self, epochs: int) -> Balance:
        """The outcome, after :meth:`close` or at once. All ranks must call it.

        Raises:
            RanksDivergedError: the program has issued different collectives on ranks.
        """
        if self._last is None:
            self.close()
        between = self._clock.seconds
        seconds = between(self._first, self._last)
        sent = [one.sent for one in self._collectives]
        spent = [sum(between(*span) for span in one.spans) for one in self._collectives]
        found = transport.gather_objects((seconds, spent, sum(sent)))
        counts = {len(spent) for _, spent, _ in found}
        if len(counts) > 1:
            raise RanksDivergedError(
                f"ranks have issued different numbers of collectives while they were measured: "
                f"{[len(spent) for _, spent, _ in found]}"
            )
        balance = self.balance
        phases = separated([one for one, _, _ in found], [spent for _, spent, _ in found])
        balance.epochs = epochs
        balance.measured = [per_epoch(one, epochs) for one in phases]
        balance.collectives = len(sent) / epochs
        balance.sent = [bytes_ / epochs for _, _, bytes_ in found]
        return balance


def by_speed(speeds: Sequence[float]) -> list[float]:
    """Shares of the work by which ranks of these speeds take equally long; they add up to 1."""
    return [speed / sum(speeds) for speed in speeds]
