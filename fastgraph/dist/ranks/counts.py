"""Counters of what a program has gathered and sent, and their part of ``fastgraph.status()``."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastgraph.routing.status import FURTHER_TABLES

if TYPE_CHECKING:
    from rich.table import Table


@dataclass
class Counts:
    """Counters of this rank.

    Attributes:
        gathers: operations that no rule covers, for which sharded tensors were gathered as a whole;
            by name. The program goes on with the right values, but slower.
        calls: collectives that were issued, by kind.
        sent: bytes that this rank has sent, by kind of collective.
        plans: exchanges of rows that were planned.
        attention: calls of fused attention, by how they were computed and, where that is not what
            was asked for, why.
        aggregation: the same for other operators, in graphs of mode ``"grid"`` or ``"auto"``.
        halo: calls of operators that need rows of others, by what is computed while these travel
            or, if nothing is, why.
    """

    gathers: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    plans: int = 0
    attention: Counter[str] = field(default_factory=Counter)
    aggregation: Counter[str] = field(default_factory=Counter)
    halo: Counter[str] = field(default_factory=Counter)

    def reset(self) -> None:
        """Forget everything."""
        self.gathers.clear()
        self.calls.clear()
        self.sent.clear()
        self.plans = 0
        self.attention.clear()
        self.aggregation.clear()
        self.halo.clear()

    def tables(self) -> list[Table]:
        """Tables for people; none where nothing was sent or gathered."""
        from rich.table import Table

        tables = []
        if self.calls:
            table = Table("collective", title="sent by this rank")
            table.add_column("calls", justify="right")
            table.add_column("bytes", justify="right")
            for kind, calls in sorted(self.calls.items()):
                table.add_row(kind, str(calls), f"{self.sent[kind]:,}")
            tables.append(table)
        listed = [
            ("computed by", "fused attention on sharded tensors", "calls", self.attention),
            ("computed by", "other fused operators", "calls", self.aggregation),
            ("computed meanwhile", "exchanges of rows for fused operators", "calls", self.halo),
            ("operation", "gathered as a whole, for want of a rule", "times", self.gathers),
        ]
        for heading, title, unit, counter in listed:
            if counter:
                table = Table(heading, title=title)
                table.add_column(unit, justify="right")
                for name, times in counter.most_common():
                    table.add_row(name, str(times))
                tables.append(table)
        return tables


COUNTS = Counts()

FURTHER_TABLES.append(COUNTS.tables)
